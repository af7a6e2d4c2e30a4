// Logits of up to TOKENS rows and the best of each, without writing them: `lm_head_pick.py` says what.
//
// A block of threads owns ROWS rows of the weight, about a 132nd, and reads them once from end to end. A warp takes 16
// of the rows and every PARTS-th unit, 128 bytes of each row, through a ring of its own in shared memory, so that no
// warp waits for the weights of another; x, which all warps share, passes in chunks. At the end the parts of a sum are
// added in order, each block leaves the best of its rows, and the last block to finish compares the blocks.
//
// Macros: K columns, ROWS, TOKENS, FP8 weights or bfloat16, CHUNK columns of x, AHEAD slots of a ring, LOGITS: write
// them.

#include "float_order.cuh"
#include "tensor_core.cuh"

constexpr int N_TILES = TOKENS / 8, TILES = (ROWS + 15) / 16, PARTS = 2, WARPS = TILES * PARTS, THREADS = WARPS * 32;
constexpr int ROW_BYTES = FP8 ? K : 2 * K;
constexpr int UNIT_COLUMNS = FP8 ? 128 : 64;
constexpr int CHUNKS = K / CHUNK, OWN_UNITS = CHUNK / UNIT_COLUMNS / PARTS;  // of a chunk
constexpr int X_PITCH = CHUNK * 2 + 64;                                      // lanes of two rows meet no bank twice
constexpr int PIECES = CHUNK / 8, OWN_PIECES = (TOKENS * PIECES + THREADS - 1) / THREADS;  // of 16 bytes, of a chunk
constexpr int SCALE_ROWS = (ROWS + 62) / 64 + 1;

// Integers in the order of (value, then the lower id); none is 0.
__device__ __forceinline__ u64 key_of(float value, u32 id) { return (u64)order_of(value) << 32 | (~0u - id); }
__device__ __forceinline__ float value_of(u64 key) {
    const u32 order = (u32)(key >> 32);
    return __uint_as_float(order == ~0u ? 0x7fffffffu : order ^ (order >> 31 ? 0x80000000u : ~0u));
}
__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) lm_head_pick(
    const char* __restrict__ w,       // [num_rows, K] e4m3 or bf16
    const float* __restrict__ scale,  // [ceil(num_rows / 64), K / 128], of e4m3
    const char* __restrict__ x,       // [num_tokens, K] bf16
    float* logits,                    // [num_tokens, num_rows]
    u64* best_of_block,               // [blocks, TOKENS]
    u32* arrived,                     // 0 between calls
    float* value, long long* id,      // [num_tokens]
    bool* is_finite,                  // [num_tokens]
    long long num_rows, long long num_tokens, long long first_id) {
    extern __shared__ __align__(128) char shared[];
    char* xs = shared + WARPS * AHEAD * 2048;  // [2][TOKENS][X_PITCH], behind the rings
    __shared__ u64 best[TILES][TOKENS];
    __shared__ float scales[SCALE_ROWS][FP8 ? K / 128 : 1];
    __shared__ bool is_last;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, q = lane % 4;
    const int tile = warp % TILES, part = warp / TILES;
    const int first = blockIdx.x * ROWS, end = min(first + ROWS, (int)num_rows);
    const int row0 = first + tile * 16 + r, row1 = row0 + 8;

    char* ring = shared + warp * AHEAD * 2048;
    const u32 ring_at = shared_address(ring + chunk_at(lane / 8, lane % 8));
    const char* own_w = w + (long long)(first + tile * 16 + lane / 8) * ROW_BYTES + lane % 8 * 16;
    auto fetch = [&](int unit) {  // counted over the units of this warp
        if (unit < CHUNKS * OWN_UNITS) {
            const char* from = own_w + (unit * PARTS + part) * 128;
#pragma unroll
            for (int i = 0; i < 16; i += 4)
                if (first + tile * 16 + i + lane / 8 < end)
                    copy_async(ring_at + unit % AHEAD * 2048 + i * 128, from + (long long)i * ROW_BYTES);
        }
        end_of_copies();
    };
#pragma unroll
    for (int i = 0; i < AHEAD - 1; i++) fetch(i);
    if (FP8)
        for (int i = threadIdx.x; i < SCALE_ROWS * (K / 128); i += THREADS)
            scales[i / (K / 128)][i % (K / 128)] =
                scale[min(first / 64 + i / (K / 128), ((int)num_rows - 1) / 64) * (K / 128) + i % (K / 128)];
    wait_for_kernel_before();
    let_next_kernel_start();

    uint4 next_x[OWN_PIECES];
    auto fetch_x = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < OWN_PIECES; i++) {
            const int token = (threadIdx.x + i * THREADS) / PIECES, piece = (threadIdx.x + i * THREADS) % PIECES;
            next_x[i] = uint4{};
            if (token < num_tokens) next_x[i] = *(const uint4*)(x + (token * K + chunk * CHUNK) * 2ll + piece * 16);
        }
    };
    auto place_x = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < OWN_PIECES; i++) {
            const int token = (threadIdx.x + i * THREADS) / PIECES, piece = (threadIdx.x + i * THREADS) % PIECES;
            // A lane of FP8 owns two adjacent pieces of 64 columns: the four first ones of the lanes go in front.
            const int place = FP8 ? piece / 8 * 8 + piece % 2 * 4 + piece % 8 / 2 : piece;
            if (token < TOKENS) *(uint4*)(xs + (chunk % 2 * TOKENS + token) * X_PITCH + place * 16) = next_x[i];
        }
    };
    fetch_x(0);
    place_x(0);
    __syncthreads();

    float total[N_TILES][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk + 1 < CHUNKS) fetch_x(chunk + 1);
