// The target's token of every row of logits, and the drafts that it agrees with: `chain_accept.py` says what.
//
// A block takes TILE ids of all rows of one request, so that the hash of an id is computed once for all of them, and
// leaves the best (score, id) of each row. The last block of a request to finish compares the tiles and walks the
// chain. Scores are float64 and take two logarithms each. A bound in float32 that is never below the score finds the
// few ids that can win, and only these are scored; so the result is exact, and the same in whatever order blocks run.
//
// Macros: those of `logit_scores.cuh`; NOISE: whether any row is drawn with it, BLOCKS that share a multiprocessor.

#include "logit_scores.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) chain_accept(
    const Logit* __restrict__ logits,      // [T, VOCAB], rows `row_stride` apart
    const long long* __restrict__ row_of,  // [B, ROWS] rows of each request
    const long long* __restrict__ drafts,  // [B, ROWS - 1], -1 behind the last
    const u64* __restrict__ keys,          // [T] of the noise; not read without NOISE
    const bool* __restrict__ greedy,       // [T]; null where no row is, not read without NOISE
    u64* __restrict__ best_order,          // [B, ROWS, TILES] workspace
    int* __restrict__ best_id,             // [B, ROWS, TILES] workspace
    u32* __restrict__ finished,            // [B] workspace, zeros before and after
    long long* __restrict__ token_ids,     // [B, ROWS]
    long long* __restrict__ num_accepted,  // [B]
    bool* __restrict__ drawable,           // [B]
    long long row_stride) {
    __shared__ const Logit* row[ROWS];
    __shared__ u64 key[ROWS];
    __shared__ float factor[ROWS];  // of the noise in a bound: 0 where a row is greedy
    __shared__ float chunk_top[ROWS][CHUNKS][THREADS];
    __shared__ u32 warp_top[ROWS][WARPS];
    __shared__ int top_chunk[ROWS];
    __shared__ u64 top[ROWS];
    __shared__ int top_id[ROWS];
    wait_for_kernel_before();
    let_next_kernel_start();
    const int tile = blockIdx.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const long long request = blockIdx.y;
    const int first_id = tile * TILE + thread * IDS;  // of chunk 0; the next is THREADS * IDS further
    if (thread < ROWS) {
        const long long number = row_of[request * ROWS + thread];
        row[thread] = logits + number * row_stride;
        key[thread] = NOISE ? keys[number] : 0;
        factor[thread] = NOISE && !(greedy && greedy[number]) ? LN_2 : 0.0f;
        top[thread] = 0, top_id[thread] = top_chunk[thread] = NOBODY;
    }
    __syncthreads();

    // The largest bound of each chunk: without noise it is the largest logit.
#if NOISE
    // A loop, as all of it in line would take longer to fetch than to run. Two steps' logits are on their way.
    Chunk<Logit> ahead[2];
    load(ahead[0], row[0], first_id);
    load(ahead[1], row[ROWS > 1], first_id + (ROWS > 1 ? 0 : THREADS * IDS));
    u64 id_hash[IDS];
#pragma unroll 1
    for (int step = 0; step < ROWS * CHUNKS; ++step) {
        const int r = step % ROWS, c = step / ROWS, id = first_id + c * THREADS * IDS;
        const Chunk<Logit> chunk = ahead[0];
        ahead[0] = ahead[1];
        if (step + 2 < ROWS * CHUNKS)
            load(ahead[1], row[(step + 2) % ROWS], first_id + (step + 2) / ROWS * THREADS * IDS);
        if (r == 0) {
#pragma unroll
            for (int i = 0; i < IDS; ++i) id_hash[i] = hash_of_id(id + i);
        }
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < IDS; ++i) {
            const float bound = bound_of(value_of(chunk.values[i]), mix(id_hash[i] ^ key[r]), factor[r]);
            largest = id + i < VOCAB ? larger(largest, bound) : largest;
        }
        chunk_top[r][c][thread] = largest;
    }
#else
    Chunk<Logit> chunk[ROWS][CHUNKS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) load(chunk[r][c], row[r], first_id + c * THREADS * IDS);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int id = first_id + c * THREADS * IDS;
            float largest = -INFINITY;
#pragma unroll
            for (int i = 0; i < IDS; ++i)
                largest = id + i < VOCAB ? larger(largest, value_of(chunk[r][c].values[i])) : largest;
            chunk_top[r][c][thread] = largest;
        }
