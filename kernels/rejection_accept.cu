// Drafts kept by coins, and the token drawn behind them: `rejection_accept.py` says what.
//
// A block judges TILE ids of all rows of a request, or draws from TILE ids of one row. Which row the token is drawn
// from is known once all its rows are summed up, and the last block to judge tells it to those that draw. Those come
// behind all that judge the request in the grid, whose blocks start in that order, and judging waits for nothing: so
// whatever number of blocks fits on the chip, none waits for one that cannot start.
//
// Macros: those of `logit_scores.cuh`, with float32 logits and one chunk.

#include "logit_scores.cuh"

static_assert(!LOGITS_BF16 && CHUNKS == 1, "a thread has one chunk of float32 logits of each row");

constexpr int BLOCKS = 8;               // that share a multiprocessor, as long as there is shared memory for them
constexpr int AHEAD = 4;                // requests that are judged before the first draw, which then need not wait
constexpr int TOO_LONG = 1 << 26;       // polls: seconds
enum { RESIDUAL, TARGET, CANDIDATES };  // what an id is drawn by

// Where the token behind the kept drafts is drawn from.
struct __align__(16) Place {
    float top, sum;  // of the target's row: prob = exp(logit - top) / sum
    int kept;
    int rejected;  // the draft that the token replaces; -1: all were kept
    long long row;  // -1: the token needs no draw
    u64 key;        // of its noise
};

struct Arguments {
    const float* logits;                                 // [T, VOCAB], rows `row_stride` apart
    const long long* row_of;                             // [B, ROWS] rows of each request
    const long long* drafts;                             // [B, ROWS - 1], -1 behind the last
    const float* draft_probs;                            // [B, ROWS - 1, VOCAB]; null: every draft was certain
    const u64 *coin_keys, *residual_keys, *target_keys;  // [T]
    const bool* greedy;                                  // [T]; null where no row is
    float2* tile_sums;                                   // [B, ROWS, TILES]: the largest logit, sum of exp(logit - it)
    int* tile_ids;                                       // [B, ROWS, TILES]: the first id that has the largest logit
    u64* best_order;                                     // [B, CANDIDATES, TILES]
    int* best_id;                                        // [B, CANDIDATES, TILES]
    Place* places;                                       // [B]
    u32* progress;            // [B], zeros before and after: tiles judged, 1 for the place, tiles drawn
    long long* token_ids;     // [B, ROWS]
    long long* num_accepted;  // [B]
    bool* drawable;           // [B]
    long long row_stride;
};

__device__ __forceinline__ float prob_of(float logit, float top, float sum) { return expf(logit - top) / sum; }

// How often it was counted before; who counts later sees what this block's threads wrote.
__device__ __forceinline__ u32 count_in(u32* progress) {
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(progress) : "memory");
    __syncthreads();
    return before;
}

__device__ __forceinline__ void tell_place(u32* progress) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(progress) : "memory");
}

__device__ __forceinline__ void wait_for_place(const u32* progress) {
    if (threadIdx.x == 0) {
        int polls = 0;
        for (u32 count = 0; count <= TILES;) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(progress) : "memory");
            if (++polls > TOO_LONG) __trap();  // a bug, not a slow neighbour: better an error than a hang
        }
    }
    __syncthreads();
}

// A thread's chunk of a row. `behind` stands for what is behind the last id.
typedef float4 RowTile[IDS / 4][THREADS];
extern __shared__ RowTile row_tiles[];  // [ROWS]

// Past the registers: only this thread sees it after `wait_for_copies`.
__device__ __forceinline__ void copy_chunk(RowTile& tile, const float* row, int id, float behind) {
#pragma unroll
    for (int w = 0; w < IDS / 4; ++w, id += 4) {
        float4& word = tile[w][threadIdx.x];
        const auto value = [&](int i) { return id + i < VOCAB ? row[id + i] : behind; };
        if (VOCAB % IDS) word = make_float4(value(0), value(1), value(2), value(3));
        else if (id >= VOCAB) word = make_float4(behind, behind, behind, behind);
        else
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&word)), "l"(row + id)
                         : "memory");
    }
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void read_chunk(float (&values)[IDS], const RowTile& tile) {
#pragma unroll
    for (int w = 0; w < IDS / 4; ++w) {
        const float4 word = tile[w][threadIdx.x];
        values[4 * w] = word.x, values[4 * w + 1] = word.y, values[4 * w + 2] = word.z, values[4 * w + 3] = word.w;
    }
}

