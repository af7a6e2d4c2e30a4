// Partial attention of all ranks over one head, merged: `peer_merge.py` says what. The instructions are those of
// `merge_shards`, so that the bits are the same whichever way a row went.
//
// Macros: RANKS, VALUES of a head's output.

#include "peer_words.cuh"

constexpr int LANES = VALUES / 8;  // threads that share a head, eight values of each rank a thread

__device__ __forceinline__ float larger(float a, float b) {
    float top;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(top) : "f"(a), "f"(b));
    return top;
}
__device__ __forceinline__ float exponential(float x) {
    float result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(__fmul_rn(x, 1.44269504f)));
    return result;
}
__device__ __forceinline__ u32 quotients(const float* values, float divisor) {
    float first, second;
    u32 pair;
    asm("div.full.f32 %0, %1, %2;" : "=f"(first) : "f"(values[0]), "f"(divisor));
    asm("div.full.f32 %0, %1, %2;" : "=f"(second) : "f"(values[1]), "f"(divisor));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Added from the first to the last; a rank whose LSE is -inf counts for nothing, whatever its output is.
__device__ __forceinline__ uint4 merged(const uint4 (&out)[RANKS], const float (&lse)[RANKS], float& merged_lse) {
    const float empty = -__int_as_float(0x7f800000);
    float top = empty;
#pragma unroll
    for (int n = 0; n < RANKS; ++n) top = larger(top, lse[n]);
    const float base = top == empty ? 0.0f : top;  // -inf - -inf would be NaN
    float total = 0.0f, sum[8] = {};
#pragma unroll
    for (int n = 0; n < RANKS; ++n) {
        const float share = exponential(__fsub_rn(lse[n], base));
        total = __fadd_rn(total, share);
        const u32 pairs[4] = {out[n].x, out[n].y, out[n].z, out[n].w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = i % 2 ? high(pairs[i / 2]) : low(pairs[i / 2]);
            sum[i] = __fadd_rn(sum[i], lse[n] == empty ? 0.0f : __fmul_rn(share, value));
        }
    }
    total = larger(total, 1.0f);  // below 1 only where all are empty
    merged_lse = __fadd_rn(top, logf(total));
    return {quotients(sum, total), quotients(sum + 2, total), quotients(sum + 4, total), quotients(sum + 6, total)};
}
