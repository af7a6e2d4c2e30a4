// What the kernels of packed_sparse_mla.py have in common: sizes, instructions, and the arithmetic that makes the bits.
//
// Macros: SPLIT slots of a split, PAGE_ROWS, INDEX_BYTES 4 or 8, OUT_BYTES 4 (float) or 2 (bfloat16), and WRITTEN_LAST:
// what the kernel directly in front may write of what is read here: 0 anything, 1 only queries, 2 only index lists.

#pragma once

#include "hopper.cuh"

using u8 = unsigned char;
using i64 = long long;
#if INDEX_BYTES == 8
using Index = long long;
#else
using Index = int;
#endif
#if OUT_BYTES == 2
using Out = u16;  // bits of a bf16
#else
using Out = float;
#endif

constexpr int LATENT = 512, ROPE = 64, QUERY = LATENT + ROPE, ROW = 656;  // values, values, values, bytes
constexpr int GROUPS = 4, GROUP = 128;                                    // of latent values with one scale
constexpr int SLOTS = 64;                                                 // of a tile
constexpr int STEPS = QUERY / 16, LATENT_STEPS = LATENT / 16;             // matrix steps of a score
#define INFINITY __uint_as_float(0x7f800000)
constexpr float LOWEST_SCALE = 1.17549435e-38f;
constexpr float LOG2_E = 1.44269504088896f, LN2 = 0.693147180559945f;
constexpr bool LIST_IS_OLD = WRITTEN_LAST == 1;

__device__ __align__(16) u8 zero_row[ROW];  // stands for a slot without a key

// The kernel in front has ended: all may be read, and memory written that it used. Also a second time.
__device__ void begin() {
    wait_for_kernel_before();
    let_next_kernel_start();
}

// Wait until a phase of the barrier is over; a lost copy ends the kernel instead of hanging the GPU.
__device__ void wait(u64* barrier, u32 phase) {
    u32 done = 0;
    for (int tries = 0; !done; tries++) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(phase)
                     : "memory");
        if (tries > 1 << 22) __trap();
    }
}

// Starts the copy of a cached row, or of zeros for a slot without a key; the barrier expects its bytes.
__device__ void copy_row(u8* target, const u8* pool, int index, i64 page_bytes, u64* barrier) {
    const u8* row = pool + ((u32)index / PAGE_ROWS) * page_bytes + (u32)index % PAGE_ROWS * ROW;
    row = index < 0 ? zero_row : row;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(target)),
        "l"(row), "r"(ROW), "r"(shared_address(barrier))
        : "memory");
}

__device__ void multiply(float (&sum)[4], const u32 (&a)[4], uint2 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

__device__ void multiply_bf16(float (&sum)[4], const u32 (&a)[4], uint2 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// fp16 pairs of the lower and the upper two of four e4m3 values.
__device__ void widen(u32 bytes, u32& low, u32& high) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
}

// fp16 pair of two heads' weights of slot g -> the pair of slots 2t and 2t + 1 for head g.
__device__ u32 transposed(float even, float odd) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
    return pair;
}

__device__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ u32 word(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The larger of a head's largest value so far and those of 8 bf16 values, without their signs.
__device__ float largest(float top, const uint4& values) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 pair = word(values, i);
        const float even = __uint_as_float(pair << 16), odd = __uint_as_float(pair & 0xffff0000);
        top = fmaxf(top, fmaxf(fabsf(even), fabsf(odd)));
    }
    return top;
}

// The power of two that is taken out of a head's latent query: fp16 has too few exponents for any query.
__device__ u32 query_exponent(float top) { return __float_as_uint(fmaxf(top, LOWEST_SCALE * 16)) & 0x7f800000; }

// fp16 pair of a bf16 pair, times a power of two.
__device__ u32 scaled(u32 pair, float by) {
    const float even = __uint_as_float(pair << 16), odd = __uint_as_float(pair & 0xffff0000);
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(odd * by), "f"(even * by));
    return result;
}

