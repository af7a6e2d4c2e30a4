// Heads of every rank sent to the ranks that keep them, and merged there: `peer_merge.py` says what.
//
// A block has its share of the heads that a rank keeps, and passes them on in chunks, where and as `peer_exchange`
// does: it writes what it has of every other rank's heads into their slabs, raises its flags there, waits for theirs
// here, and merges straight out of the slab. What is said there of places and epochs, which the two kernels share,
// holds here.
//
// Once the host has given up, ranks of which something has not come count as without keys.
//
// Macros: RANKS, VALUES, HEADS that a rank keeps, THREADS; BLOCKS, CHUNK bytes and where CHUNKS_AT.

#include "peer_merge.cuh"

constexpr int CHUNK_HEADS = CHUNK / (2 * VALUES + 4);  // of a chunk: their values, and behind these their LSEs
constexpr int STEP = THREADS / LANES;                  // heads that a block works on at once
constexpr int IN_FLIGHT = 8, MERGED = 8 / RANKS;       // of a thread: heads that it moves, or merges, at once
static_assert(CHUNK_HEADS > 0 && STEP > 0, "a chunk has a head, and so has a block");

// What peers wrote must come from where they wrote it: a load that the compiler or L1 cannot answer.
__device__ __forceinline__ uint4 fetch(const uint4* from) {
    uint4 unit;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(from)
                 : "memory");
    return unit;
}
__device__ __forceinline__ float fetch(const float* from) {
    float value;
    asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS) peer_merge(
    const uint4* out,                            // [T, RANKS, HEADS, VALUES] bf16, over this rank's keys
    const float* lse,                            // [T, RANKS, HEADS]
    const long long* __restrict__ first_owner,   // [B]
    uint4* __restrict__ merged_out,              // [T, HEADS, VALUES] bf16
    float* __restrict__ merged_lse,              // [T, HEADS]
    u8* const* __restrict__ slabs,               // [RANKS], as this rank has mapped them; its own among them
    u32* __restrict__ epochs,                    // [BLOCKS]: the last of each block
    const u32* given_up, u32* seen,              // as `GivenUp` has them
    long long rank, long long num_rows, long long rows_per_request) {
    __shared__ u8* slab[RANKS];
    const int thread = threadIdx.x, block = blockIdx.x, self = rank;
    const int lane = thread % LANES, step = thread / LANES;
    if (thread < RANKS) slab[thread] = slabs[thread];
    wait_for_kernel_before();
    let_next_kernel_start();
    u32 epoch = epochs[block];
    const int num_heads = (int)num_rows * HEADS, share = (num_heads + gridDim.x - 1) / gridDim.x;
    const int end = min((block + 1) * share, num_heads);
    __syncthreads();

    const auto chunk_of = [&](int holder, int sender) {
        const int place = (sender * BLOCKS + block) * 2 + epoch % 2;
        return (uint4*)(slab[holder] + CHUNKS_AT + (long long)place * CHUNK);
    };
    const auto lses_of = [&](uint4* chunk) { return (float*)(chunk + CHUNK_HEADS * LANES); };
    const auto flag_of = [&](int holder, int sender) { return (u32*)slab[holder] + block * RANKS + sender; };
    const auto head_of = [&](int head, int keeper) { return (head / HEADS * RANKS + keeper) * HEADS + head % HEADS; };
    for (int begin = block * share; begin < end; begin += CHUNK_HEADS) {
        const int count = min(end - begin, CHUNK_HEADS);
        ++epoch;
        for (int i = 1; i < RANKS; ++i) {  // each rank begins with another
            const int peer = (self + i) % RANKS;
            uint4* const to = chunk_of(peer, self);
            for (int head = step; head < count; head += IN_FLIGHT * STEP) {
                uint4 units[IN_FLIGHT];
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; ++k)
                    if (head + k * STEP < count)
                        units[k] = out[(long long)head_of(begin + head + k * STEP, peer) * LANES + lane];
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; ++k)
                    if (head + k * STEP < count) to[(head + k * STEP) * LANES + lane] = units[k];
            }
            for (int head = thread; head < count; head += THREADS) lses_of(to)[head] = lse[head_of(begin + head, peer)];
        }
        __syncthreads();
        const bool meets = thread < RANKS && thread != self;
        if (meets) raise_flag(flag_of(thread, self), epoch);
        const auto has_met = [&] { return !meets || is_raised(flag_of(self, thread), epoch); };
        const bool has_come = thread >= 32 || await(has_met, {given_up, seen});
        const bool is_whole = __syncthreads_and(has_come);
        for (int head = step; head < count; head += MERGED * STEP) {
            uint4 outs[MERGED][RANKS];
            float lses[MERGED][RANKS];
#pragma unroll
            for (int k = 0; k < MERGED; ++k) {
                const int here = min(head + k * STEP, count - 1), own = head_of(begin + here, self);
                const int first = first_owner[(begin + here) / HEADS / (int)rows_per_request];
#pragma unroll
                for (int n = 0; n < RANKS; ++n) {  // in the order in which they are added
                    const int peer = (first + n) % RANKS;
                    if (peer == self) {
                        outs[k][n] = out[(long long)own * LANES + lane], lses[k][n] = lse[own];
                    } else {
                        uint4* const from = chunk_of(self, peer);
                        outs[k][n] = fetch(from + here * LANES + lane);
                        lses[k][n] = is_whole ? fetch(lses_of(from) + here) : -__int_as_float(0x7f800000);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < MERGED; ++k) {
                if (head + k * STEP >= count) continue;
                const int here = begin + head + k * STEP;
                float total_lse;
                merged_out[(long long)here * LANES + lane] = merged(outs[k], lses[k], total_lse);
                if (lane == 0) merged_lse[here] = total_lse;
            }
        }
    }
    if (thread == 0) epochs[block] = epoch;
}
