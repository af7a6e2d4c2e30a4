// Drafts kept by coins, and the token drawn behind them: `rejection_accept.py` says what.
//
// Two kernels, as no block knows which row to draw from before all rows have been summed up.
//
// Macros: those of `logit_scores.cuh`, with float32 logits; BLOCKS that share a multiprocessor.

#include "logit_scores.cuh"

enum Verdict { KNOWN, ALL_KEPT, REJECTED };  // the token is known; is the target's; replaces a draft

// What `judge` leaves of a request for `draw`.
struct Judged {
    float top, sum;  // of the row of the token: prob = exp(logit - top) / sum
    int verdict;
    int kept;
};

__device__ __forceinline__ float prob_of(float logit, float top, float sum) { return expf(logit - top) / sum; }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) judge(
    const float* __restrict__ logits,       // [T, VOCAB], rows `row_stride` apart
    const long long* __restrict__ row_of,   // [B, ROWS] rows of each request
    const long long* __restrict__ drafts,   // [B, ROWS - 1], -1 behind the last
    const float* __restrict__ draft_probs,  // [B, ROWS - 1, VOCAB]; null: every draft was certain
    const u64* __restrict__ coin_keys,      // [T]
    const bool* __restrict__ greedy,        // [T]; null where no row is
    float2* __restrict__ tile_sums,         // [B, ROWS, TILES] workspace: the largest logit, sum of exp(logit - it)
    int* __restrict__ tile_ids,             // [B, ROWS, TILES] workspace: the first id that has the largest logit
    u32* __restrict__ finished,             // [B] workspace, zeros before and after
    Judged* __restrict__ judged,            // [B]
    long long* __restrict__ token_ids,      // [B, ROWS]; the token behind the kept drafts only where it is known
    long long* __restrict__ num_accepted,   // [B]
    bool* __restrict__ drawable,            // [B]
    long long row_stride) {
    __shared__ u32 warp_top[ROWS][WARPS];
    __shared__ float warp_sum[ROWS][WARPS];
    __shared__ int top_id[ROWS];
    __shared__ float row_top[ROWS], row_sum[ROWS];
    wait_for_kernel_before();
    let_next_kernel_start();
    const int tile = blockIdx.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const long long request = blockIdx.y;
    const int first_id = tile * TILE + thread * IDS;
    row_of += request * ROWS;
    drafts += request * (ROWS - 1);
    if (thread < ROWS) top_id[thread] = NOBODY;

    Chunk<float> chunk[ROWS][CHUNKS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            load(chunk[r][c], logits + row_of[r] * row_stride, first_id + c * THREADS * IDS);
    u32 thread_top[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        thread_top[r] = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < IDS; ++i)
                if (first_id + c * THREADS * IDS + i < VOCAB)
                    thread_top[r] = max(thread_top[r], order_of(chunk[r][c].values[i]));
        const u32 of_warp = __reduce_max_sync(~0u, thread_top[r]);
        if (lane == 0) warp_top[r][warp] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        u32 largest = warp_top[r][0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) largest = max(largest, warp_top[r][w]);
        const float top = float_of(largest), base = top == -INFINITY ? 0.0f : top;
        float sum = 0.0f;
        int id = NOBODY;
#pragma unroll
        for (int c = CHUNKS - 1; c >= 0; --c)
#pragma unroll
            for (int i = IDS - 1; i >= 0; --i) {
                const int other = first_id + c * THREADS * IDS + i;
                if (other >= VOCAB) continue;
                sum += expf(chunk[r][c].values[i] - base);
                if (order_of(chunk[r][c].values[i]) == largest) id = other;
            }
        if (thread_top[r] == largest) atomicMin(&top_id[r], id);
#pragma unroll
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) warp_sum[r][warp] = sum;
        if (thread == 0) row_top[r] = top;
    }
    __syncthreads();
    if (thread < ROWS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) sum += warp_sum[thread][w];
        const long long place = (request * ROWS + thread) * TILES + tile;
        tile_sums[place] = make_float2(row_top[thread], sum);
        tile_ids[place] = top_id[thread];
    }
    if (!comes_last(finished + request)) return;

    for (int r = warp; r < ROWS; r += WARPS) {
        constexpr int EACH = (TILES + 31) / 32;
        const long long place = (request * ROWS + r) * TILES;
        float2 sums[EACH];
        int ids[EACH];
#pragma unroll
        for (int t = 0; t < EACH; ++t) {
            const bool exists = 32 * t + lane < TILES;
            sums[t] = exists ? __ldcg(tile_sums + place + 32 * t + lane) : make_float2(-INFINITY, 0.0f);
            ids[t] = exists ? __ldcg(tile_ids + place + 32 * t + lane) : NOBODY;
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
#pragma unroll
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        id = __reduce_min_sync(~0u, id);
        if (lane == 0) row_top[r] = top, row_sum[r] = sum, top_id[r] = id;
    }
    __syncthreads();
    if (warp != 0) return;
    const bool is_row = lane < ROWS;
    const long long row = row_of[is_row ? lane : 0];
    const long long draft = lane < ROWS - 1 ? drafts[lane] : -1;
    const bool is_greedy = greedy && greedy[row_of[0]];
    bool is_kept = false;
    if (draft >= 0) {
        const float prob = is_greedy ? draft == top_id[lane]
                                     : prob_of(logits[row * row_stride + draft], row_top[lane], row_sum[lane]);
        double coin = uniform_of(mix(hash_of_id(0) ^ coin_keys[row]));
        if (draft_probs) coin *= (double)draft_probs[(request * (ROWS - 1) + lane) * VOCAB + draft];
        is_kept = coin < (double)prob;
    }
    const bool is_drawable = is_row && fabsf(row_top[lane]) < INFINITY;  // not so of NaN
    const bool is_followed = __shfl_down_sync(~0u, is_drawable, 1);
    const int kept = __ffs(__ballot_sync(~0u, !(is_kept && is_followed))) - 1;  // no draft is behind the last
    const bool ends_with_draft = __shfl_sync(~0u, is_kept, kept), rejects = __shfl_sync(~0u, draft, kept) >= 0;
    const long long last_id = ends_with_draft ? draft : is_greedy && is_row ? top_id[lane] : -1;
    if (is_row) token_ids[request * ROWS + lane] = lane < kept ? draft : lane == kept ? last_id : -1;
    if (lane != 0) return;
    const Verdict verdict = is_greedy || ends_with_draft ? KNOWN : rejects ? REJECTED : ALL_KEPT;
    judged[request] = {row_top[kept], row_sum[kept], verdict, kept};
    num_accepted[request] = kept, drawable[request] = is_drawable, finished[request] = 0;
}

