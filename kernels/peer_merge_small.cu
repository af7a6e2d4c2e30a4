// Few heads of every rank sent to the ranks that keep them, and merged there, in the time of one store:
// `peer_merge.py` says what.
//
// A thread has eight values of a head of one row that this rank keeps. It sends the same values of every other rank's
// head in that place, takes in what each other rank has for its own, and merges; the words travel beside the epoch, in
// the units of `peer_exchange_small`, and take turns with its rows: an LSE has a unit of its own behind all values.
// What is said there holds here: every thread that has a head hears from all ranks.
//
// Once the host has given up, a rank of which something has not come counts as one without keys.
//
// Macros: RANKS, VALUES, HEADS that a rank keeps, THREADS; BLOCKS that have an epoch, MOST_UNITS and where PAIRS_AT.

#include "peer_merge.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) peer_merge_small(
    const uint4* out,                            // [T, RANKS, HEADS, VALUES] bf16, over this rank's keys
    const float* lse,                            // [T, RANKS, HEADS]
    const long long* __restrict__ first_owner,   // [B]
    uint4* __restrict__ merged_out,              // [T, HEADS, VALUES] bf16
    float* __restrict__ merged_lse,              // [T, HEADS]
    u8* const* __restrict__ slabs,               // [RANKS], as this rank has mapped them; its own among them
    u32* __restrict__ epochs,                    // [BLOCKS], the same everywhere: the last
    const u32* given_up, u32* seen,              // as `GivenUp` has them
    long long rank, long long num_rows, long long rows_per_request) {
    __shared__ u8* slab[RANKS];
    const int thread = threadIdx.x, self = rank, place = blockIdx.x * THREADS + thread;
    const int head = place / LANES, lane = place % LANES, num_heads = (int)num_rows * HEADS;
    const bool has_one = head < num_heads;
    const int row = head / HEADS;
    if (thread < RANKS) slab[thread] = slabs[thread];
    __syncthreads();
    wait_for_kernel_before();
    let_next_kernel_start();
    const u32 epoch = epochs[blockIdx.x] + 1;
    const auto pairs_of = [&](int holder, int sender, int unit) {
        return (ulonglong2*)(slab[holder] + PAIRS_AT) + (epoch % 2 * RANKS + sender) * 2ll * MOST_UNITS + unit;
    };
    const int values_unit = place, lse_unit = num_heads * LANES + head;
    const auto head_of = [&](int keeper) { return (row * RANKS + keeper) * HEADS + head % HEADS; };
    uint4 own[RANKS], outs[RANKS] = {};  // what this rank has for each other, itself first; what each has for it
    float own_lse[RANKS], lses[RANKS] = {};
    int first = 0;
    if (has_one) {
        first = first_owner[row / (int)rows_per_request];
#pragma unroll
        for (int i = 0; i < RANKS; ++i) {
            const long long from = head_of((self + i) % RANKS);
            own[i] = out[from * LANES + lane], own_lse[i] = lse[from];
        }
#pragma unroll
        for (int i = 1; i < RANKS; ++i) {
            const int peer = (self + i) % RANKS;
            ulonglong2* const to = pairs_of(peer, self, values_unit);
            send_words(to, own[i].x, own[i].y, epoch);
            send_words(to + MOST_UNITS, own[i].z, own[i].w, epoch);
            if (lane == 0) send_words(pairs_of(peer, self, lse_unit), __float_as_uint(own_lse[i]), 0, epoch);
        }
    }
    const auto rank_of = [&](int n) { return (first + n) % RANKS; };  // in the order in which they are added
    const auto have_all = [&] {
        bool all = true;
        if (!has_one) return all;
#pragma unroll
        for (int n = 0; n < RANKS; ++n) {
            if (rank_of(n) == self) continue;
            const ulonglong2* const from = pairs_of(self, rank_of(n), values_unit);
            u32 bits, rest;
            all &= have_words(from, outs[n].x, outs[n].y, epoch);
            all &= have_words(from + MOST_UNITS, outs[n].z, outs[n].w, epoch);
            all &= have_words(pairs_of(self, rank_of(n), lse_unit), bits, rest, epoch);
            lses[n] = __uint_as_float(bits);
        }
        return all;
    };
    const bool is_whole = await(have_all, {given_up, seen});
    if (has_one) {
#pragma unroll
        for (int n = 0; n < RANKS; ++n) {
            if (rank_of(n) == self) outs[n] = own[0], lses[n] = own_lse[0];
            else if (!is_whole) lses[n] = -__int_as_float(0x7f800000);
        }
        float total_lse;
        merged_out[place] = merged(outs, lses, total_lse);
        if (lane == 0) merged_lse[head] = total_lse;
    }
    __syncthreads();  // all its threads have read the epoch
    if (thread == 0) epochs[blockIdx.x] = epoch;
    if (blockIdx.x == 0)
        for (int block = gridDim.x + thread; block < BLOCKS; block += THREADS) epochs[block] = epoch;
}