__device__ __forceinline__ u32 largest_order(const float (&values)[IDS]) {
    float largest = values[0];
#pragma unroll
    for (int i = 1; i < IDS; ++i) largest = larger(largest, values[i]);
    return order_of(largest);
}

__device__ __forceinline__ float sum_of_warp(float sum) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

__device__ __forceinline__ void judge(const Arguments& a, int request, int tile) {
    __shared__ u32 warp_top[ROWS][WARPS];
    __shared__ float warp_sum[ROWS][WARPS];
    __shared__ int top_id[ROWS];
    __shared__ float row_top[ROWS], row_sum[ROWS];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int first_id = tile * TILE + thread * IDS;
    const long long* row_of = a.row_of + (long long)request * ROWS;
    if (thread < ROWS) top_id[thread] = NOBODY;

    const float* rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows[r] = a.logits + row_of[r] * a.row_stride;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) copy_chunk(row_tiles[r], rows[r], first_id, -INFINITY);
    wait_for_copies();
#pragma unroll 2
    for (int r = 0; r < ROWS; ++r) {
        float logits[IDS];
        read_chunk(logits, row_tiles[r]);
        const u32 of_warp = __reduce_max_sync(~0u, largest_order(logits));
        if (lane == 0) warp_top[r][warp] = of_warp;
    }
    __syncthreads();
#pragma unroll 2
    for (int r = 0; r < ROWS; ++r) {
        u32 largest = warp_top[r][0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) largest = max(largest, warp_top[r][w]);
        const float top = float_of(largest), base = top == -INFINITY ? 0.0f : top;
        float logits[IDS], sum = 0.0f;
        read_chunk(logits, row_tiles[r]);
#pragma unroll
        for (int i = IDS - 1; i >= 0; --i) sum += expf(logits[i] - base);
        if (largest_order(logits) == largest) {
            int id = NOBODY;
#pragma unroll
            for (int i = IDS - 1; i >= 0; --i)
                if (order_of(logits[i]) == largest) id = first_id + i;
            atomicMin(&top_id[r], id);
        }
        sum = sum_of_warp(sum);
        if (lane == 0) warp_sum[r][warp] = sum;
        if (thread == 0) row_top[r] = top;
    }
    __syncthreads();
    if (thread < ROWS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) sum += warp_sum[thread][w];
        const long long place = ((long long)request * ROWS + thread) * TILES + tile;
        a.tile_sums[place] = make_float2(row_top[thread], sum);
        a.tile_ids[place] = top_id[thread];
    }
    if (count_in(a.progress + request) != TILES - 1) return;

    // What a row's draft is kept by, as the lane of the row knows it.
    const bool is_row = lane < ROWS;
    const long long row = row_of[is_row ? lane : 0];
    const int draft = lane < ROWS - 1 ? (int)a.drafts[(long long)request * (ROWS - 1) + lane] : -1;
    const bool is_greedy = a.greedy && a.greedy[row_of[0]];
    const u64 residual_key = a.residual_keys[row], target_key = a.target_keys[row];
    float draft_logit = 0.0f;
    double coin = 0.0;
    if (draft >= 0) {
        draft_logit = a.logits[row * a.row_stride + draft];
        coin = uniform_of(mix(hash_of_id(0) ^ a.coin_keys[row]));
        if (a.draft_probs) coin *= (double)a.draft_probs[((long long)request * (ROWS - 1) + lane) * VOCAB + draft];
    }
    for (int r = warp; r < ROWS; r += WARPS) {
        constexpr int EACH = (TILES + 31) / 32;
        const long long place = ((long long)request * ROWS + r) * TILES;
        float2 sums[EACH];
        int ids[EACH];
#pragma unroll
        for (int t = 0; t < EACH; ++t) {
            const bool exists = 32 * t + lane < TILES;
            sums[t] = exists ? __ldcg(a.tile_sums + place + 32 * t + lane) : make_float2(-INFINITY, 0.0f);
            ids[t] = exists ? __ldcg(a.tile_ids + place + 32 * t + lane) : NOBODY;
        }
        float top = -INFINITY;
#pragma unroll
        for (int t = 0; t < EACH; ++t) top = larger(top, sums[t].x);
        const u32 largest = __reduce_max_sync(~0u, order_of(top));
        top = float_of(largest);
        const float base = top == -INFINITY ? 0.0f : top;
        float sum = 0.0f;
        int id = NOBODY;
#pragma unroll
        for (int t = EACH - 1; t >= 0; --t) {
            sum += sums[t].y * expf(sums[t].x - base);
            if (order_of(sums[t].x) == largest) id = ids[t];
        }
        sum = sum_of_warp(sum);
        id = __reduce_min_sync(~0u, id);
        if (lane == 0) row_top[r] = top, row_sum[r] = sum, top_id[r] = id;
    }
    __syncthreads();
    if (warp != 0) return;
    const float prob = !is_row     ? 0.0f
                       : is_greedy ? draft == top_id[lane]
                                   : prob_of(draft_logit, row_top[lane], row_sum[lane]);
    const bool is_kept = draft >= 0 && coin < (double)prob;
    const bool is_drawable = is_row && fabsf(row_top[lane]) < INFINITY;  // not so of NaN
    const bool is_followed = __shfl_down_sync(~0u, is_drawable, 1);
    const int kept = __ffs(__ballot_sync(~0u, !(is_kept && is_followed))) - 1;  // no draft is behind the last
    const bool ends_with_draft = __shfl_sync(~0u, is_kept, kept);
    const long long last_id = ends_with_draft ? draft : is_greedy && is_row ? top_id[lane] : -1;
    if (is_row) a.token_ids[(long long)request * ROWS + lane] = lane < kept ? draft : lane == kept ? last_id : -1;
    if (lane == kept)
        a.places[request] = {row_top[kept], row_sum[kept], kept, draft, is_greedy || ends_with_draft ? -1 : row,
                             draft >= 0 ? residual_key : target_key};
    if (lane == 0) a.num_accepted[request] = kept, a.drawable[request] = is_drawable;
    __syncwarp();
    if (lane == 0) tell_place(a.progress + request);
}