// What an id is drawn by: the logarithm of what the target's row holds beyond the draft's, and the target's own logit,
// which counts where all was kept or nothing is beyond.
enum { RESIDUAL, TARGET, CANDIDATES };

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) draw(
    const float* __restrict__ logits,         // as in `judge`
    const long long* __restrict__ row_of,
    const long long* __restrict__ drafts,
    const float* __restrict__ draft_probs,
    const u64* __restrict__ target_keys,      // [T]
    const u64* __restrict__ residual_keys,    // [T]
    const Judged* __restrict__ judged,        // [B]
    u64* __restrict__ best_order,             // [B, CANDIDATES, TILES] workspace
    int* __restrict__ best_id,                // [B, CANDIDATES, TILES] workspace
    u32* __restrict__ finished,               // [B] workspace, zeros before and after
    long long* __restrict__ token_ids,        // [B, ROWS]
    long long row_stride) {
    __shared__ u32 warp_top[CANDIDATES][WARPS];
    __shared__ u64 top[CANDIDATES];
    __shared__ int top_id[CANDIDATES];
    wait_for_kernel_before();
    let_next_kernel_start();
    const int tile = blockIdx.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const long long request = blockIdx.y;
    const Judged mine = judged[request];
    if (mine.verdict == KNOWN) return;
    const int first_id = tile * TILE + thread * IDS;
    const long long row = row_of[request * ROWS + mine.kept];
    const bool rejects = mine.verdict == REJECTED;
    const long long draft = rejects ? drafts[request * (ROWS - 1) + mine.kept] : -1;
    const u64 key = rejects ? residual_keys[row] : target_keys[row];
    const float* target = logits + row * row_stride;
    const float* draft_row =
        rejects && draft_probs ? draft_probs + (request * (ROWS - 1) + mine.kept) * VOCAB : nullptr;
    if (thread < CANDIDATES) top[thread] = 0, top_id[thread] = NOBODY;

    Chunk<float> target_chunk[CHUNKS], draft_chunk[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        load(target_chunk[c], target, first_id + c * THREADS * IDS);
        if (draft_row) load(draft_chunk[c], draft_row, first_id + c * THREADS * IDS);
    }
    const auto residual_of = [&](int id, float logit, float draft_prob) {
        float beyond = draft_row ? prob_of(logit, mine.top, mine.sum) - draft_prob : 0.0f;
        if (!draft_row && rejects && id != draft) beyond = prob_of(logit, mine.top, mine.sum);
        return logf(beyond < 0.0f ? 0.0f : beyond);  // NaN stays
    };
    // Bounds first; the ids whose bound is largest are scored, then those whose bound reaches that score.
    float bound[CANDIDATES][CHUNKS][IDS];
    u32 thread_top[CANDIDATES] = {0, 0};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < IDS; ++i) {
            const int id = first_id + c * THREADS * IDS + i;
            bound[RESIDUAL][c][i] = bound[TARGET][c][i] = -INFINITY;
            if (id >= VOCAB) continue;
            const u64 hash = mix(hash_of_id(id) ^ key);
            const float logit = target_chunk[c].values[i];
            bound[TARGET][c][i] = bound_of(logit, hash, LN_2);
            if (rejects) bound[RESIDUAL][c][i] = bound_of(residual_of(id, logit, draft_chunk[c].values[i]), hash, LN_2);
#pragma unroll
            for (int k = 0; k < CANDIDATES; ++k) thread_top[k] = max(thread_top[k], order_of(bound[k][c][i]));
        }
