// Scores of the DSA indexer over pages of FP8 keys, for the Q query rows that a round verifies of each request.
//
//     score(t, s) = scale[s] * sum_j weight[t, j] * relu(query[t, j] . key[s])        for s <= position[t]
//
// All rows of a request are scored in one pass over its keys: a page of 64 keys is the M side of one matrix product,
// the Q * 32 heads are its N side. Pages of all requests form one row that is cut into as many equal parts as there
// are blocks; a score's arithmetic does not depend on where the cuts fall.
//
// A block has CONSUMERS warp groups that multiply and reduce, each a page of its own, and one more: its first warp
// loads pages, the others raise thresholds.
//
// SCORES = 0: scores are not written. They are counted in bins (score_order.cuh), first by the block, then for all
// blocks. A bin from which upwards k scores are counted bounds the row's k-th best from below, and what is below is
// dropped. The bound rises while the scan goes on, and holds for the whole row whenever it is read. So which
// candidates are kept depends on the timing, but the best k are always among them, and in the end all counts from the
// bound upwards are complete.
// SCORES = 1: scores are written, -inf behind a row's position.

#include "hopper.cuh"
#include "score_order.cuh"

#define ROW_PAIRS ((QUERY_ROWS + 1) / 2)

constexpr int Q = QUERY_ROWS;
constexpr int HALF = ROW_PAIRS;  // rows that one lane of a quad ends up with
constexpr int ROWS = 2 * HALF;   // rows of the product: an odd row more is zeros
constexpr int HEADS = 32;
constexpr int DIM = 128;
constexpr int PAGE = 64;
constexpr int KEY_BYTES = PAGE * DIM;
constexpr int SCALE_BYTES = PAGE * 4;
constexpr int CONSUMERS = ROW_PAIRS > 3 ? 2 : 3;  // 16 * ROWS registers of a thread hold sums
constexpr int STAGES = ROW_PAIRS > 3 ? 8 : 9;
constexpr int LIST = ROW_PAIRS > 3 ? 64 : 96;  // candidates of a row that a warp gathers before it writes them
constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int THREADS = CONSUMER_THREADS + 128;
constexpr int KEEPERS = 3;   // warps that raise thresholds
constexpr int KEPT_ROWS = (Q + KEEPERS - 1) / KEEPERS;  // most rows of one of them
constexpr int SEGMENT_THREADS = CONSUMER_THREADS + (SCORES ? 0 : 32 * KEEPERS);
constexpr unsigned ALL = 0xffffffff;

struct Shared {
    unsigned char query[ROWS * HEADS * DIM];  // swizzled as the keys are
    unsigned char keys[STAGES][KEY_BYTES];
    float scales[STAGES][PAGE];
    Candidate list[4 * CONSUMERS][ROWS][LIST];
    int counts[ROWS][NUM_BINS];  // not yet added to those of all blocks
    float weights[ROWS][4][8];  // by the lane of a quad that needs them; half of their value
    u64 full[STAGES], empty[STAGES];
    int position[ROWS];
    float threshold[ROWS];
    int threshold_bin[ROWS];
    int num_done;       // warps that are through with the segment
    int first_page[MAX_REQUESTS + 1];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher gives less shared memory");

// ---- the machine -------------------------------------------------------------------------------------------------

__device__ inline void wait_for(u64* barrier, int parity) {
#pragma unroll 1
    for (int spins = 0; spins < 1 << 20; ++spins) {
        int done;
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
        if (done) return;
    }
    __trap();  // a bug, not a slow neighbour: better an error than a hang
}

// Without a result, which atomicAdd would have the thread wait for.
__device__ inline void add(int* sum, int number) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(sum), "r"(number) : "memory");
}

// Of the warps that score and those that keep thresholds. They meet at different instructions: `bar.sync` may not.
__device__ inline void segment_barrier() { asm volatile("barrier.sync 1, %0;" ::"n"(SEGMENT_THREADS) : "memory"); }

