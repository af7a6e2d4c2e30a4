// Sparse MLA decode of few query rows: the bits of packed_sparse_mla.cu, but the tiles of a split are side by side.
//
// Where there are no more splits than multiprocessors, time is what one split takes. So a block has 16 warps for 8
// heads and 4 tiles of 64 slots, a round:
//
//     scores    a warp takes 16 slots; all of the round's scores are computed at once
//     weights   the largest score up to a tile is that of the tiles before it, which a barrier tells all warps
//     values    a warp takes 32 latent values, and the tiles one after the other, for sums have an order
//
// A split ends as it does there: its state goes to memory, and the block that ends a row last folds all of them.
//
// Macros: HEADS, and those of the header.

#include "packed_sparse_mla.cuh"

constexpr int TILES = 4, ROUND = TILES * SLOTS;  // slots that a block works on at a time
constexpr int WARPS = 4 * TILES, THREADS = 32 * WARPS, HEAD_BLOCKS = HEADS / 8;
constexpr int AT_ONCE = 2;  // groups whose scores are summed side by side
constexpr int LINE = 20;    // numbers of the 16 warps, padded: four lines do not share banks
static_assert(SPLIT % ROUND == 0, "rounds do not cross splits");

struct Shared {
    u8 rows[TILES][SLOTS * ROW];
    uint2 weights[TILES][GROUPS][4][32];  // B fragments of the softmax weights: tile, group, 16 slots, lane
    uint2 query[STEPS][32];               // B fragments of the query
    float2 added[WARPS][32];              // what a lane adds to its sums of softmax weights
    float query_top[8][LINE];             // largest latent value of a head's part
    float top[8][LINE];                   // largest score of a warp's slots
    float top_scale[GROUPS][LINE];        // largest scale of a warp's slots
    float sum[4][8];                      // sums of softmax weights
    u64 arrived[TILES];
    u32 is_last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher gives too little shared memory");

__device__ float largest_of_four(const float4& values) {
    return fmaxf(fmaxf(values.x, values.y), fmaxf(values.z, values.w));
}

// The softmax of a split so far, for heads 2t and 2t + 1, and the largest scale of group t, a power of two.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, top_scale = LOWEST_SCALE;
    float safe[2], shrink[2];           // of the last tile: taken from its scores; factor on what was before it
    float inverse_scale, scale_shrink;  // likewise of the scales

    __device__ void add(const Shared& shared, int tile, int t) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float most = fmaxf(top[i], largest_of_four(*(const float4*)&shared.top[2 * t + i][tile * 4]));
            safe[i] = most == -INFINITY ? 0 : most;
            shrink[i] = exp2_fast(top[i] - safe[i]);
            top[i] = most;
        }
        const float most = fmaxf(top_scale, largest_of_four(*(const float4*)&shared.top_scale[t][tile * 4]));
        const u32 power = __float_as_uint(most) & 0x7f800000;
        inverse_scale = __uint_as_float(0x7f000000 - power);
        scale_shrink = top_scale * inverse_scale;
        top_scale = __uint_as_float(power);
    }
};

// Writes a thread's four neighbours of latent values.
__device__ void store(Out* out, const float (&values)[4], float by) {
#if OUT_BYTES == 4
    *(float4*)out = make_float4(values[0] * by, values[1] * by, values[2] * by, values[3] * by);
#else
    u32 pair[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(values[2 * i + 1] * by), "f"(values[2 * i] * by));
    *(uint2*)out = make_uint2(pair[0], pair[1]);
#endif
}

