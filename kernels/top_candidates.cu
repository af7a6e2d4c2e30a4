// The k best of each row's candidates, listed by ascending position. One block a row.
//
// The order is total (score_order.cuh), so the k best are those from some key upwards. An interval of keys that holds
// this key is narrowed: its candidates are counted in up to 2048 equal parts, the part with the k-th best is the next
// interval, until it holds only candidates that are wanted. A bitmap of the chosen positions then gives each its place:
// the number of set bits before its own.
//
// select_candidates: what index_scan.cu left, whose counts give the first interval.
// thin_candidates: in front of it, many blocks a row: of what index_scan.cu left, those that the counts leave open.
// merge_owners (OWNERS = N is defined): the best of N owners, each of which has listed its own best.

#include "score_order.cuh"

#ifdef OWNERS
constexpr int THREADS = 512;  // two blocks a multiprocessor
#else
constexpr int THREADS = 1024;
#endif
constexpr int WARPS = THREADS / 32;
constexpr int PARTS = 2048;
constexpr int NEAR = 4096;  // candidates of an interval that shared memory holds
constexpr int BATCH = 8;    // loads of a thread in flight
constexpr unsigned ALL = 0xffffffff;
constexpr Key NONE = 0;

// Keys low..high, of which `num_inside` are candidates and the best `num_wanted` of these are chosen.
struct Interval {
    Key low, high;
    int num_wanted, num_inside;
};

// What `find_part` works in, and what it found.
struct Found {
    int warp_total[WARPS];
    int part, num_above, num_inside;
};

struct __align__(16) Shared : Found {
    Key chosen[TOP_K];
    Key near[NEAR];
    int count[PARTS];
    int num_chosen, num_near;
    Key warp_low[WARPS], warp_high[WARPS];
    // Behind it: a bit for each of 2^LOG_POSITIONS positions, then for each 128 of them how many bits are set before
    // them in their warp's share.
};

constexpr int NUM_GROUPS = 1 << (LOG_POSITIONS - 7);
constexpr int WARP_GROUPS = NUM_GROUPS / WARPS;
static_assert(sizeof(Shared) + NUM_GROUPS * 18 <= SHARED_BYTES, "the launcher gives less shared memory");

// Sum of `mine` over the threads before this one.
__device__ inline int sum_before(Found& s, int mine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int up_to_here = mine;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(ALL, up_to_here, step);
        if (lane >= step) up_to_here += other;
    }
    if (lane == 31) s.warp_total[warp] = up_to_here;
    __syncthreads();
    const int before = __reduce_add_sync(ALL, lane < warp ? s.warp_total[lane] : 0);
    __syncthreads();
    return before + up_to_here - mine;
}

// Find the part with the wanted one, counted from the highest part down. Thread i brings the counts of parts
// `N * (THREADS - 1 - i) + 0..N - 1`. Part -1 where there are fewer in all.
template <int N>
__device__ inline void find_part(Found& s, const int (&count)[N], int num_wanted) {
    int mine = 0;
    for (int i = 0; i < N; ++i) mine += count[i];
    int above = sum_before(s, mine);
    if (threadIdx.x == 0) s.part = -1, s.num_above = 0, s.num_inside = 0;
    __syncthreads();
    if (above < num_wanted && num_wanted <= above + mine) {
        bool found = false;
#pragma unroll
        for (int i = N - 1; i >= 0; --i) {
            if (!found && above + count[i] >= num_wanted) {
                s.part = N * (THREADS - 1 - int(threadIdx.x)) + i, s.num_above = above, s.num_inside = count[i];
                found = true;
            }
            above += count[i];
        }
    }
    __syncthreads();
}

// Where candidates are. `each(f)` calls f(key) for all, with NONE where a thread has none while its warp still has.
struct InMemory {
    const Candidate* list;
    int num;

    // `f` takes a batch of keys.
    template <typename F>
    __device__ void each_batch(F f) const {
        for (int base = threadIdx.x; base - int(threadIdx.x) < num; base += BATCH * THREADS) {
            Candidate batch[BATCH];
            Key key[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (base + i * THREADS < num) batch[i] = list[base + i * THREADS];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                key[i] = base + i * THREADS < num ? key_of(batch[i].score, batch[i].position) : NONE;
            f(key);
        }
    }

    template <typename F>
    __device__ void each(F f) const {
        each_batch([&](const Key (&key)[BATCH]) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) f(key[i]);
        });
    }
};

struct InShared {
    const Key* list;
    int num;

    template <typename F>
    __device__ void each(F f) const {
        for (int base = threadIdx.x; base - int(threadIdx.x) < num; base += THREADS) f(base < num ? list[base] : NONE);
    }
};