// A matrix in shared memory with rows of 128 bytes, swizzled in groups of 8 rows.
__device__ inline unsigned long long matrix(const unsigned char* rows) {
    const unsigned long long start = (shared_address(rows) & 0x3ffff) >> 4;
    return start | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

#define F4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define F32(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12), F4(i + 16), F4(i + 20), F4(i + 24), F4(i + 28)
#define R0 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22" \
    ",%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R1 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52" \
    ",%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R2 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84" \
    ",%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define R3 \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112" \
    ",%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MULTIPLY(shape, registers, a, b, add, ...)                                                          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " add ", 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned.m64" shape "k32.f32.e4m3.e4m3 {" registers "}, " a ", " b ", p, 1, 1;}" \
                 : __VA_ARGS__                                                                              \
                 : "l"(keys), "l"(query), "r"(add_to_it))

__device__ inline void multiply(float (&sum)[16 * ROWS], unsigned long long keys, unsigned long long query,
                                int add_to_it) {
#if ROW_PAIRS == 1
    MULTIPLY("n64", R0, "%32", "%33", "%34", F32(0));
#elif ROW_PAIRS == 2
    MULTIPLY("n128", R0 R1, "%64", "%65", "%66", F32(0), F32(32));
#elif ROW_PAIRS == 3
    MULTIPLY("n192", R0 R1 R2, "%96", "%97", "%98", F32(0), F32(32), F32(64));
#else
    MULTIPLY("n256", R0 R1 R2 R3, "%128", "%129", "%130", F32(0), F32(32), F32(64), F32(96));
#endif
}

// ---- the work of a block -----------------------------------------------------------------------------------------

struct Arguments {
    const unsigned char* query;   // [B, Q, 32, 128] e4m3
    const float* weight;          // [B, Q, 32]
    const int* position;          // [B, Q]: the last one that a row may see, -1 for none
    const int* page_table;        // [B, table_stride]
    const unsigned char* pages;   // [pages, page_stride]: 64 keys, then their scales
    const void* page_map;         // tensor map of the keys
    Candidate* candidates;        // [B * Q, capacity]
    int* state;                   // [B * Q, STATE], zeros before the first block starts
    int* counts;                  // [B * Q, COUNTS], zeros before the first block starts
    float* scores;                // [B * Q, capacity]
    long long num_requests, table_stride, page_stride, capacity, k;
};

// The first page of a block.
__device__ inline int cut(const Shared& s, int block) {
    return unsigned(s.first_page[MAX_REQUESTS]) * block / gridDim.x;
}

// Part of a block's pages that belongs to one request.
struct Segment {
    int request, begin, end;  // pages, counted over all requests
};

__device__ inline Segment segment_at(const Shared& s, int page, int block_end) {
    int request = 0;
#pragma unroll 1
    for (int step = MAX_REQUESTS / 2; step; step /= 2)
        if (request + step < MAX_REQUESTS && s.first_page[request + step] <= page) request += step;
    return {request, page, min(block_end, s.first_page[request + 1])};
}

__device__ void load_pages(Shared& s, const Arguments& a) {
    const int begin = cut(s, blockIdx.x), end = cut(s, blockIdx.x + 1);
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(a.page_map) : "memory");
    for (int page = begin; page < end;) {
        const Segment segment = segment_at(s, page, end);
        const int* table = a.page_table + segment.request * a.table_stride - s.first_page[segment.request];
        for (; page < segment.end; ++page) {
            const int id = table[page];
            const int turn = page - begin, stage = turn % STAGES;
            if (turn >= STAGES) wait_for(&s.empty[stage], (turn / STAGES - 1) & 1);
            arrive_and_expect(&s.full[stage], KEY_BYTES + SCALE_BYTES);
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[%0], [%1, {0, 0, %2}], [%3];"
                ::"r"(shared_address(s.keys[stage])), "l"(a.page_map), "r"(id), "r"(shared_address(&s.full[stage]))
                : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                ::"r"(shared_address(s.scales[stage])), "l"(a.pages + id * a.page_stride + KEY_BYTES), "n"(SCALE_BYTES),
                "r"(shared_address(&s.full[stage]))
                : "memory");
        }
    }
}