// Bounds that leave registers for blocks of the kernel in front, beside which this one starts.
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) packed_sparse_mla_split(
    const u16* query_ptr,    // [num_rows, HEADS, QUERY]
    const u8* pool_ptr,      // pages of PAGE_ROWS rows, page_bytes apart
    const Index* index_ptr,  // [num_rows, num_slots] number of a cached row; -1: no key
    const int* count_ptr,    // [num_rows] slots that are read, a prefix
    Out* out_ptr,            // [num_rows, HEADS, LATENT]
    float* lse_ptr,          // [num_rows, HEADS]
    float4* part_ptr,        // [num_splits, num_rows, HEAD_BLOCKS, 2, THREADS] weighted values of splits
    float4* part_sum_ptr,    // [num_splits, num_rows, HEADS / 2] largest exponent and sum of weights of two heads
    u32* ended_ptr,          // [num_rows, HEAD_BLOCKS] splits that ended; zeros before and after
    i64 rows_of_batch, i64 slots_of_row, i64 page_bytes, float scale) {
    const int num_units = (int)rows_of_batch * HEAD_BLOCKS, num_slots = slots_of_row;
    const int num_items = num_units * ((num_slots + SPLIT - 1) / SPLIT);
    extern __shared__ __align__(128) u8 shared_bytes[];
    Shared& shared = *(Shared*)shared_bytes;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / 32, tile = warp / 4, quarter = warp % 4;  // 16 slots of a round
    const int group = warp / 4;                                              // of the 32 latent values
    const float score_scale = scale * LOG2_E;                                // scores are exponents of two

    if (threadIdx.x < TILES) init_barrier(shared.arrived + threadIdx.x, 4);
    publish_barriers();
    __syncthreads();
    if (!LIST_IS_OLD) begin();

    u32 phases = 0;  // bit i: of the barrier of tile i
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        const int unit = item % num_units, split = item / num_units, row = unit / HEAD_BLOCKS;
        // A lane below 16 looks up a slot whose score its warp computes, and copies its row.
        const auto look_up = [&](int first, int limit) -> int {
            const int slot = first + warp * 16 + lane;
            return lane < 16 && slot < limit ? (int)index_ptr[(i64)row * num_slots + slot] : -1;
        };
        int slot = split * SPLIT, index = look_up(slot, num_slots);  // at once: the count is not there yet
        const int count = min(count_ptr[row], num_slots), end = min(count, slot + SPLIT);
        if (split > 0 && slot >= end) continue;  // an empty row has one tile, without keys
        if (slot + warp * 16 + lane >= end) index = -1;

        // B fragments of the query in fp16, where they meet e4m3: a lane takes 8 values of head g, and 8 of its rope
        // part in the first warps.
        float query_scale[1][2];
        const auto fetch_query = [&]() {
            const uint4* head = (const uint4*)(query_ptr + ((i64)unit * 8 + g) * QUERY);
            const uint4 values = head[group * 16 + t * 4 + quarter];
            if (warp < 2) {
                const uint4 rope = head[LATENT / 8 + t * 2 + warp];
                shared.query[LATENT_STEPS + warp * 2][lane] = make_uint2(rope.x, rope.y);
                shared.query[LATENT_STEPS + warp * 2 + 1][lane] = make_uint2(rope.z, rope.w);
            }
            float top = largest(0, values);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            if (t == 0) shared.query_top[g][warp] = top;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4; i++) top = fmaxf(top, largest_of_four(*(const float4*)&shared.query_top[g][i * 4]));
            const u32 exponent = query_exponent(top);
            const float inverse = __uint_as_float(0x7f000000 - exponent);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                shared.query[warp * 2 + i][lane] =
                    make_uint2(scaled(word(values, 2 * i), inverse), scaled(word(values, 2 * i + 1), inverse));
                query_scale[0][i] = __shfl_sync(~0u, __uint_as_float(exponent), 8 * t + 4 * i);
            }
            __syncthreads();
        };
        const auto copy_rows = [&](int index) {
            if (lane == 0) arrive_and_expect(shared.arrived + tile, 16 * ROW);
            __syncwarp();
            u8* target = shared.rows[tile] + (quarter * 16 + lane) * ROW;
            if (lane < 16) copy_row(target, pool_ptr, index, page_bytes, shared.arrived + tile);
        };

        int num_tiles = min(TILES, max(1, (end - slot + SLOTS - 1) / SLOTS));
        if (tile < num_tiles) copy_rows(index);
        begin();
        fetch_query();

        Softmax softmax;
        float sum[2] = {}, out[2][4] = {};
        while (true) {
            const u32 keys = __ballot_sync(~0u, index >= 0) >> g;  // bit 0: slot g has a key; bit 8: slot g + 8
            const bool ends = slot + ROUND >= end || (slot + ROUND) % SPLIT == 0;
            if (!ends) index = look_up(slot + ROUND, end);
            float scores[1][4], scale_g[GROUPS], scale_g8[GROUPS];
            auto& score = scores[0];
            if (tile < num_tiles) {
                wait(shared.arrived + tile, phases >> tile & 1);
                auto query_at = [&](int step, int) -> uint2 { return shared.query[step][lane]; };
                score_slots<AT_ONCE>(scores, scale_g, scale_g8, shared.rows[tile] + (quarter * 16 + g) * ROW, t,
                                     query_scale, score_scale, query_at);
#pragma unroll
                for (int j = 0; j < 4; j++) score[j] = keys >> (j / 2 * 8) & 1 ? score[j] : -INFINITY;
                float most[2] = {fmaxf(score[0], score[2]), fmaxf(score[1], score[3])};
                float most_scale = larger_scale(scale_g, scale_g8, t);
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
                    for (int i = 0; i < 2; i++) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], distance));
                    most_scale = fmaxf(most_scale, __shfl_xor_sync(~0u, most_scale, distance));
                }
                if (g == 0) {
                    shared.top[2 * t][warp] = most[0], shared.top[2 * t + 1][warp] = most[1];
                    shared.top_scale[t][warp] = most_scale;
                }
            }
            __syncthreads();

            // Weights of 16 slots, with their scales by the largest scale so far: fp16 holds them whatever the scales
            // are.
            if (tile < num_tiles) {
                Softmax so_far = softmax;
#pragma unroll
                for (int before = 0; before < TILES; before++)
                    if (before <= tile) so_far.add(shared, before, t);
#pragma unroll
                for (int j = 0; j < 4; j++) score[j] = exp2_fast(score[j] - so_far.safe[j % 2]);
                shared.added[warp][lane] = make_float2(score[0] + score[2], score[1] + score[3]);
#pragma unroll
                for (int scaled_group = 0; scaled_group < GROUPS; scaled_group++) {
                    const float inverse = __shfl_sync(~0u, so_far.inverse_scale, scaled_group);
                    const float by_g = scale_g[scaled_group] * inverse, by_g8 = scale_g8[scaled_group] * inverse;
                    shared.weights[tile][scaled_group][quarter][lane] =
                        make_uint2(transposed(score[0] * by_g, score[1] * by_g),
                                   transposed(score[2] * by_g8, score[3] * by_g8));
                }
            }
            __syncthreads();

            // Values: this thread's A columns are slots 2t, 2t + 1, 2t + 8, 2t + 9, its rows four neighbours.
            for (int of_tile = 0; of_tile < num_tiles; of_tile++) {
                softmax.add(shared, of_tile, t);
                const float2 added = shared.added[of_tile * 4 + quarter][lane];
                sum[0] = fmaf(sum[0], softmax.shrink[0], added.x), sum[1] = fmaf(sum[1], softmax.shrink[1], added.y);
                const float scale_shrink = __shfl_sync(~0u, softmax.scale_shrink, group);
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int j = 0; j < 4; j++) out[m][j] *= softmax.shrink[j % 2] * scale_shrink;
                wait(shared.arrived + of_tile, phases >> of_tile & 1);
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    const u8* at = shared.rows[of_tile] + (step * 16 + 2 * t) * ROW + warp * 32 + g * 4;
                    const u32 v0 = *(const u32*)at, v1 = *(const u32*)(at + ROW);
                    const u32 v8 = *(const u32*)(at + 8 * ROW), v9 = *(const u32*)(at + 9 * ROW);
                    const uint2 weight = shared.weights[of_tile][group][step][lane];
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const int order = m % 2 ? 0x7362 : 0x5140;  // two values, each of both slots
                        u32 a[4];
                        widen(__byte_perm(v0, v1, order), a[0], a[1]);
                        widen(__byte_perm(v8, v9, order), a[2], a[3]);
                        multiply(out[m], a, weight);
                    }
                }
            }
            if (ends && warp < 4) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int distance = 4; distance < 32; distance *= 2)
                        sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
                    if (g == 0) shared.sum[quarter][2 * t + i] = sum[i];
                }
            }
            __syncthreads();  // all have read the round
            phases ^= (1 << num_tiles) - 1;
            if (ends) break;
            slot += ROUND;
            num_tiles = min(TILES, (end - slot + SLOTS - 1) / SLOTS);
            if (tile < num_tiles) copy_rows(index);
        }

        // The state of the split: values of heads 2t and 2t + 1, four neighbours each.
        const float own_scale = __shfl_sync(~0u, softmax.top_scale, group);
        float all_top[2], all_sum[2], state[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < 4; w++) total += shared.sum[w][2 * t + i];
            all_top[i] = -INFINITY, all_sum[i] = 0;
            Fold fold(all_top[i], all_sum[i], softmax.top[i], total);