#pragma unroll
    for (int k = 0; k < CANDIDATES; ++k) {
        const u32 of_warp = __reduce_max_sync(~0u, thread_top[k]);
        if (lane == 0) warp_top[k][warp] = of_warp;
    }
    __syncthreads();
    for (int pass = 0; pass < 3; ++pass) {  // a score to reach, the best score, who has it
#pragma unroll
        for (int k = 0; k < CANDIDATES; ++k) {
            u32 largest = warp_top[k][0];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) largest = max(largest, warp_top[k][w]);
            const double best = double_of(top[k]);
            if (pass > 0 && !(fabs(best) < INFINITY)) continue;  // NaN, or nothing to draw
            const float least = least_bound(best);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < IDS; ++i) {
                    const int id = first_id + c * THREADS * IDS + i;
                    const bool counts = pass == 0 ? order_of(bound[k][c][i]) == largest : bound[k][c][i] >= least;
                    if (!counts || bound[k][c][i] == -INFINITY) continue;
                    const float logit = target[id];
                    const float value = k == TARGET ? logit : residual_of(id, logit, draft_row ? draft_row[id] : 0.0f);
                    const u64 order = noisy_order(value, mix(hash_of_id(id) ^ key));
                    if (pass < 2) atomicMax(&top[k], order);
                    else if (order == top[k]) atomicMin(&top_id[k], id);
                }
        }
        __syncthreads();
    }
    if (thread < CANDIDATES) {
        const long long place = (request * CANDIDATES + thread) * TILES + tile;
        best_order[place] = top[thread];
        best_id[place] = top_id[thread];
    }
    if (!comes_last(finished + request)) return;
    if (warp < CANDIDATES) {
        const long long place = (request * CANDIDATES + warp) * TILES;
        u64 order;
        int id;
        best_of_tiles(best_order + place, best_id + place, order, id);
        if (lane == 0) top[warp] = order, top_id[warp] = id;
    }
    __syncthreads();
    if (thread != 0) return;
    const bool is_beyond = top[RESIDUAL] != 0 && top[RESIDUAL] != ~0ull;  // something, and no NaN
    token_ids[request * ROWS + mine.kept] =
        is_beyond ? top_id[RESIDUAL] : top_id[TARGET] == NOBODY ? 0 : top_id[TARGET];
    finished[request] = 0;
}