// Sum over the lanes from this one upwards.
__device__ inline int sum_from_here(int mine) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        const int next = __shfl_down_sync(ALL, mine, step);
        if (lane + step < 32) mine += next;
    }
    return mine;
}

// Add this block's counts of a row to those of all blocks, from the row's threshold upwards. One warp.
__device__ void publish(Shared& s, int row, int* counts) {
    const int lane = threadIdx.x % 32;
    const int bottom = __shfl_sync(ALL, s.threshold_bin[row], 0) / CHUNK;
    unsigned filled = 0;  // chunks
#pragma unroll 2
    for (int chunk = bottom; chunk < NUM_CHUNKS; ++chunk) {
        int4 count;
        asm volatile("ld.volatile.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(count.x), "=r"(count.y), "=r"(count.z), "=r"(count.w)
                     : "r"(shared_address(&s.counts[row][chunk * CHUNK + 4 * lane])));
        if (count.x | count.y | count.z | count.w) filled |= 1 << chunk;
    }
    for (filled = __reduce_or_sync(ALL, filled); filled; filled &= filled - 1) {
        const int chunk = __ffs(filled) - 1;
        int count[CHUNK / 32], sum = 0;
#pragma unroll
        for (int i = 0; i < CHUNK / 32; ++i) count[i] = atomicExch(&s.counts[row][chunk * CHUNK + 32 * i + lane], 0);
#pragma unroll
        for (int i = 0; i < CHUNK / 32; ++i) {
            if (count[i]) add(counts + chunk * CHUNK + 32 * i + lane, count[i]);
            sum += count[i];
        }
        sum = __reduce_add_sync(ALL, sum);
        if (lane == 0) add(counts + NUM_BINS + chunk, sum);
    }
}

// Raise the thresholds of a keeper's rows to the highest bin from which upwards k scores have been counted. One warp,
// for all of its rows at once: what it reads is far away.
__device__ void raise_thresholds(Shared& s, const Arguments& a, int request, int keeper) {
    const int lane = threadIdx.x % 32, k = int(a.k);
    const int* counts = a.counts + request * Q * COUNTS;
    int* state = a.state + request * Q * STATE;
    asm volatile("" : "+r"(keeper));  // addresses are computed again rather than held in registers
    int known[KEPT_ROWS], in_chunk[KEPT_ROWS], chunk[KEPT_ROWS], above[KEPT_ROWS];
    int4 count[KEPT_ROWS];
#pragma unroll
    for (int i = 0; i < KEPT_ROWS; ++i) {
        const int row = keeper + i * KEEPERS;
        if (row >= Q) break;
        known[i] = *(volatile int*)(state + row * STATE + 1);  // another block may know more
        in_chunk[i] = lane < NUM_CHUNKS ? *(volatile int*)(counts + row * COUNTS + NUM_BINS + lane) : 0;
    }
#pragma unroll
    for (int i = 0; i < KEPT_ROWS; ++i) {
        const int row = keeper + i * KEEPERS;
        if (row >= Q) break;
        const int from_chunk = sum_from_here(in_chunk[i]);
        chunk[i] = 31 - __clz(__ballot_sync(ALL, from_chunk >= k));  // -1: there are fewer than k
        above[i] = __shfl_sync(ALL, from_chunk, chunk[i] + 1);       // there are fewer chunks than lanes
        count[i] = make_int4(0, 0, 0, 0);
        if (chunk[i] >= 0)
            asm volatile("ld.volatile.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(count[i].x), "=r"(count[i].y), "=r"(count[i].z), "=r"(count[i].w)
                         : "l"(counts + row * COUNTS + chunk[i] * CHUNK + 4 * lane));
    }
#pragma unroll
    for (int i = 0; i < KEPT_ROWS; ++i) {
        const int row = keeper + i * KEEPERS;
        if (row >= Q) break;
        int bin = __shfl_sync(ALL, known[i], 0);  // lane 0 speaks for all: what others write must not split the warp
        const int from_here = above[i] + sum_from_here(count[i].x + count[i].y + count[i].z + count[i].w);
        const unsigned enough = __ballot_sync(ALL, chunk[i] >= 0 && from_here >= k);
        int left = from_here - k;  // may be given up from below
        int found = chunk[i] * CHUNK + 4 * lane;
        if ((left -= count[i].x) >= 0) {
            ++found;
            if ((left -= count[i].y) >= 0) {
                ++found;
                if ((left -= count[i].z) >= 0) ++found;
            }
        }
        found = __shfl_sync(ALL, found, 31 - __clz(enough | 1));
        if (enough) bin = max(bin, found);
        if (lane == 0 && bin > s.threshold_bin[row]) {
            s.threshold_bin[row] = bin;
            *(volatile float*)&s.threshold[row] = bin_edge(bin);
            atomicMax(state + row * STATE + 1, bin);
        }
        __syncwarp();
    }
}

