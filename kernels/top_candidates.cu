// The k best of each row's candidates, listed by ascending position.
//
// The order is total (score_order.cuh), so the k best are those from some key upwards. An interval of keys that holds
// this key is narrowed: its candidates are counted in up to 2048 equal parts, the part with the k-th best is the next
// interval, until it holds only candidates that are wanted, or few. A bitmap of the chosen positions then gives each
// its place: the number of set bits before its own. What it is chosen for may want its row of the pool besides, which
// the table of its request's pages tells.
//
// select_candidates: of what index_scan.cu left, whose counts give the first interval. The CLUSTER blocks of a row put
// those together that the counts leave open, a few more than k, in the shared memory of the first, which chooses among
// them. Which they are does not depend on CLUSTER, only their order there, and on that the choice does not.
// merge_owners (OWNERS is defined): of the lists of so many owners, each of which has chosen its own best. One block a
// row.

#include "hopper.cuh"
#include "score_order.cuh"

#ifdef OWNERS
constexpr int THREADS = 512;  // two blocks a multiprocessor
#else
constexpr int THREADS = 1024;
constexpr int FEW = 64;   // candidates that are compared with each other
constexpr int BATCH = 4;  // loads of a thread in flight
#endif
constexpr int WARPS = THREADS / 32;
constexpr int PARTS = 2048;
constexpr int ROUNDS = (TOP_K + THREADS - 1) / THREADS;  // in which the threads write the chosen ones
constexpr int PAGE = 64;                                 // positions
constexpr unsigned ALL = 0xffffffff;
constexpr Key NONE = 0;

// Keys low..high, of which `num_inside` are candidates and the best `num_wanted` of these are chosen.
struct Interval {
    Key low, high;
    int num_wanted, num_inside;
};

struct __align__(16) Shared {
    Key chosen[TOP_K];
    int count[PARTS];  // zeros while nobody counts
    int num_chosen;
    int warp_total[WARPS];
    int part, num_above, num_inside;  // what `find_part` found
#ifdef OWNERS
    unsigned warp_low[WARPS], warp_high[WARPS];
#else
    Key open[OPEN], near[FEW], cut;
    int num_open, num_near;
#endif
    // Behind it: a bit for each of 2^LOG_POSITIONS positions, then for each 128 of them how many bits are set before
    // them in their warp's share.
};

constexpr int NUM_GROUPS = 1 << (LOG_POSITIONS - 7);
constexpr int WARP_GROUPS = NUM_GROUPS / WARPS;
static_assert(sizeof(Shared) + NUM_GROUPS * 18 <= SHARED_BYTES, "the launcher gives less shared memory");

__device__ inline uint4* bits_of(Shared& s) { return (uint4*)(&s + 1); }

// Before the first barrier: zeros where is counted and marked.
__device__ inline void clear(Shared& s) {
    for (int i = threadIdx.x; i < PARTS; i += THREADS) s.count[i] = 0;
    for (int i = threadIdx.x; i < NUM_GROUPS; i += THREADS) bits_of(s)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) {
        s.num_chosen = 0;
#ifndef OWNERS
        s.num_open = 0, s.num_near = 0;
#endif
    }
}

// Sum of `mine` over the lanes up to this one.
__device__ inline int sum_to_here(int mine) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(ALL, mine, step);
        if (lane >= step) mine += other;
    }
    return mine;
}

// Sum of `mine` over the threads before this one. A barrier must lie between two calls.
__device__ inline int sum_before(Shared& s, int mine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, up_to_here = sum_to_here(mine);
    if (lane == 31) s.warp_total[warp] = up_to_here;
    __syncthreads();
    return __reduce_add_sync(ALL, lane < warp ? s.warp_total[lane] : 0) + up_to_here - mine;
}

