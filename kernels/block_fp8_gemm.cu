// Block-FP8 linear for many rows of x, TOKENS = 32, 96 or 192 a block of threads: `block_fp8_linear.py` says what.
//
// Three kernels: `arrange_x` brings x into the order in which tensor cores read it, so that a whole stage of it is one
// copy; `block_fp8_gemm` leaves sums over GROUP blocks of 128 columns; `sum_groups` adds these up. Per row and token
// the products and sums are those of `block_fp8_gemv.cu` in the same order: wgmma and mma give the same bits.
//
// A block of threads of the product takes 128 rows of the weight, 64 a warp group, and multiplies registers (the
// weights, widened) by shared memory (x). A thread fetches just the weights that it will widen, all at once. x is
// arranged apart because threads that wrote it into shared memory would have to fence each stage for the tensor cores,
// and such a fence waits for every copy in flight, the weights among them.
//
// Macros: K columns, TOKENS, GROUP, STAGES of x in shared memory, OUT_F32 or bfloat16.

#include "tensor_core.cuh"

#if OUT_F32
typedef float Out;
#else
typedef u16 Out;  // bfloat16
#endif

constexpr int BLOCKS = K / 128, GROUPS = BLOCKS / GROUP;
constexpr int X_STAGE = TOKENS * 256;           // bytes: [8 steps][TOKENS / 8][2 halves][8 tokens][8 values]
constexpr int W_BLOCK = 128 * 128;              // bytes: [4][256 threads][16]
constexpr int SUMS = TOKENS / 2;                // of a thread
constexpr int TILE_SUMS = TOKENS * 32;          // float4 of a block of threads
constexpr int BUFFERS = TOKENS == 192 ? 1 : 2;  // of widened weights: as many as there are registers for

// Step 4 * half + j of a block of columns takes columns 64 * half + 16q + 4j .. + 3, the first two of each q in front.
extern "C" __global__ void __launch_bounds__(64) arrange_x(
    const u16* __restrict__ x,     // [num_tokens, K] bf16
    uint4* __restrict__ arranged,  // [tiles of tokens, BLOCKS, X_STAGE]
    long long num_tokens) {
    const int half = threadIdx.x / 32, j = threadIdx.x % 32 / 8, token = blockIdx.y * 8 + threadIdx.x % 8;
    let_next_kernel_start();
    wait_for_kernel_before();
    if (token >= num_tokens) return;  // what is there counts for no other token
    uint2 v[4];
#pragma unroll
    for (int q = 0; q < 4; q++)
        v[q] = *(const uint2*)(x + (long long)token * K + blockIdx.x * 128 + half * 64 + q * 16 + j * 4);
    uint4* to = arranged + ((long long)(token / TOKENS) * BLOCKS + blockIdx.x) * (X_STAGE / 16) +
                ((half * 4 + j) * (TOKENS / 8) + token % TOKENS / 8) * 16 + token % 8;
    to[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    to[8] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
}

// How the product names its operands: SUMS registers of sums, 4 of weights, the descriptor of x, whether to add.
#define FOUR(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define SIXTEEN(a, i) FOUR(a, i), FOUR(a, i + 4), FOUR(a, i + 8), FOUR(a, i + 12)
#if TOKENS == 192
#define ALL(a) SIXTEEN(a, 0), SIXTEEN(a, 16), SIXTEEN(a, 32), SIXTEEN(a, 48), SIXTEEN(a, 64), SIXTEEN(a, 80)
#define OPERANDS                                                                                                      \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"         \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"        \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"        \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, {%96,%97,%98,%99}, %100, p, 1, 1, 0;}"
#define PRODUCT "{.reg .pred p; setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
#elif TOKENS == 96
#define ALL(a) SIXTEEN(a, 0), SIXTEEN(a, 16), SIXTEEN(a, 32)
#define OPERANDS                                                                                                      \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"         \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, "                              \
    "{%48,%49,%50,%51}, %52, p, 1, 1, 0;}"
#define PRODUCT "{.reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
#else
#define ALL(a) SIXTEEN(a, 0)
#define OPERANDS "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
#define PRODUCT "{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
#endif

__device__ __forceinline__ void multiply(float (&sum)[SUMS], const Weights& w, u64 x, bool add) {
    asm volatile(PRODUCT OPERANDS
                 : ALL(sum)
                 : "r"(w.low_row0), "r"(w.low_row1), "r"(w.high_row0), "r"(w.high_row1), "l"(x), "r"((int)add));
}

// Of matrices of 8 tokens by 8 values, 128 bytes each: the next values are 128 bytes on, the next tokens 256.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return address >> 4 | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}

__device__ __forceinline__ void wait_for_phase(u32 barrier, int phase) {
    u32 is_done = 0;
    while (!is_done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(is_done) : "r"(barrier), "r"(phase) : "memory");
}

extern "C" __global__ void __launch_bounds__(256, 1) block_fp8_gemm(
    const unsigned char* __restrict__ w,    // [num_rows, K] e4m3
    const float* __restrict__ scale,        // [ceil(num_rows / 64), BLOCKS]
    const char* __restrict__ arranged,      // [tiles of tokens, BLOCKS, X_STAGE]
    float4* __restrict__ sums,              // [GROUPS, tiles of tokens, tiles of rows, TILE_SUMS]
    long long num_rows) {
    extern __shared__ __align__(128) char shared[];  // w [GROUP][W_BLOCK], x [STAGES][X_STAGE]
    __shared__ __align__(8) u64 arrived[STAGES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, q = lane % 4;
    const int row0 = blockIdx.x * 128 + warp * 16 + r, first_block = blockIdx.y * GROUP;
    const u32 own_w = shared_address(shared) + threadIdx.x * 16;
    const u32 xs = shared_address(shared) + GROUP * W_BLOCK;

#pragma unroll
    for (int b = 0; b < GROUP; b++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row0 + i / 2 * 8 < num_rows)
                copy_async(own_w + (b * 4 + i) * 4096,
                           w + (row0 + i / 2 * 8ll) * K + (first_block + b) * 128 + i % 2 * 64 + q * 16);
        end_of_copies();
    }
    float scales[GROUP];
#pragma unroll
    for (int b = 0; b < GROUP; b++)
        scales[b] = scale[min((int)blockIdx.x * 2 + warp / 4, ((int)num_rows - 1) / 64) * BLOCKS + first_block + b];

    auto fetch_x = [&](int b) {  // by one thread
        const u32 barrier = shared_address(arrived + b % STAGES);
        const char* from = arranged + ((long long)blockIdx.z * BLOCKS + first_block + b) * X_STAGE;
        arrive_and_expect(arrived + b % STAGES, X_STAGE);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(xs + b % STAGES * X_STAGE), "l"(from), "r"(X_STAGE), "r"(barrier) : "memory");
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init_barrier(arrived + i, 1);
        publish_barriers();
    }
    wait_for_kernel_before();
    let_next_kernel_start();
    if (threadIdx.x == 0)
        for (int b = 0; b < min(STAGES, GROUP); b++) fetch_x(b);
    __syncthreads();

    float sum[SUMS] = {}, total[SUMS] = {};
    Weights a[BUFFERS][8];
    auto widen_block = [&](int b) {
        end_of_copies();  // of nothing: the count of later groups is then the same for each block
        wait_for_copies<GROUP>();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w0 = *(const uint4*)(shared + (b * 4 + half) * 4096 + threadIdx.x * 16);
            const uint4 w1 = *(const uint4*)(shared + (b * 4 + half + 2) * 4096 + threadIdx.x * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                widen(words(w0)[j], a[b % BUFFERS][half * 4 + j].low_row0, a[b % BUFFERS][half * 4 + j].high_row0);
                widen(words(w1)[j], a[b % BUFFERS][half * 4 + j].low_row1, a[b % BUFFERS][half * 4 + j].high_row1);
            }
        }
    };
    if (BUFFERS == 2) widen_block(0);
