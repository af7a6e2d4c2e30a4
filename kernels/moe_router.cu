// The experts of each token: router scores, then the best CHOSEN of them.
//
// `scores` cuts the sum over the hidden size into SLICES, one to a block: the router's weight is small, and only many
// blocks at once read it in a few microseconds. `choose` adds the slices. The cuts and the order are fixed, so that the
// scores of a token do not depend on the tokens beside it.

#define EACH _Pragma("unroll")

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int SLAB = 32;                   // experts of a block
constexpr int TOKENS = 32;                 // that a block takes at a time
constexpr int PART = HIDDEN / SLICES / 4;  // of the sum, a warp's
constexpr int CHUNKS = PART / 32;
static_assert(HIDDEN % (SLICES * 4 * 32) == 0 && EXPERTS == 256, "each lane of a warp has 8 experts");

__device__ uint4 load(const u16* pointer) { return __ldg((const uint4*)pointer); }

__device__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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
    uint4 low[CHUNKS], high[CHUNKS], column[TOKENS / 8][CHUNKS];
    EACH for (int c = 0; c < CHUNKS; c++) low[c] = load(rows + c * 32), high[c] = load(rows + 8LL * HIDDEN + c * 32);
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const auto load_columns = [&](int first) {
        EACH for (int tile = 0; tile < TOKENS / 8; tile++) {
            const int token = first + tile * 8 + lane / 4;
            EACH for (int c = 0; c < CHUNKS; c++)
                column[tile][c] = token < num_tokens ? load(x + (long long)token * HIDDEN + k + c * 32) : uint4{};
        }
    };
    load_columns(blockIdx.y * TOKENS);
    for (int first = blockIdx.y * TOKENS; first < num_tokens; first += gridDim.y * TOKENS) {
        EACH for (int tile = 0; tile < TOKENS / 8; tile++) {
            float sum[4] = {};
            EACH for (int c = 0; c < CHUNKS; c++) {
                const uint4 b = column[tile][c];
                multiply(sum, low[c].x, high[c].x, low[c].y, high[c].y, b.x, b.y);
                multiply(sum, low[c].z, high[c].z, low[c].w, high[c].w, b.z, b.w);
            }
            EACH for (int j = 0; j < 4; j++)
                part[quarter][tile * 8 + lane % 4 * 2 + j % 2][group * 16 + lane / 4 + j / 2 * 8] = sum[j];
        }
        load_columns(first + gridDim.y * TOKENS);
        __syncthreads();
        for (int token = warp; token < TOKENS && first + token < num_tokens; token += 8) {
            float sum = part[0][token][lane];
            EACH for (int q = 1; q < 4; q++) sum += part[q][token][lane];
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
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < COUNTERS; i += 128) counters[i] = 0;
    float4 slice[SLICES / 4][2];
    EACH for (int i = 0; i < SLICES / 4; i++) {
        const int at = warp * (SLICES / 4) + i;
        const float4* row = (const float4*)(partial + ((long long)at * num_tokens + token) * EXPERTS + lane * 8);
        slice[i][0] = __ldcg(row), slice[i][1] = __ldcg(row + 1);
    }
    const auto add = [](float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; };
    EACH for (int j = 0; j < 2; j++) {
        EACH for (int i = 1; i < SLICES / 4; i++) add(slice[0][j], slice[i][j]);
        quarter[warp][j][lane] = slice[0][j];
    }
    __syncthreads();
    if (warp > 0) return;
    EACH for (int j = 0; j < 2; j++)
        EACH for (int q = 1; q < 4; q++) add(slice[0][j], quarter[q][j][lane]);
    float score[8];
    *(float4*)&score[0] = slice[0][0], *(float4*)&score[4] = slice[0][1];
    u32 key[8];
    EACH for (int j = 0; j < 8; j++) {
        score[j] = 1.0f / (1.0f + expf(-score[j]));
        key[j] = order(score[j] + bias[lane * 8 + j]);
    }
    float chosen = 0.0f, sum = 0.0f;
    int expert = 0;
    EACH for (int place = 0; place < CHOSEN; place++) {
        u32 best = key[0];
        int at = 0;
        float value = score[0];
        EACH for (int j = 1; j < 8; j++)
            if (key[j] > best) best = key[j], at = j, value = score[j];
        const u32 winner = __reduce_max_sync(~0u, best);
        const int owner = __ffs(__ballot_sync(~0u, best == winner)) - 1;  // lower lanes have lower experts
        const int its = __shfl_sync(~0u, lane * 8 + at, owner);
        value = __shfl_sync(~0u, value, owner);
        if (lane == owner) EACH for (int j = 0; j < 8; j++) if (j == at) key[j] = 0;
        sum += value;
        if (lane == place) expert = its, chosen = value;
    }
    if (lane < CHOSEN) {
        expert_TC[token * CHOSEN + lane] = expert;
        weight_TC[token * CHOSEN + lane] = chosen / (sum + 1e-20f) * scaling;
    }
}