// Scores of a warp's 16 slots for HEAD_TILES * 8 heads, exponents of two, and the scales of their rows. This thread's A
// rows are slots g and g + 8, the first at `row_g`; of a group it takes values 32t .. 32t + 31. AT_ONCE groups are summed
// side by side; `query_at(step, n)` gives a B fragment of the query.
template <int AT_ONCE, int HEAD_TILES, typename QueryAt>
__device__ __forceinline__ void score_slots(float (&score)[HEAD_TILES][4], float (&scale_g)[GROUPS],
                                            float (&scale_g8)[GROUPS], const u8* row_g, int t,
                                            const float (&query_scale)[HEAD_TILES][2], float score_scale,
                                            QueryAt query_at) {
    *(float4*)scale_g = *(const float4*)(row_g + LATENT);
    *(float4*)scale_g8 = *(const float4*)(row_g + LATENT + 8 * ROW);
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) score[n][j] = 0;
#pragma unroll
    for (int first = 0; first < GROUPS; first += AT_ONCE) {
        float part[AT_ONCE][HEAD_TILES][4] = {};
#pragma unroll
        for (int piece = 0; piece < 2; piece++) {
            uint4 values[AT_ONCE], values8[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const u8* at = row_g + (first + i) * GROUP + t * 32 + piece * 16;
                values[i] = *(const uint4*)at;
                values8[i] = *(const uint4*)(at + 8 * ROW);
            }
#pragma unroll
            for (int step = 0; step < 4; step++) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    u32 a[4];
                    widen(word(values[i], step), a[0], a[2]);
                    widen(word(values8[i], step), a[1], a[3]);
#pragma unroll
                    for (int n = 0; n < HEAD_TILES; n++)
                        multiply(part[i][n], a, query_at((first + i) * 8 + piece * 4 + step, n));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    score[n][j] = fmaf(j < 2 ? scale_g[first + i] : scale_g8[first + i], part[i][n][j], score[n][j]);
    }
    float rotated[HEAD_TILES][4] = {};
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const u8* at = row_g + LATENT + 4 * GROUPS + t * 32 + piece * 16;
        const uint4 values = *(const uint4*)at, values8 = *(const uint4*)(at + 8 * ROW);
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const u32 a[4] = {word(values, step * 2), word(values8, step * 2), word(values, step * 2 + 1),
                              word(values8, step * 2 + 1)};
#pragma unroll
            for (int n = 0; n < HEAD_TILES; n++)
                multiply_bf16(rotated[n], a, query_at(LATENT_STEPS + piece * 2 + step, n));
        }
    }
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) score[n][j] = fmaf(score[n][j], query_scale[n][j % 2], rotated[n][j]) * score_scale;
}

// The larger scale of group t of a thread's two rows.
__device__ __forceinline__ float larger_scale(const float (&scale_g)[GROUPS], const float (&scale_g8)[GROUPS], int t) {
    return t == 0   ? fmaxf(scale_g[0], scale_g8[0])
           : t == 1 ? fmaxf(scale_g[1], scale_g8[1])
           : t == 2 ? fmaxf(scale_g[2], scale_g8[2])
                    : fmaxf(scale_g[3], scale_g8[3]);
}

// Adds weights of (top, sum) to those of (all_top, all_sum), and applies the same factors to weighted values.
struct Fold {
    float keep, take;
    __device__ Fold(float& all_top, float& all_sum, float top, float sum) {
        float most = fmaxf(all_top, top), safe = most == -INFINITY ? 0 : most;
        keep = exp2_fast(all_top - safe), take = exp2_fast(top - safe);
        all_top = most;
        all_sum = fmaf(take, sum, all_sum * keep);
    }
    __device__ float operator()(float all, float value) const { return fmaf(take, value, all * keep); }
};

// What a row's last state becomes: the factor on its weighted values, and its LSE. A row without a key has zeros.
struct Result {
    float by, lse;
    __device__ Result(float top, float sum) {
        const bool empty = top == -INFINITY && sum == 0;
        by = empty ? 0 : __fdividef(1, sum);
        lse = empty ? -INFINITY : (top + log2f(sum)) * LN2;
    }
};
