// The experts of each token: router scores, then the best CHOSEN of them. `moe_experts.py` says what.
//
// `scores` cuts the sum over the hidden size into SLICES, one to a block: the router's weight is small, and only many
// blocks at once read it in a few microseconds. `choose` adds the slices. The cuts and the order are fixed, so that the
// scores of a token do not depend on the tokens beside it.
//
// Macros: HIDDEN size, EXPERTS, CHOSEN, SLICES of a sum, COUNTERS to set to zero.

#include "tensor_core.cuh"

constexpr int SLAB = 32;                   // experts of a block
constexpr int TOKENS = 32;                 // that a block takes at a time
constexpr int PART = HIDDEN / SLICES / 4;  // of the sum, a warp's
constexpr int CHUNKS = PART / 32;
static_assert(HIDDEN % (SLICES * 4 * 32) == 0 && EXPERTS == 256, "each lane of a warp has 8 experts");

__device__ uint4 load(const u16* pointer) { return __ldg((const uint4*)pointer); }

// Blocks: x = slab and slice, y = first tokens. Warps: 2 groups of 16 experts by 4 parts of the slice. A block keeps
// its piece of the router's weight for all its tokens, and loads the next ones while it adds up the parts of the last.
extern "C" __global__ void __launch_bounds__(256, 2) scores(
    const u16* x,       // [T, HIDDEN] bf16
    const u16* router,  // [EXPERTS, HIDDEN] bf16
    float* partial,     // [SLICES, T, EXPERTS]
    long long num_tokens) {
    __shared__ float part[4][TOKENS][SLAB + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp % 2, quarter = warp / 2;
    const int slab = blockIdx.x % (EXPERTS / SLAB) * SLAB, slice = blockIdx.x / (EXPERTS / SLAB);
    // A lane takes 8 neighbours of each row: any order of the sum will do that is the same on both sides.
    const long long k = (slice * 4 + quarter) * PART + lane % 4 * 8;
    const u16* rows = router + (slab + group * 16 + lane / 4) * (long long)HIDDEN + k;
    uint4 row0[CHUNKS], row1[CHUNKS], column[TOKENS / 8][CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) row0[c] = load(rows + c * 32), row1[c] = load(rows + 8LL * HIDDEN + c * 32);
    let_next_kernel_start();
    wait_for_kernel_before();
    const auto load_columns = [&](int first) {
#pragma unroll
        for (int tile = 0; tile < TOKENS / 8; tile++) {
            const int token = first + tile * 8 + lane / 4;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                column[tile][c] = token < num_tokens ? load(x + (long long)token * HIDDEN + k + c * 32) : uint4{};
        }
    };
    load_columns(blockIdx.y * TOKENS);
    for (int first = blockIdx.y * TOKENS; first < num_tokens; first += gridDim.y * TOKENS) {
#pragma unroll
        for (int tile = 0; tile < TOKENS / 8; tile++) {
            float sum[4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const uint4 b = column[tile][c];
                multiply_add(sum, {row0[c].x, row1[c].x, row0[c].y, row1[c].y}, b.x, b.y);
                multiply_add(sum, {row0[c].z, row1[c].z, row0[c].w, row1[c].w}, b.z, b.w);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                part[quarter][tile * 8 + lane % 4 * 2 + j % 2][group * 16 + lane / 4 + j / 2 * 8] = sum[j];
        }
        load_columns(first + gridDim.y * TOKENS);
        __syncthreads();
        for (int token = warp; token < TOKENS && first + token < num_tokens; token += 8) {
            float sum = part[0][token][lane];
#pragma unroll
            for (int q = 1; q < 4; q++) sum += part[q][token][lane];
            partial[((long long)slice * num_tokens + first + token) * EXPERTS + slab + lane] = sum;
        }
        __syncthreads();
    }
}

// A number that orders as the float does, NaN above all, never 0.
__device__ u32 order(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return ~0u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One block a token: each warp adds a quarter of the slices, the first one adds the quarters and chooses.
extern "C" __global__ void __launch_bounds__(128) choose(
    const float* partial,  // [SLICES, T, EXPERTS]
    const float* bias,     // [EXPERTS]
    int* expert_TC,        // [T, CHOSEN], best first; of equal ones the lower expert
    float* weight_TC,      // [T, CHOSEN]
    u32* counters,         // [COUNTERS], set to zero for the kernel of the experts
    float scaling,
    long long num_tokens) {
    __shared__ float4 quarter[4][2][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x;
    let_next_kernel_start();
    wait_for_kernel_before();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < COUNTERS; i += 128) counters[i] = 0;
    float4 slice[SLICES / 4][2];
#pragma unroll
    for (int i = 0; i < SLICES / 4; i++) {
        const int at = warp * (SLICES / 4) + i;
        const float4* row = (const float4*)(partial + ((long long)at * num_tokens + token) * EXPERTS + lane * 8);
        slice[i][0] = __ldcg(row), slice[i][1] = __ldcg(row + 1);
    }
    const auto add = [](float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; };
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int i = 1; i < SLICES / 4; i++) add(slice[0][j], slice[i][j]);
        quarter[warp][j][lane] = slice[0][j];
    }
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int q = 1; q < 4; q++) add(slice[0][j], quarter[q][j][lane]);
    float score[8];
    *(float4*)&score[0] = slice[0][0], *(float4*)&score[4] = slice[0][1];
    u32 key[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        score[j] = 1.0f / (1.0f + expf(-score[j]));
        key[j] = order(score[j] + bias[lane * 8 + j]);
    }
    float chosen = 0.0f, sum = 0.0f;
    int expert = 0;
#pragma unroll
    for (int place = 0; place < CHOSEN; place++) {
        u32 best = key[0];
        int at = 0;
        float value = score[0];
#pragma unroll
        for (int j = 1; j < 8; j++)
            if (key[j] > best) best = key[j], at = j, value = score[j];
        const u32 winner = __reduce_max_sync(~0u, best);
        const int owner = __ffs(__ballot_sync(~0u, best == winner)) - 1;  // lower lanes have lower experts
        const int its = __shfl_sync(~0u, lane * 8 + at, owner);
        value = __shfl_sync(~0u, value, owner);
        if (lane == owner)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j == at) key[j] = 0;
        sum += value;
        if (lane == place) expert = its, chosen = value;
    }
    if (lane < CHOSEN) {
        expert_TC[token * CHOSEN + lane] = expert;
        weight_TC[token * CHOSEN + lane] = chosen / (sum + 1e-20f) * scaling;
    }
}