#pragma unroll
    for (int b = 0; b < GROUP; b++) {
        if (BUFFERS == 1) widen_block(b);  // while the tensor cores work for the other warp group
        wait_for_phase(shared_address(arrived + b % STAGES), b / STAGES % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 8; step++)
            multiply(sum, a[b % BUFFERS][step], descriptor(xs + b % STAGES * X_STAGE + step * (TOKENS * 32)), step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (BUFFERS == 2 && b + 1 < GROUP) widen_block(b + 1);  // while the tensor cores work
        asm volatile("wgmma.wait_group.sync.aligned 0;" : ALL(sum)::"memory");
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = fmaf(scales[b], sum[i], total[i]);
        if (b + STAGES < GROUP) {
            __syncthreads();
            if (threadIdx.x == 0) fetch_x(b + STAGES);
        }
    }
    const long long tile = ((long long)blockIdx.y * gridDim.z + blockIdx.z) * gridDim.x + blockIdx.x;
    float4* own = sums + tile * TILE_SUMS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) own[i * 64] = make_float4(total[i], total[i + 1], total[i + 2], total[i + 3]);
}

// A thread adds up four sums, tokens 2q and 2q + 1 of rows r and r + 8, over the groups.
extern "C" __global__ void __launch_bounds__(256) sum_groups(
    const float4* __restrict__ sums,
    Out* __restrict__ y,  // [num_tokens, num_rows]
    long long num_rows, long long num_tokens) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = blockIdx.x * 128 + warp * 16 + lane / 4;
    const int token = blockIdx.z * TOKENS + blockIdx.y * 8 + lane % 4 * 2;
    const long long tile = (long long)blockIdx.z * gridDim.x + blockIdx.x;
    const float4* from = sums + tile * TILE_SUMS + blockIdx.y * 256 + threadIdx.x;
    wait_for_kernel_before();
    let_next_kernel_start();
    float total[4] = {};
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const float4 part = __ldcg(from + (long long)group * gridDim.z * gridDim.x * TILE_SUMS);
        total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (row + e / 2 * 8 < num_rows && token + e % 2 < num_tokens)
            store(y + (token + e % 2) * num_rows + row + e / 2 * 8, total[e]);
}
