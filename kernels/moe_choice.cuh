// The best CHOSEN experts of a token, found by a warp whose lane has experts 8 * lane .. 8 * lane + 7.

#pragma once

#include "float_order.cuh"

static_assert(EXPERTS == 256 && CHOSEN <= 32, "each lane of a warp has 8 experts, and one place of the chosen");

__device__ __forceinline__ float score_of(float logit) { return 1.0f / (1.0f + expf(-logit)); }

struct Choice {
    int expert;
    float weight;
};

// Gives lane c < CHOSEN the expert in place c, best first, of equal ones the lower; the weights sum up to `scaling`.
__device__ __forceinline__ Choice choose_experts(const float* scores, const float (&bias)[8], float scaling, int lane) {
    float score[8];
    *(float4*)&score[0] = ((const float4*)scores)[lane * 2];
    *(float4*)&score[4] = ((const float4*)scores)[lane * 2 + 1];
    u32 key[8];
#pragma unroll
    for (int j = 0; j < 8; j++) key[j] = order_of(score[j] + bias[j]);
    Choice choice = {0, 0.0f};
    float sum = 0.0f;
#pragma unroll 1  // what no block ran before is fetched from far
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
        if (lane == place) choice = {its, value};
    }
    choice.weight = choice.weight / (sum + 1e-20f) * scaling;
    return choice;
}