#pragma unroll
            for (int j = 0; j < 4; j++) state[i][j] = fold(0, out[j / 2][i + j % 2 * 2] * own_scale);
        }
        const int num_parts = max(1, (count + SPLIT - 1) / SPLIT);
        bool writes = num_parts == 1;
        if (num_parts > 1) {
            const i64 part_stride = (i64)num_units * 2 * THREADS, sum_stride = (i64)num_units * 4;
            float4* part = part_ptr + (i64)unit * 2 * THREADS + threadIdx.x;
            float4* part_sum = part_sum_ptr + (i64)unit * 4 + t;
#pragma unroll
            for (int i = 0; i < 2; i++)
                part[split * part_stride + i * THREADS] =
                    make_float4(state[i][0], state[i][1], state[i][2], state[i][3]);
            if (warp == 0 && g == 0)
                part_sum[split * sum_stride] = make_float4(all_top[0], all_sum[0], all_top[1], all_sum[1]);
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();
                shared.is_last = atomicInc(ended_ptr + unit, num_parts - 1) == num_parts - 1;
                __threadfence();
            }
            __syncthreads();
            writes = shared.is_last;
            if (writes) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    all_top[i] = -INFINITY, all_sum[i] = 0;
#pragma unroll
                    for (int j = 0; j < 4; j++) state[i][j] = 0;
                }
#pragma unroll 4
                for (int other = 0; other < num_parts; other++) {
                    const float4 sums = __ldcg(part_sum + other * sum_stride);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float4 values = __ldcg(part + other * part_stride + i * THREADS);
                        Fold fold(all_top[i], all_sum[i], i ? sums.z : sums.x, i ? sums.w : sums.y);
                        state[i][0] = fold(state[i][0], values.x), state[i][1] = fold(state[i][1], values.y);
                        state[i][2] = fold(state[i][2], values.z), state[i][3] = fold(state[i][3], values.w);
                    }
                }
            }
        }
        if (writes) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const i64 head = (i64)unit * 8 + 2 * t + i;
                const Result result(all_top[i], all_sum[i]);
                if (warp == 0 && g == 0) lse_ptr[head] = result.lse;
                store(out_ptr + head * LATENT + warp * 32 + g * 4, state[i], result.by);
            }
        }
    }
    begin();
}