// Scores alone, as their rising bits: positions matter only where scores tie.
template <int N>
struct InRegisters {
    const unsigned (&score)[N];

    template <typename F>
    __device__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < N; ++i) f(Key(score[i]));
    }
};

// Take the part of an interval that holds the last wanted candidate.
template <typename Source>
__device__ Interval narrowed(Shared& s, Interval in, const Source& source) {
    for (int i = threadIdx.x; i < PARTS; i += THREADS) s.count[i] = 0;
    __syncthreads();
    const int shift = max(64 - __clzll(in.high - in.low) - 11, 0);
    source.each([&](Key key) {
        if (key >= in.low && key <= in.high) atomicAdd(&s.count[(key - in.low) >> shift], 1);
    });
    __syncthreads();
    constexpr int N = PARTS / THREADS;
    int count[N];
    for (int i = 0; i < N; ++i) count[i] = s.count[N * (THREADS - 1 - int(threadIdx.x)) + i];
    find_part(s, count, in.num_wanted);
    if (s.part < 0) return {in.low, in.high, in.num_wanted, -1};  // fewer than wanted
    in.low += Key(s.part) << shift;
    in.high = in.low + min(in.high - in.low, (Key(1) << shift) - 1);
    in.num_wanted -= s.num_above;
    in.num_inside = s.num_inside;
    return in;
}

// Append the keys of those lanes of a warp that bring one.
__device__ inline void append(Key* list, int* num, bool is_one, Key key) {
    const int lane = threadIdx.x % 32;
    const unsigned ones = __ballot_sync(ALL, is_one);
    if (!ones) return;
    int first = 0;
    if (lane == 0) first = atomicAdd(num, __popc(ones));
    first = __shfl_sync(ALL, first, 0);
    if (is_one) list[first + __popc(ones & ((1u << lane) - 1))] = key;
}

// Write the chosen keys by position, -1 behind them.
__device__ void write_chosen(Shared& s, int* out_position, float* out_score, int k) {
    uint4* bits = (uint4*)(&s + 1);
    unsigned short* before = (unsigned short*)(bits + NUM_GROUPS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < NUM_GROUPS; i += THREADS) bits[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const int num_chosen = s.num_chosen;
    for (int i = threadIdx.x; i < num_chosen; i += THREADS) {
        const int position = position_of(s.chosen[i]);
        atomicOr((unsigned*)bits + position / 32, 1u << position % 32);
    }
    __syncthreads();
    int total = 0;
    for (int i = lane; i < WARP_GROUPS; i += 32) {
        const uint4 group = bits[warp * WARP_GROUPS + i];
        const int mine = __popc(group.x) + __popc(group.y) + __popc(group.z) + __popc(group.w);
        int up_to_here = mine;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(ALL, up_to_here, step);
            if (lane >= step) up_to_here += other;
        }
        before[warp * WARP_GROUPS + i] = (unsigned short)(total + up_to_here - mine);
        total += __shfl_sync(ALL, up_to_here, 31);
    }
    const int first = sum_before(s, lane == 0 ? total : 0);
    if (lane == 0) s.warp_total[warp] = first;
    __syncthreads();
    for (int i = threadIdx.x; i < k; i += THREADS) {
        if (i >= num_chosen) {
            out_position[i] = -1;
            if (out_score) out_score[i] = -__uint_as_float(0x7f800000);
            continue;
        }
        const Key key = s.chosen[i];
        const int position = position_of(key), group = position / 128;
        int place = s.warp_total[group / WARP_GROUPS] + before[group];
        const unsigned* word = (const unsigned*)(bits + group);
        for (int j = 0; j < 4; ++j) {
            const int num_below = min(max(position % 128 - 32 * j, 0), 32);
            place += __popc(num_below == 32 ? word[j] : word[j] & ((1u << num_below) - 1));
        }
        out_position[place] = position;
        if (out_score) out_score[place] = score_of(key);
    }
}

#ifndef OWNERS
// A thread's two bins of a row's counts, as `find_part` takes them.
__device__ inline int2* bins_of(int* counts_of_row) { return (int2*)counts_of_row + (THREADS - 1 - threadIdx.x); }