// A keeper's rows are `keeper`, `keeper + KEEPERS`, ...
__device__ void keep_thresholds(Shared& s, const Arguments& a, int keeper) {
    const int begin = cut(s, blockIdx.x), end = cut(s, blockIdx.x + 1);
    const int lane = threadIdx.x % 32;
    for (int page = begin; page < end;) {
        const Segment segment = segment_at(s, page, end);
        segment_barrier();
        for (int num_done = 0; num_done < 4 * CONSUMERS;) {
            num_done = __shfl_sync(ALL, *(volatile int*)&s.num_done, 0);
#pragma unroll 1
            for (int row = keeper; row < Q; row += KEEPERS)
                publish(s, row, a.counts + (segment.request * Q + row) * COUNTS);
            if (num_done) continue;  // the segment ends: the sooner its last counts are published, the better
            raise_thresholds(s, a, segment.request, keeper);
            __nanosleep(NAP);
        }
#pragma unroll 1
        for (int row = keeper; row < Q; row += KEEPERS)  // those below the threshold were left
            for (int bin = 4 * lane; bin < NUM_BINS; bin += CHUNK) *(int4*)&s.counts[row][bin] = make_int4(0, 0, 0, 0);
        segment_barrier();
        page = segment.end;
    }
}

__device__ void load_queries(Shared& s, const Arguments& a, int request) {
    const uint4* query = (const uint4*)a.query + request * (Q * HEADS * DIM / 16);
    for (int i = threadIdx.x; i < ROWS * HEADS * DIM / 16; i += CONSUMER_THREADS) {
        const int row = i / 8, chunk = (i % 8) ^ (row % 8);
        *(uint4*)(s.query + row * DIM + chunk * 16) = row < Q * HEADS ? query[i] : make_uint4(0, 0, 0, 0);
    }
    for (int i = threadIdx.x; i < ROWS * HEADS; i += CONSUMER_THREADS) {
        const int row = i / HEADS, head = i % HEADS;
        const float weight = row < Q ? a.weight[request * Q * HEADS + i] : 0.0f;
        s.weights[row][head % 8 / 2][head / 8 * 2 + head % 2] = 0.5f * weight;
    }
    if (threadIdx.x < ROWS) {
        const int row = threadIdx.x;
        const int bin = SCORES || row >= Q ? 0 : *(volatile int*)(a.state + (request * Q + row) * STATE + 1);
        s.position[row] = row < Q ? a.position[request * Q + row] : -1;
        s.threshold_bin[row] = bin;
        s.threshold[row] = bin_edge(bin);
    }
    if (threadIdx.x == 0) s.num_done = 0;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the products read the queries
}

// Scores of a thread: those of the key `warp * 16 + lane / 4 + 8 * (lane % 2)` for rows `HALF * (lane / 2 % 2) +
// 0..HALF - 1`.
__device__ inline void reduce_heads(const Shared& s, const float (&sum)[16 * ROWS], float (&score)[HALF]) {
    const int lane = threadIdx.x % 32;
    float part[2][ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float4 low = *(const float4*)&s.weights[row][lane % 4][0];
        const float4 high = *(const float4*)&s.weights[row][lane % 4][4];
        const float weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int key = 0; key < 2; ++key) {
            part[key][row] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float product = sum[16 * row + 4 * (i / 2) + 2 * key + i % 2];
                // Twice its relu: an addition, because a maximum runs at half the rate and loses NaN.
                part[key][row] = fmaf(weight[i], product + fabsf(product), part[key][row]);
            }
        }
    }
    const bool odd = lane & 1, upper = lane & 2;
    float half[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float other = __shfl_xor_sync(ALL, odd ? part[0][row] : part[1][row], 1);
        half[row] = (odd ? part[1][row] : part[0][row]) + other;
    }
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float other = __shfl_xor_sync(ALL, upper ? half[i] : half[HALF + i], 2);
        score[i] = (upper ? half[HALF + i] : half[i]) + other;
    }
}