// Find the part with the wanted one, counted from the highest part down. Thread i brings the counts of parts
// `N * (THREADS - 1 - i) + 0..N - 1`. Part -1 where there are fewer in all. What an earlier call found must have been
// read before a barrier that lies in front of this one.
template <int N>
__device__ inline void find_part(Shared& s, const int (&count)[N], int num_wanted) {
    int mine = 0;
    for (int i = 0; i < N; ++i) mine += count[i];
    if (threadIdx.x == 0) s.part = -1, s.num_above = 0, s.num_inside = 0;
    int above = sum_before(s, mine);
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

// Take the part of an interval that holds the last wanted candidate. The source's `each(f)` calls f(key) for all
// candidates, with NONE where a thread has no more.
template <typename Source>
__device__ Interval narrowed(Shared& s, Interval in, const Source& source) {
    const int shift = max(64 - __clzll(in.high - in.low) - 11, 0);
    source.each([&](Key key) {
        if (key >= in.low && key <= in.high) atomicAdd(&s.count[(key - in.low) >> shift], 1);
    });
    __syncthreads();
    constexpr int N = PARTS / THREADS;
    int count[N];
    for (int i = 0; i < N; ++i) {
        int& its_count = s.count[N * (THREADS - 1 - int(threadIdx.x)) + i];
        count[i] = its_count, its_count = 0;
    }
    find_part(s, count, in.num_wanted);
    if (s.part < 0) return {in.low, in.high, in.num_wanted, -1};  // fewer than wanted
    in.low += Key(s.part) << shift;
    in.high = in.low + min(in.high - in.low, (Key(1) << shift) - 1);
    in.num_wanted -= s.num_above;
    in.num_inside = s.num_inside;
    return in;
}

// Append those of a warp's keys that are to be. All lanes call it.
template <int N>
__device__ inline void append(Key* list, int* num, const bool (&is_one)[N], const Key (&key)[N]) {
    const int lane = threadIdx.x % 32;
    unsigned ones[N];
    int total = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) ones[i] = __ballot_sync(ALL, is_one[i]), total += __popc(ones[i]);
    if (!total) return;
    int place = 0;
    if (lane == 0) place = atomicAdd(num, total);
    place = __shfl_sync(ALL, place, 0);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (is_one[i]) list[place + __popc(ones[i] & ((1u << lane) - 1))] = key[i];
        place += __popc(ones[i]);
    }
}

// Choose those of a warp's keys that are to be. All lanes call it.
template <int N>
__device__ inline void choose(Shared& s, const bool (&is_chosen)[N], const Key (&key)[N]) {
    append(s.chosen, &s.num_chosen, is_chosen, key);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int position = position_of(key[i]);
        if (is_chosen[i]) atomicOr((unsigned*)bits_of(s) + position / 32, 1u << position % 32);
    }
}

// Where the chosen ones of a row go.
struct Out {
    int* position;
    float* score;      // or null
    const int* pages;  // of the request, or null
    int* pool_row;     // where there are pages
};

