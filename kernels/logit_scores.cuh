// What kernels share that draw a token from rows of logits: blocks of ids, noise, the best of all blocks.
//
// Macros: VOCAB ids, ROWS rows of a request, LOGITS_BF16 or float32, CHUNKS of ids of a thread, all in flight at once.

#pragma once

#include "float_order.cuh"
#include "hopper.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int IDS = 8;  // of a chunk: adjacent ids of a thread
constexpr int TILE = THREADS * IDS * CHUNKS, TILES = (VOCAB + TILE - 1) / TILE;
constexpr int NOBODY = 0x7fffffff;
constexpr float LN_2 = 0.69314718f;

static_assert(ROWS * IDS <= THREADS, "a thread for each id of a chunk of each row");

#if LOGITS_BF16
typedef u16 Logit;
__device__ __forceinline__ float value_of(Logit logit) { return __uint_as_float((u32)logit << 16); }
#else
typedef float Logit;
__device__ __forceinline__ float value_of(Logit logit) { return logit; }
#endif

template <typename T>
union Chunk {
    uint4 words[IDS * sizeof(T) / 16];
    T values[IDS];
};

// The values of a row from `id` on; what is behind the last id is not looked at.
template <typename T>
__device__ __forceinline__ void load(Chunk<T>& chunk, const T* row, int id) {
    if (VOCAB % IDS == 0) {
#pragma unroll
        for (int i = 0; i < sizeof(chunk.words) / 16; ++i)
            if (id < VOCAB) chunk.words[i] = __ldcs(reinterpret_cast<const uint4*>(row + id) + i);
    } else {
#pragma unroll
        for (int i = 0; i < IDS; ++i)
            if (id + i < VOCAB) chunk.values[i] = row[id + i];
    }
}

__device__ __forceinline__ float larger(float a, float b) {  // NaN is the largest
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// The noise of `gumbel_noise.py`.
__device__ __forceinline__ u64 mix(u64 hash) {
    hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9ull;
    hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBull;
    return hash ^ (hash >> 31);
}
__device__ __forceinline__ u64 hash_of_id(int id) { return mix(0x9E3779B97F4A7C15ull * (u64)(id + 1)); }
__device__ __forceinline__ double uniform_of(u64 hash) {
    return __longlong_as_double((hash >> 12) | (0x3FFull << 52)) - (1 - 0x1p-53);
}
__device__ __noinline__ u64 noisy_order(float logit, u64 hash) {
    return order_of((double)logit - log(-log(uniform_of(hash))));
}

// At least logit + noise, but for rounding: -log(u) >= 1 - u, here rounded down to 23 bits. `factor` is that of a
// base 2 logarithm, or 0 where a row is greedy and its bound is the logit.
__device__ __forceinline__ float bound_of(float logit, u64 hash, float factor) {
    const u32 complement = ~(u32)(hash >> 32) >> 9;
    const float below = fmaxf(__uint_as_float(0x3F800000u | complement) - 1.0f, 0x1p-53f);
    return logit - factor * __log2f(below);
}
// What the bound of an id must reach whose score does: less by the rounding of the logarithm, up to 1e-5, and of the
// difference, in its last digit.
__device__ __forceinline__ float least_bound(double score) {
    const float below = __double2float_rd(score);
    return below - (2e-5f + 4.8e-7f * fabsf(below));
}

// Whether this block is the last of TILES to come here; it then sees what the others wrote before.
__device__ __forceinline__ bool comes_last(u32* finished) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(finished, 1) == TILES - 1;
    __syncthreads();
    __threadfence();
    return is_last;
}

// The best of a row's tiles for every lane of a warp; the lowest id on a tie.
__device__ __forceinline__ void best_of_tiles(const u64* tile_order, const int* tile_id, u64& order, int& id) {
    constexpr int EACH = (TILES + 31) / 32;
    const int lane = threadIdx.x % 32;
    u64 orders[EACH];
    int ids[EACH];
#pragma unroll
    for (int t = 0; t < EACH; ++t) {
        const bool exists = 32 * t + lane < TILES;
        orders[t] = exists ? __ldcg(tile_order + 32 * t + lane) : 0;
        ids[t] = exists ? __ldcg(tile_id + 32 * t + lane) : NOBODY;
    }
    order = 0, id = NOBODY;
#pragma unroll
    for (int t = 0; t < EACH; ++t)  // ids ascend with tiles
        if (orders[t] > order) order = orders[t], id = ids[t];
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        const u64 other = __shfl_xor_sync(~0u, order, distance);
        const int other_id = __shfl_xor_sync(~0u, id, distance);
        if (other > order || (other == order && other_id < id)) order = other, id = other_id;
    }
}