// Put a lane's scores on its warp's lists of their rows unless they are below the rows' thresholds, and count them.
// Tells whether one of its lists is so long that a page more might not find room.
__device__ inline bool gather(Shared& s, const float (&score)[HALF], const float (&threshold)[HALF],
                              const int (&last_position)[HALF], int position, int (&num)[HALF]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = HALF * (lane / 2 % 2);
    bool is_full = false;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float each = score[i] == score[i] ? score[i] : __uint_as_float(0x7f800000);
        const bool is_kept = position <= last_position[i] && each >= threshold[i];
        // The lanes of a warp bring two rows: which of them is the second bit of a lane.
        const unsigned kept = __ballot_sync(ALL, is_kept) & (lane & 2 ? 0xcccccccc : 0x33333333);
        if (is_kept) {
            s.list[warp][first_row + i][num[i] + __popc(kept & ((1u << lane) - 1))] = {each, position};
            atomicAdd(&s.counts[first_row + i][bin_of(each)], 1);
        }
        num[i] += __popc(kept);
        is_full |= num[i] > LIST - 16;  // a page adds up to 16 keys
    }
    return is_full;
}

// Write what a warp has gathered and is still above the thresholds. `num` counts the list of each row of a lane.
__device__ void flush(Shared& s, const Arguments& a, int request, int (&num)[HALF]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int num_of_mine = 0;  // lane t: candidates of row t
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const int low = __shfl_sync(ALL, num[i], 0), high = __shfl_sync(ALL, num[i], 2);
        if (lane == i) num_of_mine = low;
        if (lane == HALF + i) num_of_mine = high;
        num[i] = 0;
    }
    __syncwarp();
    Candidate candidate[ROWS][LIST / 32];  // all are read before the first is looked at
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int i = 0; i < LIST / 32; ++i) candidate[row][i] = s.list[warp][row][32 * i + lane];
    unsigned keep[ROWS][LIST / 32];
    int num_kept = 0;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const int count = __shfl_sync(ALL, num_of_mine, row);
        const float threshold = *(volatile float*)&s.threshold[row];
        int total = 0;
#pragma unroll
        for (int i = 0; i < LIST / 32; ++i) {
            keep[row][i] = __ballot_sync(ALL, 32 * i + lane < count && candidate[row][i].score >= threshold);
            total += __popc(keep[row][i]);
        }
        if (lane == row) num_kept = total;
    }
    const int first = lane < Q && num_kept ? atomicAdd(a.state + (request * Q + lane) * STATE, num_kept) : 0;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        Candidate* out = a.candidates + (request * Q + row) * a.capacity + __shfl_sync(ALL, first, row);
#pragma unroll
        for (int i = 0; i < LIST / 32; ++i) {
            if (keep[row][i] >> lane & 1) out[__popc(keep[row][i] & ((1u << lane) - 1))] = candidate[row][i];
            out += __popc(keep[row][i]);
        }
    }
    __syncwarp();
}

