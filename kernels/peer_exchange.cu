// Rows of bytes from every rank to every other: `peer_exchange.py` says what.
//
// A block has its share of every row, and passes it on in chunks. It writes a chunk into the slab of each peer, raises
// its flag there to the chunk's epoch, waits until all peers have raised theirs here, and copies out what they wrote.
// Block b of a rank meets block b of the others only. All ranks launch the same grids in the same order, so their
// blocks count the same epochs.
//
// Two places for a chunk, taken in turn, are enough. A rank writes epoch e over epoch e - 2. Before that it has seen
// the peer's flag of e - 1, which the peer raises behind a barrier that its threads pass once they have read e - 2.
//
// Once the host has given up, whatever has not come counts as zeros: numbers that no later kernel stumbles over.
//
// Macros: RANKS; UNIT bytes that are moved at once, 16, 4 or 1; THREADS; BLOCKS, CHUNK bytes and where CHUNKS_AT.

#include "peer_words.cuh"

#if UNIT == 16
typedef uint4 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef u8 Unit;
#endif

constexpr int IN_FLIGHT = 4;  // units of a thread

// What peers wrote must come from where they wrote it: a load that the compiler or L1 cannot answer.
__device__ __forceinline__ Unit fetch(const Unit* from) {
    Unit unit;
#if UNIT == 16
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(from)
                 : "memory");
#elif UNIT == 4
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(unit) : "l"(from) : "memory");
#else
    u32 byte;
    asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(byte) : "l"(from) : "memory");
    unit = (u8)byte;
#endif
    return unit;
}

template <typename Load, typename Place>
__device__ __forceinline__ void copy(long long count, const Load& load, const Place& place) {
    for (long long first = threadIdx.x; first < count; first += IN_FLIGHT * THREADS) {
        Unit units[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i)
            if (first + i * THREADS < count) units[i] = load(first + i * THREADS);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i)
            if (first + i * THREADS < count) *place(first + i * THREADS) = units[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) peer_exchange(
    const Unit* in,                    // what goes to rank r begins r * in_stride units behind
    Unit* __restrict__ out,            // [num_units / run, RANKS, run]: of each rank, a run of units at a time
    u8* const* __restrict__ slabs,     // [RANKS], as this rank has mapped them; its own among them
    u32* __restrict__ epochs,          // [BLOCKS]: the last of each block
    const u32* given_up, u32* seen,    // as `GivenUp` has them
    long long rank, long long num_units, long long in_stride, long long run) {
    __shared__ u8* slab[RANKS];
    const int thread = threadIdx.x, block = blockIdx.x, self = rank;
    if (thread < RANKS) slab[thread] = slabs[thread];
    wait_for_kernel_before();
    let_next_kernel_start();
    u32 epoch = epochs[block];
    const long long share = (num_units + gridDim.x - 1) / gridDim.x;
    const long long end = min((block + 1) * share, num_units);
    __syncthreads();

    const auto chunk_of = [&](int holder, int sender) {
        const int place = (sender * BLOCKS + block) * 2 + epoch % 2;
        return (Unit*)(slab[holder] + CHUNKS_AT + (long long)place * CHUNK);
    };
    const auto place_of = [&](int sender, long long unit) {
        const u32 runs_before = (u32)unit / (u32)run;
        return out + ((long long)runs_before * (RANKS - 1) + sender) * run + unit;
    };
    const auto flag_of = [&](int holder, int sender) { return (u32*)slab[holder] + block * RANKS + sender; };
    for (long long first = block * share; first < end; first += CHUNK / UNIT) {
        const long long count = min(end - first, (long long)(CHUNK / UNIT));
        ++epoch;
        for (int i = 1; i < RANKS; ++i) {  // each rank begins with another
            const int peer = (self + i) % RANKS;
            const Unit* from = in + peer * in_stride + first;
            Unit* const to = chunk_of(peer, self);
            copy(count, [&](long long unit) { return from[unit]; }, [&](long long unit) { return to + unit; });
        }
        __syncthreads();
        const bool meets = thread < RANKS && thread != self;
        if (meets) raise_flag(flag_of(thread, self), epoch);
        const Unit* own = in + self * in_stride + first;
        copy(count, [&](long long unit) { return own[unit]; },
             [&](long long unit) { return place_of(self, first + unit); });
        const auto has_met = [&] { return !meets || is_raised(flag_of(self, thread), epoch); };
        const bool has_come = thread >= 32 || await(has_met, {given_up, seen});
        const bool is_whole = __syncthreads_and(has_come);
        for (int i = 1; i < RANKS; ++i) {
            const int peer = (self + i) % RANKS;
            const Unit* from = chunk_of(self, peer);
            copy(count, [&](long long unit) { return is_whole ? fetch(from + unit) : Unit{}; },
                 [&](long long unit) { return place_of(peer, first + unit); });
        }
    }
    if (thread == 0) epochs[block] = epoch;
}
