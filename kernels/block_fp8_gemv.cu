// Block-FP8 linear for up to TOKENS = 8 or 16 rows of x: `block_fp8_linear.py` says what.
//
// A block of threads owns ROWS rows of the weight, about a 132nd of it, over all columns, so that nothing is shared
// between blocks. Its warps take blocks of 128 columns in turn. All loads are issued at once, since latency is most of
// the time: activations straight into registers, weights in whole lines into shared memory that belongs to the warp.
// Rows and tokens that are not there leave whatever they find in sums of their own, which nobody stores.
// The products of each block of columns meet in shared memory and are added in the order of `block_fp8_linear.py`.
//
// Macros: K columns, ROWS, WARPS, TOKENS, GROUP blocks of columns that are added up first, OUT_F32 or bfloat16.

#include "tensor_core.cuh"

#if OUT_F32
typedef float Out;
#else
typedef u16 Out;  // bfloat16
#endif

constexpr int BLOCKS = K / 128, OWN_BLOCKS = (BLOCKS + WARPS - 1) / WARPS;
constexpr int TILES = (ROWS + 15) / 16, N_TILES = TOKENS / 8;
constexpr int UNITS = OWN_BLOCKS * TILES;      // 16 rows of 128 columns
constexpr int HELD_ROWS = (ROWS + 3) / 4 * 4;  // a copy of a warp moves 4 rows
constexpr int OUTPUTS = TILES * N_TILES * 128;
// Measured: behind all weights of several blocks, x comes last and everything waits for it; behind those of one block
// it comes in time, and these may be fetched while the kernel before still runs.
constexpr int UNITS_BEFORE_X = TILES;

template <int UNIT>
struct Units {  // for (unit = UNIT; unit < UNITS; unit++) with a constant to wait by
    template <class Body>
    static __device__ __forceinline__ void each(Body&& body) {
        if constexpr (UNIT < UNITS) {
            wait_for_copies<UNITS - 1 - UNIT>();
            body(UNIT / TILES, UNIT % TILES);
            Units<UNIT + 1>::each(body);
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) block_fp8_gemv(
    const unsigned char* __restrict__ w,  // [num_rows, K] e4m3
    const float* __restrict__ scale,      // [ceil(num_rows / 64), BLOCKS]
    const u16* __restrict__ x,            // [num_tokens, K] bf16
    Out* __restrict__ y,                  // [num_tokens, num_rows]
    long long num_rows, long long num_tokens) {
    extern __shared__ __align__(128) char shared[];
    float* sums = (float*)(shared + WARPS * OWN_BLOCKS * HELD_ROWS * 128);  // [BLOCKS, OUTPUTS]
    __shared__ float scales[2][BLOCKS];                                      // of ROWS <= 64 rows
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, q = lane % 4;
    const int first = blockIdx.x * ROWS, end = min(first + ROWS, (int)num_rows);

    char* own = shared + warp * (OWN_BLOCKS * HELD_ROWS * 128);
    auto fetch_weights = [&](int first_unit, int end_unit) {
#pragma unroll
        for (int unit = first_unit; unit < end_unit; unit++) {
            const int i = unit / TILES, t = unit % TILES, b = min(warp + i * WARPS, BLOCKS - 1);
#pragma unroll
            for (int row = t * 16; row < min(t * 16 + 16, ROWS); row += 4)  // behind the last row it comes again
                copy_async(shared_address(own + i * HELD_ROWS * 128 + chunk_at(row + lane / 8, lane % 8)),
                           w + (long long)min(first + row + lane / 8, end - 1) * K + b * 128 + lane % 8 * 16);
            end_of_copies();
        }
    };
    fetch_weights(0, UNITS_BEFORE_X);
    for (int i = threadIdx.x; i < 2 * BLOCKS; i += WARPS * 32)
        scales[i / BLOCKS][i % BLOCKS] =
            scale[min(first / 64 + i / BLOCKS, ((int)num_rows - 1) / 64) * BLOCKS + i % BLOCKS];
    wait_for_kernel_before();
    let_next_kernel_start();

    uint4 xs[OWN_BLOCKS][N_TILES][2][2] = {};
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; i++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (n * 8 + r < num_tokens && warp + i * WARPS < BLOCKS)
                    xs[i][n][j / 2][j % 2] =
                        load_now(x + (n * 8 + r) * K + (warp + i * WARPS) * 128 + j / 2 * 64 + q * 16 + j % 2 * 8);
    __syncwarp();  // or the compiler would put the copies in front
    fetch_weights(UNITS_BEFORE_X, UNITS);

    Units<0>::each([&](int i, int t) {
        __syncwarp();
        const bool has_row1 = t * 16 + 8 < ROWS;
        float sum[N_TILES][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const char* at = own + (i * HELD_ROWS + t * 16) * 128 + chunk_at(r, half * 4 + q);
            const uint4 row0 = *(const uint4*)at, row1 = has_row1 ? *(const uint4*)(at + 8 * 128) : uint4{};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                Weights a;
                widen(words(row0)[j], a.low_row0, a.high_row0);
                if (has_row1) widen(words(row1)[j], a.low_row1, a.high_row1);
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
                    const u32* pair = words(xs[i][n][half][j / 2]) + j % 2 * 2;
                    multiply_add(sum[n], a, pair[0], pair[1]);
                }
            }
        }
        if (warp + i * WARPS < BLOCKS)
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
                *(float4*)(sums + (warp + i * WARPS) * OUTPUTS + (t * N_TILES + n) * 128 + lane * 4) =
                    make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
    });
    __syncthreads();

    for (int i = threadIdx.x; i < OUTPUTS; i += WARPS * 32) {
        const int t = i / (N_TILES * 128), n = i / 128 % N_TILES, owner = i / 4 % 32, e = i % 4;
        const int row = first + t * 16 + e / 2 * 8 + owner / 4, token = n * 8 + owner % 4 * 2 + e % 2;
        const float* row_scales = scales[min(row / 64 - first / 64, 1)];
        float total = 0;
#pragma unroll
        for (int group = 0; group < BLOCKS / GROUP; group++) {
            float part = 0;
#pragma unroll
            for (int b = group * GROUP; b < (group + 1) * GROUP; b++)
                part = fmaf(row_scales[b], sums[b * OUTPUTS + i], part);
            total += part;
        }
        if (row < end && token < num_tokens) store(y + token * num_rows + row, total);
    }
}