__device__ void score_pages(Shared& s, const Arguments& a) {
    const int begin = cut(s, blockIdx.x), end = cut(s, blockIdx.x + 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    const int key = warp % 4 * 16 + lane / 4 + 8 * (lane % 2);
    const int first_row = HALF * (lane / 2 % 2);
    for (int next = begin; next < end;) {
        const Segment segment = segment_at(s, next, end);
        next = segment.end;
        load_queries(s, a, segment.request);
        segment_barrier();
        int last_position[HALF];
#pragma unroll
        for (int i = 0; i < HALF; ++i) last_position[i] = s.position[first_row + i];
#if !SCORES
        int num[HALF] = {};  // candidates in this warp's list of a row
#endif
        const int first_page = s.first_page[segment.request];
        const int skipped = (segment.begin - begin) % CONSUMERS;
        int page = segment.begin + (group + CONSUMERS - skipped) % CONSUMERS;
        for (; page < segment.end; page += CONSUMERS) {
            const int turn = page - begin, stage = turn % STAGES;
            float sum[16 * ROWS], score[HALF];
            wait_for(&s.full[stage], turn / STAGES & 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int step = 0; step < DIM / 32; ++step)
                multiply(sum, matrix(s.keys[stage]) + 2 * step, matrix(s.query) + 2 * step, step);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            const float scale = s.scales[stage][key];
#if !SCORES
            float threshold[HALF];
#pragma unroll
            for (int i = 0; i < HALF; ++i) threshold[i] = *(volatile float*)&s.threshold[first_row + i];
#endif
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            __syncwarp();
            if (lane == 0) arrive(&s.empty[stage]);
            reduce_heads(s, sum, score);
            const int position = (page - first_page) * PAGE + key;
#pragma unroll
            for (int i = 0; i < HALF; ++i) score[i] *= scale;
#if SCORES
#pragma unroll
            for (int i = 0; i < HALF; ++i)
                if (first_row + i < Q)
                    a.scores[(segment.request * Q + first_row + i) * a.capacity + position] =
                        position <= last_position[i] ? score[i] : -__uint_as_float(0x7f800000);
#else
            if (__any_sync(ALL, gather(s, score, threshold, last_position, position, num)))
                flush(s, a, segment.request, num);
#endif
        }
#if !SCORES
        __threadfence_block();  // its counts, before it says that it is done
        __syncwarp();
        if (lane == 0) atomicAdd(&s.num_done, 1);
        flush(s, a, segment.request, num);
#endif
        segment_barrier();  // nobody needs the queries any more
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    index_scan(const unsigned char* query, const float* weight, const int* position, const int* page_table,
               const unsigned char* pages, const void* page_map, Candidate* candidates, int* state, int* counts,
               float* scores, long long num_requests, long long table_stride, long long page_stride,
               long long capacity, long long k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    const Arguments a = {query, weight, position, page_table, pages, page_map, candidates, state, counts, scores,
                         num_requests, table_stride, page_stride, capacity, k};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 32)
        for (int stage = 0; stage < STAGES; ++stage) init_barrier(&s.full[stage], 1), init_barrier(&s.empty[stage], 4);
    publish_barriers();
#if !SCORES
    for (int i = threadIdx.x; i < ROWS * NUM_BINS / 4; i += THREADS) ((int4*)s.counts)[i] = make_int4(0, 0, 0, 0);
#endif
    wait_for_kernel_before();
    let_next_kernel_start();
    if (warp == 0) {  // pages before each request
        int total = 0;
        for (int base = 0; base <= MAX_REQUESTS; base += 32) {
            int last = -1;
            if (base + lane < num_requests)
                for (int row = 0; row < Q; ++row) last = max(last, position[(base + lane) * Q + row]);
            int up_to_here = last / PAGE + (last >= 0);
            const int mine = up_to_here;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(ALL, up_to_here, step);
                if (lane >= step) up_to_here += other;
            }
            if (base + lane <= MAX_REQUESTS) s.first_page[base + lane] = total + up_to_here - mine;
            total += __shfl_sync(ALL, up_to_here, 31);
        }
    }
    __syncthreads();
    if (warp < 4 * CONSUMERS) {
#if ROW_PAIRS > 3
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
#else
        asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
#endif
        score_pages(s, a);
    } else {
#if ROW_PAIRS > 3
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
#else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
        if (warp == 4 * CONSUMERS) {
            if (lane == 0) load_pages(s, a);
        }
#if !SCORES
        else keep_thresholds(s, a, warp - 4 * CONSUMERS - 1);
#endif
    }
}