#endif
    const auto thread_top = [&](int r) {
        float largest = chunk_top[r][0][thread];
#pragma unroll
        for (int c = 1; c < CHUNKS; ++c) largest = larger(largest, chunk_top[r][c][thread]);
        return first_id < VOCAB ? order_of(largest) : 0;
    };
#pragma unroll 2
    for (int r = 0; r < ROWS; ++r) {
        const u32 of_warp = __reduce_max_sync(~0u, thread_top(r));
        if (lane == 0) warp_top[r][warp] = of_warp;
    }
    __syncthreads();

    // The first chunk with the largest bound of its row.
#pragma unroll 2
    for (int r = 0; r < ROWS; ++r) {
        u32 largest = warp_top[r][0];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) largest = max(largest, warp_top[r][w]);
        if (warp_top[r][warp] != largest || thread_top(r) != largest) continue;
        int c = 0;
        while (order_of(chunk_top[r][c][thread]) != largest) ++c;
        atomicMin(&top_chunk[r], first_id + c * THREADS * IDS);
    }
    __syncthreads();

    // Its ids are scored, all rows at once. A greedy row is decided then.
    const auto score = [&](int r, int id) {
        const float logit = value_of(row[r][id]);
        return factor[r] ? noisy_order(logit, mix(hash_of_id(id) ^ key[r])) : order_of((double)logit);
    };
    const int own_row = thread / IDS;
    u64 own_order = 0;
    int own_id = NOBODY;
    if (own_row < ROWS && top_chunk[own_row] + thread % IDS < VOCAB) {
        own_id = top_chunk[own_row] + thread % IDS;
        own_order = score(own_row, own_id);
        atomicMax(&top[own_row], own_order);
    }
    __syncthreads();
#if NOISE
    // Of other chunks, only ids whose bound reaches that score can have a better one: mostly there is none.
    bool is_ready = false;
#pragma unroll 1
    for (int pass = 0; pass < 2 && !is_ready; ++pass) {  // the best score, then who has it
        bool found = false;
#pragma unroll 1
        for (int r = 0; r < ROWS; ++r) {
            const double best = double_of(top[r]);
            if (!factor[r] || !(fabs(best) < INFINITY)) continue;  // NaN, or nothing to draw
            const float least = least_bound(best);
#pragma unroll 1
            for (int c = 0; c < CHUNKS; ++c) {
                int id = first_id + c * THREADS * IDS;
                if (id == top_chunk[r] || !(chunk_top[r][c][thread] >= least)) continue;
                for (const int end = min(id + IDS, VOCAB); id < end; ++id) {
                    if (bound_of(value_of(row[r][id]), mix(hash_of_id(id) ^ key[r]), LN_2) < least) continue;
                    const u64 order = score(r, id);
                    if (pass == 0) atomicMax(&top[r], order);
                    else if (order == top[r]) atomicMin(&top_id[r], id);
                    found = true;
                }
            }
        }
        is_ready = !__syncthreads_or(found);
    }
#endif
    if (own_row < ROWS && own_order == top[own_row]) atomicMin(&top_id[own_row], own_id);
    __syncthreads();

    if (thread < ROWS) {
        const long long place = (request * ROWS + thread) * TILES + tile;
        best_order[place] = top[thread];
        best_id[place] = top_id[thread];
    }
    if (!comes_last(finished + request)) return;

    for (int r = warp; r < ROWS; r += WARPS) {
        const long long place = (request * ROWS + r) * TILES;
        u64 order;
        int id;
        best_of_tiles(best_order + place, best_id + place, order, id);
        if (lane == 0) top[r] = order, top_id[r] = id;
    }
    __syncthreads();
    if (warp != 0) return;
    const bool is_row = lane < ROWS;
    const long long draft = lane < ROWS - 1 ? drafts[request * (ROWS - 1) + lane] : -1;
    const long long id = is_row ? top_id[lane] : 0;
    const bool is_drawable = is_row && fabs(double_of(top[lane])) < INFINITY;  // not so of NaN
    const bool is_kept = __shfl_down_sync(~0u, is_drawable, 1) && draft == id;  // no draft is behind the last
    const int kept = __ffs(__ballot_sync(~0u, !is_kept)) - 1;
    if (is_row) token_ids[request * ROWS + lane] = lane <= kept ? id : -1;
    if (lane == 0) num_accepted[request] = kept, drawable[request] = is_drawable, finished[request] = 0;
}