// Leaves the best (score, id) of the tile by both: the logarithm of what the target's row holds beyond the draft's, and
// the target's own logit, which counts where all was kept or nothing is beyond.
__device__ __forceinline__ void draw(const Arguments& a, const Place& from, int request, int tile) {
    __shared__ u32 warp_top[CANDIDATES][WARPS];
    __shared__ int top_thread[CANDIDATES];
    __shared__ u64 top[CANDIDATES];
    __shared__ int top_id[CANDIDATES];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const bool rejects = from.rejected >= 0, knows_draft = rejects && a.draft_probs;
    const RowTile &target = row_tiles[0], &draft = row_tiles[ROWS > 1];
    copy_chunk(row_tiles[0], a.logits + from.row * a.row_stride, tile * TILE + thread * IDS, -INFINITY);
    if (knows_draft) {
        const float* row = a.draft_probs + ((long long)request * (ROWS - 1) + from.kept) * VOCAB;
        copy_chunk(row_tiles[ROWS > 1], row, tile * TILE + thread * IDS, 0.0f);
    }
    if (thread < CANDIDATES) top[thread] = 0, top_id[thread] = top_thread[thread] = NOBODY;
    wait_for_copies();

    const auto hash = [&](int id) { return mix(hash_of_id(id) ^ from.key); };
    const auto residual = [&](int id, float logit, float draft_prob) {
        float beyond = prob_of(logit, from.top, from.sum);
        if (knows_draft) beyond -= draft_prob;
        else if (id == from.rejected) beyond = 0.0f;
        return logf(beyond < 0.0f ? 0.0f : beyond);  // NaN stays
    };
    float thread_top[CANDIDATES] = {-INFINITY, -INFINITY};  // of bounds
#pragma unroll 1
    for (int w = 0; w < IDS / 4; ++w) {
        const float4 logits = target[w][thread], probs = draft[w][thread];
        const auto see = [&](int i, float logit, float draft_prob) {
            const int id = tile * TILE + thread * IDS + 4 * w + i;
            const u64 of_id = hash(id);
            thread_top[TARGET] = larger(thread_top[TARGET], bound_of(logit, of_id, LN_2));
            if (!rejects) return;
            const float bound = bound_of(residual(id, logit, draft_prob), of_id, LN_2);
            thread_top[RESIDUAL] = larger(thread_top[RESIDUAL], bound);
        };
        see(0, logits.x, probs.x), see(1, logits.y, probs.y), see(2, logits.z, probs.z), see(3, logits.w, probs.w);
    }
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k) {
        const u32 of_warp = __reduce_max_sync(~0u, order_of(thread_top[k]));
        if (lane == 0) warp_top[k][warp] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k) {
        u32 largest = warp_top[k][0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) largest = max(largest, warp_top[k][w]);
        if (order_of(thread_top[k]) == largest) atomicMin(&top_thread[k], thread);
    }
    __syncthreads();

    // The chunk with the largest bound is scored first, an id a thread; 0 where there is nothing to draw.
    const auto score = [&](int k, int place) {
        const int id = tile * TILE + place;
        const auto at_place = [&](const RowTile& row) {
            return reinterpret_cast<const float*>(&row[place % IDS / 4][place / IDS])[place % 4];
        };
        const float logit = at_place(target);
        const float value = k == TARGET ? logit : residual(id, logit, at_place(draft));
        return value == -INFINITY ? 0 : noisy_order(value, hash(id));
    };
    const int own = thread / IDS;  // the candidate, of the first threads
    const int own_place = own < CANDIDATES ? top_thread[own] * IDS + thread % IDS : 0;
    u64 own_order = 0;
    if (own == TARGET || (own == RESIDUAL && rejects)) {
        own_order = score(own, own_place);
        atomicMax(&top[own], own_order);
    }
    __syncthreads();
    // Of other chunks, only ids whose bound reaches that score can have a better one: mostly there is none.
    u64 other_order[CANDIDATES] = {0, 0};
    int other_id[CANDIDATES];
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k) {
        const double best = double_of(top[k]);
        if (thread == top_thread[k] || !(fabs(best) < INFINITY)) continue;  // NaN, or nothing to draw
        if (!(thread_top[k] >= least_bound(best))) continue;
#pragma unroll 1
        for (int place = thread * IDS; place < thread * IDS + IDS; ++place) {
            const u64 order = score(k, place);
            if (order > other_order[k]) other_order[k] = order, other_id[k] = tile * TILE + place;
        }
        atomicMax(&top[k], other_order[k]);
    }
    __syncthreads();
    if (own_order && own_order == top[own]) atomicMin(&top_id[own], tile * TILE + own_place);
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k)
        if (other_order[k] && other_order[k] == top[k]) atomicMin(&top_id[k], other_id[k]);
    __syncthreads();
    if (thread < CANDIDATES) {
        const long long place = ((long long)request * CANDIDATES + thread) * TILES + tile;
        a.best_order[place] = top[thread];
        a.best_id[place] = top_id[thread];
    }
}

