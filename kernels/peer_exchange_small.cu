// Small rows of bytes from every rank to every other, in the time of one store: `peer_exchange.py` says what.
//
// A thread has one unit of one row: it sends it to that peer, its words beside the epoch, takes in the same unit of the
// row that comes from there, and writes it out. The halves of units lie apart, so that a warp writes whole lines. All
// launches count the same epoch, whatever their grids.
//
// Two places for a row, taken in turn, are enough. A rank sends epoch e over epoch e - 2. It has then ended the kernel
// of e - 1, so it has seen units that the peer sent there, which it did once its kernel of e - 2 had ended.
//
// Once the host has given up, what has not come counts as zeros.
//
// Macros: RANKS, THREADS; BLOCKS that have an epoch, MOST_UNITS of a row and where PAIRS_AT.

#include "peer_words.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) peer_exchange_small(
    const uint4* in,                   // what goes to rank r begins r * in_stride units behind
    uint4* __restrict__ out,           // [num_units / run, RANKS, run]: of each rank, a run of units at a time
    u8* const* __restrict__ slabs,     // [RANKS], as this rank has mapped them; its own among them
    u32* __restrict__ epochs,          // [BLOCKS], the same everywhere: the last
    const u32* given_up, u32* seen,    // as `GivenUp` has them
    long long rank, long long num_units, long long in_stride, long long run) {
    const int thread = threadIdx.x, self = rank, place = blockIdx.x * THREADS + thread;
    const int row = place / (int)num_units, unit = place % (int)num_units;
    const int out_place = (unit / (int)run * (RANKS - 1) + row) * (int)run + unit;
    const bool has_one = row < RANKS;
    const int peer = has_one ? row : self;
    u8* const peer_slab = slabs[peer];
    u8* const own_slab = slabs[self];
    wait_for_kernel_before();
    let_next_kernel_start();
    const u32 epoch = epochs[blockIdx.x] + 1;
    const auto pairs_of = [&](u8* slab, int sender) {
        return (ulonglong2*)(slab + PAIRS_AT) + (epoch % 2 * RANKS + sender) * 2ll * MOST_UNITS + unit;
    };
    const bool meets = peer != self;
    uint4 value = {};
    if (has_one) value = in[peer * in_stride + unit];
    if (meets) {
        ulonglong2* const to = pairs_of(peer_slab, self);
        send_words(to, value.x, value.y, epoch);
        send_words(to + MOST_UNITS, value.z, value.w, epoch);
    }
    const ulonglong2* const from = pairs_of(own_slab, peer);
    const auto have_unit = [&] {
        if (!meets) return true;
        const bool first = have_words(from, value.x, value.y, epoch);
        return have_words(from + MOST_UNITS, value.z, value.w, epoch) && first;
    };
    if (!await(have_unit, {given_up, seen}) && meets) value = {};
    if (has_one) out[out_place] = value;
    __syncthreads();  // all its threads have read the epoch
    if (thread == 0) epochs[blockIdx.x] = epoch;
    if (blockIdx.x == 0)
        for (int block = gridDim.x + thread; block < BLOCKS; block += THREADS) epochs[block] = epoch;
}