#pragma unroll
        for (int u = 0; u < OWN_UNITS; u++) {
            wait_for_copies<AHEAD - 2>();
            __syncwarp();
            const int unit = chunk * OWN_UNITS + u;
            fetch(unit + AHEAD - 1);  // into the slot that was read last
            const char* slot = ring + unit % AHEAD * 2048;
            const char* own_x =
                xs + (chunk % 2 * TOKENS + r) * X_PITCH + (u * PARTS + part) * UNIT_COLUMNS * 2 + q * 16;
            float sum[N_TILES][4] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 w0 = *(const uint4*)(slot + chunk_at(r, half * 4 + q));
                const uint4 w1 = *(const uint4*)(slot + chunk_at(r + 8, half * 4 + q));
#pragma unroll
                for (int j = 0; j < (FP8 ? 2 : 1); j++) {
                    uint4 xn[N_TILES];
#pragma unroll
                    for (int n = 0; n < N_TILES; n++)
                        xn[n] = *(const uint4*)(own_x + n * 8 * X_PITCH + (FP8 ? half * 2 + j : half) * 64);
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        Weights a;
                        if (FP8) {
                            widen(words(w0)[j * 2 + k], a.low_row0, a.high_row0);
                            widen(words(w1)[j * 2 + k], a.low_row1, a.high_row1);
                        } else {
                            a = {words(w0)[k * 2], words(w1)[k * 2], words(w0)[k * 2 + 1], words(w1)[k * 2 + 1]};
                        }
#pragma unroll
                        for (int n = 0; n < N_TILES; n++)
                            multiply_add(sum[n], a, words(xn[n])[k * 2], words(xn[n])[k * 2 + 1]);
                    }
                }
            }
            float scale0 = 1, scale1 = 1;
            if (FP8) {
                scale0 = scales[min(row0 / 64 - first / 64, SCALE_ROWS - 1)][unit * PARTS + part];
                scale1 = scales[min(row1 / 64 - first / 64, SCALE_ROWS - 1)][unit * PARTS + part];
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) total[n][e] = fmaf(e < 2 ? scale0 : scale1, sum[n][e], total[n][e]);
        }
        if (chunk + 1 < CHUNKS) place_x(chunk + 1);
        __syncthreads();
    }

    float4* other_part = (float4*)(shared + tile * AHEAD * 2048) + lane;  // the rings are free
    if (part == 1)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
            other_part[n * 32] = make_float4(total[n][0], total[n][1], total[n][2], total[n][3]);
    __syncthreads();
    if (part == 0) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            const float4 other = other_part[n * 32];
            total[n][0] += other.x, total[n][1] += other.y, total[n][2] += other.z, total[n][3] += other.w;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int token = n * 8 + q * 2 + e;
                u64 key = 0;
                if (row0 < end) key = key_of(total[n][e], row0);
                if (row1 < end) key = greater(key, key_of(total[n][2 + e], row1));
#if LOGITS
                if (row0 < end && token < num_tokens) logits[token * num_rows + row0] = total[n][e];
                if (row1 < end && token < num_tokens) logits[token * num_rows + row1] = total[n][2 + e];
#endif
#pragma unroll
                for (int step = 4; step < 32; step *= 2) key = greater(key, __shfl_xor_sync(~0u, key, step));
                if (r == 0) best[tile][token] = key;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < TOKENS) {
        u64 key = 0;
        for (int i = 0; i < TILES; i++) key = greater(key, best[i][threadIdx.x]);
        best_of_block[blockIdx.x * TOKENS + threadIdx.x] = key;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;

    __threadfence();
    for (int token = warp; token < num_tokens; token += WARPS) {
        u64 key = 0;
        for (int i = lane; i < gridDim.x; i += 32) key = greater(key, __ldcg(best_of_block + i * TOKENS + token));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) key = greater(key, __shfl_xor_sync(~0u, key, step));
        if (lane == 0) {
            const float its_value = value_of(key);
            value[token] = its_value, id[token] = first_id + (~0u - (u32)key);
            is_finite[token] = fabsf(its_value) < __uint_as_float(0x7f800000);
        }
    }
    if (threadIdx.x == 0) *arrived = 0;
}
