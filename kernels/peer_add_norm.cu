// The ranks' parts of some rows added up, the sum added to the residual stream, and the norm of that:
// `peer_add_norm.py` says what.
//
// Eight blocks share a row, as the eight warps of `add_rms_norm` do, and add squares in its order: part p has the
// values of warp p. Warp r of a block sends this rank's part to rank r and takes in that of rank r; the first warp adds
// them all. Words come with their epoch, so nothing is fenced and no flag follows.
//
// Two places for a block's words, taken in turn, are enough. A rank sends epoch e over epoch e - 2. It has then ended
// the kernel of e - 1, so it has seen words that the peer sent there, which it did once its kernel of e - 2 had ended.
//
// Macros: RANKS, FEATURES of a row, where WORDS_AT and how many WORDS_BYTES of a block, parity and rank.

#include "peer_words.cuh"

constexpr int PARTS = 8, LANES = 32, WORD_PAIRS = 2;  // pairs of words that a lane moves in a step: eight values
constexpr int STEP_FEATURES = PARTS * LANES * 8, STEPS = FEATURES / STEP_FEATURES;
static_assert(FEATURES % STEP_FEATURES == 0 && STEPS * WORD_PAIRS * LANES * 16 <= WORDS_BYTES, "the row is cut evenly");

__device__ __forceinline__ u32 add(u32 a, u32 b) {  // two bfloat16, each rounded
    u32 sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}
__device__ __forceinline__ uint4 add(const uint4& a, const uint4& b) {
    return {add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w)};
}
__device__ __forceinline__ u32 scaled(u32 pair, float factor, u32 weight) {
    u32 rounded, product;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(high(pair) * factor), "f"(low(pair) * factor));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(rounded), "r"(weight));
    return product;
}

// A value for every block of the cluster, in the place that each has for it in its shared memory.
__device__ __forceinline__ void put_in_cluster(const float* place, u32 block, float value) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
__device__ __forceinline__ void begin_in_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive_in_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(RANKS * LANES) peer_add_norm(
    uint4* __restrict__ x,             // [T, FEATURES] bf16, becomes the sum
    const uint4* delta,                // [T, FEATURES] bf16: this rank's part
    const uint4* __restrict__ weight,  // [FEATURES] bf16
    uint4* __restrict__ normed,        // [T, FEATURES] bf16
    u8* const* __restrict__ slabs,     // [RANKS], as this rank has mapped them; its own among them
    u32* __restrict__ epochs,          // of each block the last
    const u32* given_up, u32* seen,    // as `GivenUp` has them
    long long rank, float eps) {
    __shared__ uint4 part_of[RANKS][STEPS][LANES];
    __shared__ float squares[PARTS];
    const int lane = threadIdx.x % LANES, peer = threadIdx.x / LANES, self = rank;
    const int part = blockIdx.x % PARTS;
    const long long row = blockIdx.x / PARTS;
    begin_in_cluster();
    const auto words_of = [&](u8* slab, u32 epoch, int sender) {
        const long long place = ((long long)blockIdx.x * 2 + epoch % 2) * RANKS + sender;
        return (ulonglong2*)(slab + WORDS_AT + place * WORDS_BYTES) + lane;
    };
    u8* const peer_slab = slabs[peer];
    u8* const own_slab = slabs[self];
    const long long first = part * LANES + lane;  // of each step, in eights of values
    uint4 weights[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) weights[s] = weight[s * (STEP_FEATURES / 8) + first];
    wait_for_kernel_before();
    let_next_kernel_start();
    const u32 epoch = epochs[blockIdx.x] + 1;
    const long long place = row * (FEATURES / 8) + first;
    uint4 own[STEPS], sum[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) own[s] = delta[place + s * (STEP_FEATURES / 8)];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) sum[s] = peer == 0 ? x[place + s * (STEP_FEATURES / 8)] : uint4{};
    if (peer != self) {
        ulonglong2* const to = words_of(peer_slab, epoch, self);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            send_words(to + (2 * s) * LANES, own[s].x, own[s].y, epoch);
            send_words(to + (2 * s + 1) * LANES, own[s].z, own[s].w, epoch);
        }
        const ulonglong2* const from = words_of(own_slab, epoch, peer);
        const auto have_all = [&] {
            bool all = true;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                all &= have_words(from + (2 * s) * LANES, own[s].x, own[s].y, epoch);
                all &= have_words(from + (2 * s + 1) * LANES, own[s].z, own[s].w, epoch);
            }
            return all;
        };
        if (!await(have_all, {given_up, seen})) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) own[s] = {};
        }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) part_of[peer][s][lane] = own[s];
    __syncthreads();
    wait_for_cluster();  // all its blocks have begun: their shared memory is there

    if (peer == 0) {
        if (lane == 0) epochs[blockIdx.x] = epoch;
        float square[8] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            uint4 total = part_of[0][s][lane];
#pragma unroll
            for (int r = 1; r < RANKS; ++r) total = add(total, part_of[r][s][lane]);
            sum[s] = add(sum[s], total);
            x[place + s * (STEP_FEATURES / 8)] = sum[s];
            const u32 pairs[4] = {sum[s].x, sum[s].y, sum[s].z, sum[s].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                square[2 * i] = __fadd_rn(square[2 * i], __fmul_rn(low(pairs[i]), low(pairs[i])));
                square[2 * i + 1] = __fadd_rn(square[2 * i + 1], __fmul_rn(high(pairs[i]), high(pairs[i])));
            }
        }
        float all = square[0];
#pragma unroll
        for (int i = 1; i < 8; ++i) all = __fadd_rn(all, square[i]);
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) all = __fadd_rn(all, __shfl_xor_sync(~0u, all, step));
        if (lane < PARTS) put_in_cluster(&squares[part], lane, all);
    }
    __syncwarp();
    arrive_in_cluster();
    wait_for_cluster();
    if (peer != 0) return;
    float all = lane < PARTS ? squares[lane] : 0.0f;
#pragma unroll
    for (int step = PARTS / 2; step; step /= 2) all = __fadd_rn(all, __shfl_xor_sync(~0u, all, step));
    all = __shfl_sync(~0u, all, 0);
    float mean, factor;
    asm("div.full.f32 %0, %1, %2;" : "=f"(mean) : "f"(all), "f"((float)FEATURES));
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(__fadd_rn(mean, eps)));
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
        normed[place + s * (STEP_FEATURES / 8)] = {
            scaled(sum[s].x, factor, weights[s].x), scaled(sum[s].y, factor, weights[s].y),
            scaled(sum[s].z, factor, weights[s].z), scaled(sum[s].w, factor, weights[s].w)};
}