// The best of all tiles, for every thread of the block.
__device__ __forceinline__ int best_drawn(const Arguments& a, int request) {
    __shared__ u64 top[CANDIDATES];
    __shared__ int top_id[CANDIDATES];
    const int warp = threadIdx.x / 32;
    if (warp < CANDIDATES) {
        const long long place = ((long long)request * CANDIDATES + warp) * TILES;
        u64 order;
        int id;
        best_of_tiles(a.best_order + place, a.best_id + place, order, id);
        if (threadIdx.x % 32 == 0) top[warp] = order, top_id[warp] = id;
    }
    __syncthreads();
    const bool is_beyond = top[RESIDUAL] != 0 && top[RESIDUAL] != ~0ull;  // something, and no NaN
    return is_beyond ? top_id[RESIDUAL] : top_id[TARGET] == NOBODY ? 0 : top_id[TARGET];
}

// Judges of AHEAD requests come first; then draws and judges by turns, then the draws that are left.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rejection_accept(
    const float* logits, const long long* row_of, const long long* drafts, const float* draft_probs,
    const u64* coin_keys, const u64* residual_keys, const u64* target_keys, const bool* greedy, float2* tile_sums,
    int* tile_ids, u64* best_order, int* best_id, Place* places, u32* progress, long long* token_ids,
    long long* num_accepted, bool* drawable, long long row_stride) {
    const Arguments a = {logits, row_of, drafts, draft_probs, coin_keys, residual_keys, target_keys, greedy, tile_sums,
                         tile_ids, best_order, best_id, places, progress, token_ids, num_accepted, drawable, row_stride};
    wait_for_kernel_before();
    let_next_kernel_start();
    const int num_requests = gridDim.x / (2 * TILES), ahead = min(AHEAD, num_requests);
    const int tile = blockIdx.x % TILES, turn = (int)blockIdx.x / TILES - ahead, behind = num_requests - ahead;
    if (turn < 0) return judge(a, turn + ahead, tile);
    if (turn < 2 * behind && turn % 2) return judge(a, turn / 2 + ahead, tile);
    const int request = turn < 2 * behind ? turn / 2 : turn - behind;
    wait_for_place(progress + request);
    const Place from = places[request];
    if (from.row >= 0) draw(a, from, request, tile);
    if (count_in(progress + request) != 2 * TILES) return;
    if (from.row >= 0) {
        const int id = best_drawn(a, request);
        if (threadIdx.x == 0) token_ids[(long long)request * ROWS + from.kept] = id;
    }
    if (threadIdx.x == 0) progress[request] = 0;
}
