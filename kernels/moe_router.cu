// The experts of each token: router scores, then the best CHOSEN of them. `moe_experts.py` says what.
//
// `scores` cuts the sum over the hidden size into SLICES, one to a block: the router's weight is small, and only many
// blocks at once read it in a few microseconds. `choose` adds the slices. `few_scores` serves up to 8 tokens, whose
// experts `moe_experts.cu` chooses: it adds a quarter of the slices itself. The cuts and the order are fixed, so that
// the scores of a token do not depend on the tokens beside it.
//
// Macros: HIDDEN size, EXPERTS, CHOSEN, SLICES of a sum, COUNTERS to set to zero.

#include "moe_choice.cuh"
#include "tensor_core.cuh"

constexpr int SLAB = 32;                   // experts of a block
constexpr int TOKENS = 32;                 // that a block takes at a time
constexpr int PART = HIDDEN / SLICES / 4;  // of the sum, a warp's
constexpr int CHUNKS = PART / 32;
constexpr int QUARTER = SLICES / 4;  // of the slices: each is added up first
constexpr int FEW = 8;               // tokens
static_assert(HIDDEN % (SLICES * 4 * 32) == 0 && SLICES % 4 == 0, "whole chunks");

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

// Up to FEW tokens. Blocks: slab of 8 experts and quarter of the slices. Warps: parts of those slices, in order. An
// expert has but half of the rows of a product, and 128 blocks read the weight all the same.
extern "C" __global__ void __launch_bounds__(256) few_scores(
    const u16* x,        // [T, HIDDEN] bf16
    const u16* router,   // [EXPERTS, HIDDEN] bf16
    float* quarter_sum,  // [4, T, EXPERTS]
    u32* counters,       // [COUNTERS], set to zero for the kernel of the experts
    long long num_tokens) {
    constexpr int PARTS = QUARTER * 4, PARTS_EACH = PARTS / 8;
    __shared__ float part[PARTS][FEW][8 + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slab = blockIdx.x % (EXPERTS / 8) * 8, quarter = blockIdx.x / (EXPERTS / 8);
    const long long k = (quarter * PARTS + warp * PARTS_EACH) * PART + lane % 4 * 8;
    const u16* row = router + (slab + lane / 4) * (long long)HIDDEN + k;
    uint4 weights[PARTS_EACH * CHUNKS], column[PARTS_EACH * CHUNKS];
#pragma unroll
    for (int c = 0; c < PARTS_EACH * CHUNKS; c++) weights[c] = load(row + c * 32);
    let_next_kernel_start();  // which reads weights only, until it waits
    wait_for_kernel_before();
#pragma unroll
    for (int c = 0; c < PARTS_EACH * CHUNKS; c++)
        column[c] = lane / 4 < num_tokens ? __ldcg((const uint4*)(x + lane / 4 * HIDDEN + k + c * 32)) : uint4{};
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < COUNTERS; i += 256) counters[i] = 0;
#pragma unroll
    for (int p = 0; p < PARTS_EACH; p++) {
        float sum[4] = {};
#pragma unroll
        for (int c = p * CHUNKS; c < (p + 1) * CHUNKS; c++) {
            multiply_add(sum, {weights[c].x, 0, weights[c].y, 0}, column[c].x, column[c].y);
            multiply_add(sum, {weights[c].z, 0, weights[c].w, 0}, column[c].z, column[c].w);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) part[warp * PARTS_EACH + p][lane % 4 * 2 + j][lane / 4] = sum[j];
    }
    __syncthreads();
    const int token = threadIdx.x / 8, expert = threadIdx.x % 8;
    if (token >= num_tokens) return;
    float sum = 0.0f;
#pragma unroll
    for (int slice = 0; slice < QUARTER; slice++) {
        float its = part[slice * 4][token][expert];
#pragma unroll
        for (int p = 1; p < 4; p++) its += part[slice * 4 + p][token][expert];
        sum = slice == 0 ? its : sum + its;
    }
    quarter_sum[(quarter * num_tokens + token) * EXPERTS + slab + expert] = sum;
}

// One block a token: a thread adds the slices of two experts, quarter by quarter, and the first warp chooses.
extern "C" __global__ void __launch_bounds__(EXPERTS / 2) choose(
    const float* partial,  // [SLICES, T, EXPERTS]
    const float* bias,     // [EXPERTS]
    int* expert_TC,        // [T, CHOSEN], best first; of equal ones the lower expert
    float* weight_TC,      // [T, CHOSEN]
    u32* counters,         // [COUNTERS], set to zero for the kernel of the experts
    float scaling,
    long long num_tokens) {
    __shared__ __align__(16) float scores[EXPERTS];
    const int lane = threadIdx.x % 32, token = blockIdx.x;
    float bias_of[8];
#pragma unroll
    for (int j = 0; j < 8; j++) bias_of[j] = bias[lane * 8 + j];
    let_next_kernel_start();
    wait_for_kernel_before();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < COUNTERS; i += EXPERTS / 2) counters[i] = 0;
    float2 slice[SLICES];
#pragma unroll
    for (int i = 0; i < SLICES; i++)
        slice[i] = __ldcg((const float2*)(partial + (i * num_tokens + token) * EXPERTS) + threadIdx.x);
    const auto add = [](float2& a, const float2& b) { a.x += b.x, a.y += b.y; };
    float2 logit;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        float2 sum = slice[q * QUARTER];
#pragma unroll
        for (int i = 1; i < QUARTER; i++) add(sum, slice[q * QUARTER + i]);
        if (q == 0)
            logit = sum;
        else
            add(logit, sum);
    }
    scores[threadIdx.x * 2] = score_of(logit.x), scores[threadIdx.x * 2 + 1] = score_of(logit.y);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const Choice choice = choose_experts(scores, bias_of, scaling, lane);
    if (lane < CHOSEN) {
        expert_TC[token * CHOSEN + lane] = choice.expert;
        weight_TC[token * CHOSEN + lane] = choice.weight;
    }
}