// Write the chosen keys by position, -1 behind them.
__device__ void write_chosen(Shared& s, const Out& out, int k) {
    const uint4* bits = bits_of(s);
    unsigned short* before = (unsigned short*)(bits + NUM_GROUPS);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    const int num_chosen = s.num_chosen;
    Key key[ROUNDS];
    int page[ROUNDS];  // asked for before the bits are counted: they are far away
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int i = round * THREADS + threadIdx.x;
        key[round] = i < num_chosen ? s.chosen[i] : key_of(0.0f, 0);
        page[round] = out.pages && i < num_chosen ? out.pages[position_of(key[round]) / PAGE] : 0;
    }
    int total = 0;
    for (int i = lane; i < WARP_GROUPS; i += 32) {
        const uint4 group = bits[warp * WARP_GROUPS + i];
        const int mine = __popc(group.x) + __popc(group.y) + __popc(group.z) + __popc(group.w);
        const int up_to_here = sum_to_here(mine);
        before[warp * WARP_GROUPS + i] = (unsigned short)(total + up_to_here - mine);
        total += __shfl_sync(ALL, up_to_here, 31);
    }
    if (lane == 0) s.warp_total[warp] = total;
    __syncthreads();
    const int its_total = lane < WARPS ? s.warp_total[lane] : 0;
    const int before_warp = sum_to_here(its_total) - its_total;  // of the warp whose number is the lane's
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int i = round * THREADS + threadIdx.x;
        const int position = position_of(key[round]), group = position / 128;
        int place = __shfl_sync(ALL, before_warp, group / WARP_GROUPS) + before[group];
        const unsigned* word = (const unsigned*)(bits + group);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int num_below = min(max(position % 128 - 32 * j, 0), 32);
            place += __popc(num_below == 32 ? word[j] : word[j] & ((1u << num_below) - 1));
        }
        if (i < num_chosen) {
            out.position[place] = position;
            if (out.score) out.score[place] = score_of(key[round]);
            if (out.pages) out.pool_row[place] = page[round] * PAGE + position % PAGE;
        } else if (i < k) {
            out.position[i] = -1;
            if (out.score) out.score[i] = -__uint_as_float(0x7f800000);
            if (out.pages) out.pool_row[i] = -1;
        }
    }
}

#ifndef OWNERS
// Where the cluster's first block has in its shared memory what this block has in its own.
template <typename T>
__device__ inline T* of_first_block(T* mine) {
    T* its;
    asm("mapa.u64 %0, %1, 0;" : "=l"(its) : "l"(mine));
    return its;
}

__device__ inline int rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ inline Key as_key(const Candidate& candidate) { return key_of(candidate.score, candidate.position); }
__device__ inline Key as_key(Key key) { return key; }

// Candidates, or their keys. `each_batch(f)` calls f(keys) with several at once, in all lanes of a warp alike.
template <typename T>
struct Listed {
    const T* list;
    int num;