// Whether the candidates that the counts leave open were put together: those from the part of the k-th best upwards.
__device__ inline bool is_thinned(const Found& found) {
    return found.part >= 0 && found.num_above + found.num_inside <= THINNED;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    thin_candidates(const Candidate* candidates,  // [T, capacity]
                    int* state,                   // [T, STATE]: adds how many it has put together, third number
                    int* counts,                  // [T, COUNTS]
                    Candidate* thinned,           // [T, THINNED]
                    long long capacity, long long k) {
    __shared__ Found found;
    const long long row = blockIdx.y;
    const int2 bins = *bins_of(counts + row * COUNTS);
    const int count[2] = {bins.x, bins.y};
    find_part(found, count, int(k));
    if (!is_thinned(found)) return;
    const float low = bin_edge(found.part);
    const Candidate* list = candidates + row * capacity;
    Candidate* out = thinned + row * THINNED;
    int* num_out = state + row * STATE + 2;
    const int num = state[row * STATE], share = (num + gridDim.x - 1) / gridDim.x;
    const int begin = blockIdx.x * share, end = min(num, begin + share);
    const int lane = threadIdx.x % 32;
    for (int base = begin + threadIdx.x; base - int(threadIdx.x) < end; base += BATCH * THREADS) {
        Candidate batch[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (base + i * THREADS < end) batch[i] = list[base + i * THREADS];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const bool is_open = base + i * THREADS < end && batch[i].score >= low;
            const unsigned open = __ballot_sync(ALL, is_open);
            if (!open) continue;
            int first = 0;
            if (lane == 0) first = atomicAdd(num_out, __popc(open));
            first = __shfl_sync(ALL, first, 0);
            if (is_open) out[first + __popc(open & ((1u << lane) - 1))] = batch[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    select_candidates(const Candidate* candidates,  // [T, capacity]
                      const Candidate* thinned,     // [T, THINNED]
                      int* state,                   // [T, STATE], left as zeros
                      int* counts,                  // [T, COUNTS], left as zeros
                      int* out_position,            // [T, k]
                      float* out_score,             // [T, k] or null
                      long long capacity, long long k) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    const long long row = blockIdx.x;
    const int num_all = state[row * STATE], num_thinned = state[row * STATE + 2];
    int* counts_of_row = counts + row * COUNTS;
    int2* bins = bins_of(counts_of_row);
    const int count[2] = {bins->x, bins->y};
    *bins = make_int2(0, 0);
    if (threadIdx.x < NUM_CHUNKS) counts_of_row[NUM_BINS + threadIdx.x] = 0;
    if (threadIdx.x == 0) s.num_chosen = 0, s.num_near = 0;
    find_part(s, count, int(k));
    if (threadIdx.x < 3) state[row * STATE + threadIdx.x] = 0;

    Interval in = {1, 0, 0, 0};  // fewer than k: all are chosen
    if (s.part >= 0) {
        in.low = Key(rising_bits(bin_edge(s.part))) << 32;
        in.high = s.part + 1 < NUM_BINS ? (Key(rising_bits(bin_edge(s.part + 1))) << 32) - 1 : ~Key(0);
        in.num_wanted = int(k) - s.num_above, in.num_inside = s.num_inside;
    }
    __syncthreads();
    InMemory candidates_of_row{candidates + row * capacity, num_all};
    if (is_thinned(s)) candidates_of_row = {thinned + row * THINNED, num_thinned};
    while (in.num_inside > NEAR && in.num_inside > in.num_wanted) in = narrowed(s, in, candidates_of_row);
    const bool some_are_left_out = in.num_inside > in.num_wanted;
    const Key sure = some_are_left_out ? in.high + 1 : in.low;  // 0 behind the greatest key: then none is sure
    const int lane = threadIdx.x % 32;
    candidates_of_row.each_batch([&](const Key (&key)[BATCH]) {
        // A warp makes room for a whole batch at once: those chosen in the low half of a word, those near in the high.
        int mine = 0;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            mine += key[i] != NONE && sure != NONE && key[i] >= sure;
            mine += some_are_left_out && key[i] >= in.low && key[i] <= in.high ? 1 << 16 : 0;
        }
        int up_to_here = mine;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(ALL, up_to_here, step);
            if (lane >= step) up_to_here += other;
        }
        int chosen = 0, near = 0;
        if (lane == 31) {
            chosen = atomicAdd(&s.num_chosen, up_to_here & 0xffff);
            near = atomicAdd(&s.num_near, up_to_here >> 16);
        }
        chosen = __shfl_sync(ALL, chosen, 31) + ((up_to_here - mine) & 0xffff);
        near = __shfl_sync(ALL, near, 31) + ((up_to_here - mine) >> 16);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (key[i] != NONE && sure != NONE && key[i] >= sure) s.chosen[chosen++] = key[i];
            if (some_are_left_out && key[i] >= in.low && key[i] <= in.high) s.near[near++] = key[i];
        }
    });
    __syncthreads();
    if (some_are_left_out) {
        const InShared near{s.near, s.num_near};
        while (in.num_inside > in.num_wanted) in = narrowed(s, in, near);
        near.each([&](Key key) { append(s.chosen, &s.num_chosen, key >= in.low, key); });
        __syncthreads();
    }
    write_chosen(s, out_position + row * k, out_score ? out_score + row * k : nullptr, int(k));
}
#endif

#ifdef OWNERS
constexpr int EACH = 2048 / THREADS;  // candidates of a thread and owner
constexpr int HELD = OWNERS * EACH;
constexpr unsigned WINDOW = 3 << 23;  // of scores within three octaves of the best

struct Lists {
    const float* score;
    const int* position;
    int owner_stride, width;

    __device__ int column(int i) const { return threadIdx.x + i % EACH * THREADS; }
    __device__ int place(int i) const {
        int stride;  // opaque, so that places are computed again rather than held in registers
        asm volatile("mov.s32 %0, %1;" : "=r"(stride) : "r"(owner_stride));
        return i / EACH * stride + column(i);
    }
};

// Those whose score is that of the cut, by position: the earlier has the greater key.
struct Ties {
    const Lists& lists;
    const unsigned (&score)[HELD];
    unsigned cut;

    template <typename F>
    __device__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            f(score[i] == cut ? Key(~unsigned(lists.position[lists.place(i)])) : NONE);
            asm volatile("" ::: "memory");  // one load at a time: registers
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    merge_owners(const float* score,      // [N, T, W] with strides; -inf is padding
                 const int* position,     // [N, T, W] with the same strides
                 int* out_position,       // [T, k]
                 float* out_score,        // [T, k] or null
                 long long owner_stride, long long row_stride, long long width, long long k) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    const long long row = blockIdx.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Lists lists = {score + row * row_stride, position + row * row_stride, int(owner_stride), int(width)};
    unsigned held[HELD];  // rising bits, 0 for padding
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const float each = lists.column(i) < width ? lists.score[lists.place(i)] : -__uint_as_float(0x7f800000);
        held[i] = __float_as_uint(each);
    }
    if (threadIdx.x == 0) s.num_chosen = 0;
    unsigned least = ~0u, most = 0;
    int num = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const float each = __uint_as_float(held[i]);
        const float counted = each == each ? each : __uint_as_float(0x7f800000);
        held[i] = counted == -__uint_as_float(0x7f800000) ? 0 : rising_bits(counted);
        if (held[i]) least = min(least, held[i]), most = max(most, held[i]), ++num;
    }
    least = __reduce_min_sync(ALL, least), most = __reduce_max_sync(ALL, most), num = __reduce_add_sync(ALL, num);
    if (lane == 0) s.warp_low[warp] = least, s.warp_high[warp] = most, s.warp_total[warp] = num;
    __syncthreads();
    least = __reduce_min_sync(ALL, lane < WARPS ? unsigned(s.warp_low[lane]) : ~0u);
    most = __reduce_max_sync(ALL, lane < WARPS ? unsigned(s.warp_high[lane]) : 0);
    num = __reduce_add_sync(ALL, lane < WARPS ? s.warp_total[lane] : 0);
    __syncthreads();

    // A first look at the best only: counts of the many small scores would meet in few parts.
    Interval in = {least, most, min(num, int(k)), num};
    const InRegisters<HELD> scores{held};
    if (num > k && most - least > WINDOW) {
        const Interval best = narrowed(s, {most - WINDOW, most, int(k), num}, scores);
        if (best.num_inside >= 0) in = best;
    }
    while (in.num_inside > in.num_wanted && in.low < in.high) in = narrowed(s, in, scores);
    const unsigned cut = unsigned(in.low);
    Interval tied = {1, ~0u, in.num_wanted, in.num_inside};
    if (tied.num_inside > tied.num_wanted) {
        const Ties ties = {lists, held, cut};
        while (tied.num_inside > tied.num_wanted) tied = narrowed(s, tied, ties);
    }
#pragma unroll
    for (int first = 0; first < HELD; first += EACH) {  // an owner at a time: registers
        int its_position[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            its_position[i] = held[first + i] >= cut && held[first + i] ? lists.position[lists.place(first + i)] : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const unsigned its_score = held[first + i], place = ~unsigned(its_position[i]);
            const bool is_chosen = its_score && (its_score > cut || (its_score == cut && place >= tied.low));
            append(s.chosen, &s.num_chosen, is_chosen, Key(its_score) << 32 | place);
        }
        asm volatile("" ::: "memory");
    }
    __syncthreads();
    write_chosen(s, out_position + row * k, out_score ? out_score + row * k : nullptr, int(k));
}
#endif