    template <typename F>
    __device__ void each_batch(F f) const {
        for (int base = threadIdx.x; base - int(threadIdx.x) < num; base += BATCH * THREADS) {
            T batch[BATCH];
            Key key[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (base + i * THREADS < num) batch[i] = list[base + i * THREADS];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) key[i] = base + i * THREADS < num ? as_key(batch[i]) : NONE;
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

// Choose the candidates that are wanted of an interval, and all that are above it.
template <typename Source>
__device__ void choose_from(Shared& s, Interval in, const Source& source) {
    while (in.num_inside > in.num_wanted && in.num_inside > FEW) in = narrowed(s, in, source);
    if (in.num_inside > in.num_wanted) {
        source.each_batch([&](const Key (&key)[BATCH]) {
            bool is_near[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) is_near[i] = key[i] >= in.low && key[i] <= in.high;
            append(s.near, &s.num_near, is_near, key);
        });
        __syncthreads();
        if (threadIdx.x < in.num_inside) {
            int rank = 0;
            for (int i = 0; i < in.num_inside; ++i) rank += s.near[i] >= s.near[threadIdx.x];
            if (rank == in.num_wanted) s.cut = s.near[threadIdx.x];
        }
        __syncthreads();
        in.low = s.cut;
    }
    source.each_batch([&](const Key (&key)[BATCH]) {
        bool is_chosen[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) is_chosen[i] = key[i] >= in.low;
        choose(s, is_chosen, key);
    });
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    select_candidates(const Candidate* candidates,  // [T, capacity]
                      int* state,                   // [T, STATE], left as zeros
                      int* counts,                  // [T, COUNTS], left as zeros
                      int* out_position,            // [T, k]
                      float* out_score,             // [T, k] or null
                      const int* page_table,        // [requests, num_pages] or null
                      int* out_pool_row,            // [T, k], where there is a page table
                      long long capacity, long long k, long long num_pages, long long rows_per_request) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    clear(s);
    arrive_in_cluster();
    wait_for_kernel_before();
    let_next_kernel_start();
    const long long row = blockIdx.x / CLUSTER;
    const int rank = rank_in_cluster();
    int* counts_of_row = counts + row * COUNTS;
    const int2 bins = *((const int2*)counts_of_row + (THREADS - 1 - threadIdx.x));
    const Candidate* list = candidates + row * capacity;
    const int num = state[row * STATE], share = (num + CLUSTER - 1) / CLUSTER, end = min(num, (rank + 1) * share);
    int base = rank * share + threadIdx.x;
    Candidate batch[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
        if (base + i * THREADS < end) batch[i] = list[base + i * THREADS];
    wait_for_cluster();  // the first block's memory is clear
    const int count[2] = {bins.x, bins.y};
    find_part(s, count, int(k));
    Interval in = {1, 0, 0, 0};  // fewer than k: all are chosen
    if (s.part >= 0) {
        in.low = Key(rising_bits(bin_edge(s.part))) << 32;
        in.high = s.part + 1 < NUM_BINS ? (Key(rising_bits(bin_edge(s.part + 1))) << 32) - 1 : ~Key(0);
        in.num_wanted = int(k) - s.num_above, in.num_inside = s.num_inside;
    }
    // More only if very many tie, or nearly. Fewer than k, of which `find_part` found nothing, are few.
    const bool are_few = s.num_above + s.num_inside <= OPEN;
    while (are_few && base - int(threadIdx.x) < end) {
        Key key[BATCH];
        bool is_open[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            key[i] = base + i * THREADS < end ? as_key(batch[i]) : NONE;
            is_open[i] = key[i] >= in.low;
        }
        base += BATCH * THREADS;
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (base + i * THREADS < end) batch[i] = list[base + i * THREADS];
        append(of_first_block(s.open), of_first_block(&s.num_open), is_open, key);
    }
    arrive_in_cluster();
    wait_for_cluster();  // all have put theirs, and have read the counts
    if (rank) return;
    for (int i = threadIdx.x; i < COUNTS / 4; i += THREADS) ((int4*)counts_of_row)[i] = make_int4(0, 0, 0, 0);
    if (threadIdx.x < STATE) state[row * STATE + threadIdx.x] = 0;
    if (are_few) choose_from(s, in, Listed<Key>{s.open, s.num_open});
    else choose_from(s, in, Listed<Candidate>{list, num});
    const long long request = int(row) / int(rows_per_request);
    const Out out = {out_position + row * k, out_score ? out_score + row * k : nullptr,
                     page_table ? page_table + request * num_pages : nullptr, out_pool_row + row * k};
    write_chosen(s, out, int(k));
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
    clear(s);
    wait_for_kernel_before();
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Lists lists = {score + row * row_stride, position + row * row_stride, int(owner_stride), int(width)};
    unsigned held[HELD];  // rising bits, 0 for padding
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const float each = lists.column(i) < width ? lists.score[lists.place(i)] : -__uint_as_float(0x7f800000);
        held[i] = __float_as_uint(each);
    }
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
    least = __reduce_min_sync(ALL, lane < WARPS ? s.warp_low[lane] : ~0u);
    most = __reduce_max_sync(ALL, lane < WARPS ? s.warp_high[lane] : 0);
    num = __reduce_add_sync(ALL, lane < WARPS ? s.warp_total[lane] : 0);

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
        bool is_chosen[EACH];
        Key key[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const unsigned its_score = held[first + i], place = ~unsigned(its_position[i]);
            is_chosen[i] = its_score && (its_score > cut || (its_score == cut && place >= tied.low));
            key[i] = Key(its_score) << 32 | place;
        }
        choose(s, is_chosen, key);
        asm volatile("" ::: "memory");
    }
    const Out out = {out_position + row * k, out_score ? out_score + row * k : nullptr, nullptr, nullptr};
    write_chosen(s, out, int(k));
}
#endif
