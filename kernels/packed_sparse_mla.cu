// Sparse MLA decode over packed FP8 rows: see packed_sparse_mla.py for the formula and the layout of a row.
//
// The products are transposed: slots and latent values take the 16 sides of the matrix instruction (m16n8k16), heads
// the side of 8. So 8 heads of a rank are not padded to 64, and a thread makes its A operands from 16-byte pieces of
// the rows as they lie in shared memory: any order of the inner dimension is right, if both operands have the same.
//
//     scores    S[slot, head] = K[slot, :] Q[head, :]^T    a warp takes 16 of the 64 slots of a tile, all values
//     values    O[value, head] += V[slot, value]^T P[slot, head]    a warp takes one group of 128 values, all slots
//
// An e4m3 value is exact in fp16, so products need no scale: that of a row's group goes onto its scores and onto its
// softmax weights. A lane of a fragment is (g, t) = (lane / 4, lane % 4).
//
// A block works on 64 slots at a time for TEAMS * TILES * 8 heads; a team is 4 warps with TILES * 8 heads. Rows arrive
// by bulk copies, STAGES tiles ahead, also of the work item that comes next.
//
// Splits make the bits of a row independent of who computes what: each begins anew, and states of splits are folded
// from the first to the last, in registers where a block has several, else by the block that ends a row last.
//
// Macros: HEADS, TEAMS, TILES, STAGES, PER_SM blocks of an SM, SHARED_BYTES that the launcher gives, and those of the
// header.

#include "packed_sparse_mla.cuh"

constexpr int WARPS = 4 * TEAMS, THREADS = 32 * WARPS;
constexpr int TEAM_HEADS = 8 * TILES, BLOCK_HEADS = TEAMS * TEAM_HEADS, HEAD_BLOCKS = HEADS / BLOCK_HEADS;
constexpr int AT_ONCE = GROUPS / TILES;  // groups whose scores are summed side by side: 4 chains of matrix steps
constexpr bool QUERY_IN_REGISTERS = TILES == 1;
constexpr bool FOLDS = TILES == 1;  // there are registers for a second state
constexpr int NO_TILE = -2;

// A team's numbers about a tile, and the query where it does not fit into registers.
struct Team {
    uint2 weights[GROUPS][4][TILES][32];  // B fragments of the softmax weights: group, 16 slots, 8 heads, lane
    uint2 query[QUERY_IN_REGISTERS ? 1 : STEPS][TILES][32];  // B fragments of the query
    float query_scale[TEAM_HEADS];
    float top[4][TEAM_HEADS];    // largest score of a warp's slots
    float sum[4][TEAM_HEADS];    // sum of softmax weights of a warp's slots
    float top_scale[4][GROUPS];  // largest scale of a warp's slots
};

struct Shared {
    u8 rows[STAGES][SLOTS * ROW];
    Team team[TEAMS];
    u64 arrived[STAGES];
    u32 is_last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher gives too little shared memory");

__device__ void team_barrier(int team) {
    if (TEAMS == 1) __syncthreads();
    else asm volatile("bar.sync %0, 128;" ::"r"(team + 1) : "memory");
}

// The tiles of a block's work items, in order. A unit is a query row with the heads of a block. First each block has
// units of its own; of the units left over (fewer than blocks), some blocks have the first `head_splits` splits, the
// others one split after the other. Without FOLDS an item is one split.
struct Tiles {
    const int* count;  // [num_rows]
    int num_units, num_slots, blocks, own_units, left, head_splits, max_splits;
    int own, single, step;  // where this block is
    bool has_head;
    int unit, part, slot, end;  // part: which of a unit's; slot: the tile's first; end: of the item
    bool none;

    __device__ Tiles(const int* count, int num_units, int num_slots)
        : count(count), num_units(num_units), num_slots(num_slots) {
        const int block = blockIdx.x;
        blocks = gridDim.x;
        max_splits = (num_slots + SPLIT - 1) / SPLIT;
        own_units = FOLDS ? num_units / blocks * blocks : 0;
        left = num_units - own_units;
        head_splits = FOLDS ? max(1, (left * max_splits + blocks - 1) / blocks) : 1;
        has_head = FOLDS && block < left;
        own = FOLDS ? block : own_units;
        single = FOLDS ? left + max(block - left, 0) : block;  // a single k is split k / left of a unit
        if (FOLDS) single += left * (head_splits - 1);
        step = FOLDS ? blocks - left : blocks;
        none = false;
        next_item();
    }
    __device__ void next_item() {
        while (true) {
            int first = 0, splits = 1;
            part = 0;
            if (own < own_units) {
                unit = own, own += blocks, splits = max_splits;
            } else if (has_head) {
                unit = own_units + blockIdx.x, has_head = false, splits = head_splits, own = own_units;
            } else if ((!FOLDS || blockIdx.x >= left) && single < left * max_splits) {
                unit = own_units + single % left, first = single / left, single += step;
                part = first - head_splits + 1;
            } else {
                none = true;
                return;
            }
            slot = first * SPLIT;
            end = min(min(__ldg(count + unit / HEAD_BLOCKS), num_slots), slot + splits * SPLIT);
            if (slot < end || slot == 0) return;  // an empty row has one tile, without keys
        }
    }
    __device__ bool begins() const { return slot % SPLIT == 0; }
    __device__ bool ends_item() const { return slot + SLOTS >= end; }
    __device__ bool ends_split() const { return ends_item() || (slot + SLOTS) % SPLIT == 0; }
    __device__ void next() {
        if (ends_item()) next_item();
        else slot += SLOTS;
    }
    __device__ int parts() const {  // of the unit
        if (unit < own_units) return 1;
        int splits = (min(__ldg(count + unit / HEAD_BLOCKS), num_slots) + SPLIT - 1) / SPLIT;
        return 1 + max(0, splits - head_splits);
    }
};

// B fragments of 8 heads of a query, bf16 [8, QUERY], in fp16 where they meet e4m3; gives the power of two taken out.
__device__ float load_query(const u16* query, int g, int t, uint2 (&fragment)[STEPS]) {
    const uint4* head = (const uint4*)(query + g * QUERY);
    float top = 0;
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {  // the largest value first
        const float inverse = __uint_as_float(0x7f000000 - query_exponent(top));
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int piece = 0; piece < 4; piece++) {  // 8 of the 32 values of this thread in the group
                uint4 values = __ldg(head + group * 16 + t * 4 + piece);
                if (pass == 0) top = largest(top, values);
                else
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        fragment[group * 8 + piece * 2 + i] = make_uint2(scaled(word(values, 2 * i), inverse),
                                                                         scaled(word(values, 2 * i + 1), inverse));
            }
        }
        if (pass == 0) {
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        }
    }
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        uint4 values = __ldg(head + LATENT / 8 + t * 2 + piece);
        fragment[LATENT_STEPS + piece * 2] = make_uint2(values.x, values.y);
        fragment[LATENT_STEPS + piece * 2 + 1] = make_uint2(values.z, values.w);
    }
    return __uint_as_float(query_exponent(top));
}

template <int M, int N>
__device__ auto& select_state(float (&folded)[M][N][4], float (&single)[8][N][4]) {
    if constexpr (M == 8) return folded;
    else return single;
}

// Writes 16 values of each thread. Lanes g and g ^ 1 swap 16-byte pieces, so that they write whole sectors together.
__device__ void store(Out* out, const float (&values)[16], int g) {
    constexpr int PIECES = OUT_BYTES;
    u32 words[PIECES * 4];
#pragma unroll
    for (int i = 0; i < PIECES * 4; i++) {
        if (OUT_BYTES == 4) words[i] = __float_as_uint(values[i % 16]);
        else
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
                : "=r"(words[i])
                : "f"(values[i * 2 % 16 + 1]), "f"(values[i * 2 % 16]));
    }
    uint4* even = (uint4*)(out + g / 2 * 32) + g % 2;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece += 2) {
        u32 first[4], second[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 low = words[piece * 4 + i], high = words[piece * 4 + 4 + i];
            u32 other = __shfl_xor_sync(~0u, g % 2 ? low : high, 4);
            first[i] = g % 2 ? other : low;
            second[i] = g % 2 ? high : other;
        }
        even[piece] = make_uint4(first[0], first[1], first[2], first[3]);
        even[piece + PIECES] = make_uint4(second[0], second[1], second[2], second[3]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) packed_sparse_mla(
    const u16* query_ptr,    // [num_rows, HEADS, QUERY]
    const u8* pool_ptr,      // pages of PAGE_ROWS rows, page_bytes apart
    const Index* index_ptr,  // [num_rows, num_slots] number of a cached row; -1: no key
    const int* count_ptr,    // [num_rows] slots that are read, a prefix
    Out* out_ptr,            // [num_rows, HEADS, LATENT]
    float* lse_ptr,          // [num_rows, HEADS]
    float4* part_ptr,        // [num_splits, num_rows, HEAD_BLOCKS, 8 * TILES, THREADS] weighted values of parts
    float2* part_sum_ptr,    // [num_splits, num_rows, HEADS] largest exponent and sum of weights of parts
    u32* ended_ptr,          // [num_rows, HEAD_BLOCKS] parts that ended; zeros before and after
    i64 rows_of_batch, i64 slots_of_row, i64 page_bytes, float scale) {
    const int num_rows = rows_of_batch, num_slots = slots_of_row;
    extern __shared__ __align__(128) u8 shared_bytes[];
    Shared& shared = *(Shared*)shared_bytes;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / 32 % 4, team_id = threadIdx.x / 128;
    Team& team = shared.team[team_id];
    const float score_scale = scale * LOG2_E;  // scores are exponents of two

    if (threadIdx.x < STAGES) init_barrier(shared.arrived + threadIdx.x, WARPS);
    publish_barriers();
    __syncthreads();
    if (!LIST_IS_OLD) begin();

    Tiles tiles(count_ptr, num_rows * HEAD_BLOCKS, num_slots), wanted = tiles;

    // A lane below 16 looks up a slot whose scores its warp computes. What it finds is used two turns later: an
    // instruction that touched it here would make the warp wait for memory.
    auto look_up = [&]() -> Index {
        Index index = wanted.none ? NO_TILE : -1;
        if (wanted.none) return index;
        const int slot = wanted.slot + warp * 16 + lane;
        if (lane < 16 && slot < wanted.end) index = index_ptr[(i64)(wanted.unit / HEAD_BLOCKS) * num_slots + slot];
        if (wanted.begins()) {
            const u8* heads = (const u8*)(query_ptr + (i64)wanted.unit * BLOCK_HEADS * QUERY);
            for (int at = threadIdx.x * 128; at < BLOCK_HEADS * QUERY * 2; at += THREADS * 128)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(heads + at));
        }
        wanted.next();
        return index;
    };
    // Each team copies its part of the rows; gives which of the warp's 16 slots hold a key.
    auto copy_rows = [&](Index index, int stage) -> u32 {
        if (__shfl_sync(~0u, (int)index, 31) == NO_TILE) return 0;
        if (lane == 0) arrive_and_expect(shared.arrived + stage, 16 / TEAMS * ROW);
        __syncwarp();
        u8* target = shared.rows[stage] + (warp * 16 + lane) * ROW;
        if (lane < 16 && lane % TEAMS == team_id)
            copy_row(target, pool_ptr, index, page_bytes, shared.arrived + stage);
        return __ballot_sync(~0u, index >= 0);
    };
    Index next[2] = {NO_TILE, NO_TILE};  // of the tiles behind those in shared memory
    u32 held = 0;                        // lane i: which slots of the warp in stage i hold a key

    uint2 query[STEPS];  // in registers only if QUERY_IN_REGISTERS
    float out[8][TILES][4], query_scale[TILES][2], top[TILES][2], sum[TILES][2], top_scale = 0;
    float all_out[FOLDS ? 8 : 1][TILES][4], all_top[TILES][2], all_sum[TILES][2];  // of the splits before
    bool new_item = true;
    u32 phases = 0;

    // The first turns only look up and copy, so that the code for it is there once.
    int stage = STAGES - 2;
    for (int turn = -STAGES - 2; turn < 0 || !tiles.none; turn++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
        const i64 first_head = (i64)tiles.unit * BLOCK_HEADS + team_id * TEAM_HEADS;  // of all rows' heads
        if (turn >= 0) {
            if (new_item) {
                const u16* heads = query_ptr + first_head * QUERY;
                if (QUERY_IN_REGISTERS || warp < TILES) {
                    float taken = load_query(heads + (QUERY_IN_REGISTERS ? 0 : warp * 8 * QUERY), g, t, query);
                    if (!QUERY_IN_REGISTERS) {
#pragma unroll
                        for (int step = 0; step < STEPS; step++) team.query[step][warp][lane] = query[step];
                        if (t == 0) team.query_scale[warp * 8 + g] = taken;
                    } else {
                        query_scale[0][0] = __shfl_sync(~0u, taken, 8 * t);
                        query_scale[0][1] = __shfl_sync(~0u, taken, 8 * t + 4);
                    }
                }
                if (!QUERY_IN_REGISTERS) {
                    team_barrier(team_id);
#pragma unroll
                    for (int n = 0; n < TILES; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) query_scale[n][i] = team.query_scale[n * 8 + 2 * t + i];
                }
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        all_top[n][i] = -INFINITY, all_sum[n][i] = 0;
#pragma unroll
                        for (int m = 0; m < (FOLDS ? 8 : 0); m++) all_out[m][n][i] = all_out[m][n][i + 2] = 0;
                    }
                new_item = false;
            }
            if (tiles.begins()) {
#pragma unroll
                for (int n = 0; n < TILES; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) top[n][i] = -INFINITY, sum[n][i] = 0;
#pragma unroll
                    for (int m = 0; m < 8; m++)
#pragma unroll
                        for (int j = 0; j < 4; j++) out[m][n][j] = 0;
                }
                top_scale = LOWEST_SCALE;
            }

            wait(shared.arrived + stage, phases >> stage & 1);
            phases ^= 1 << stage;
            const u8* rows = shared.rows[stage];

            float score[TILES][4], scale_g[GROUPS], scale_g8[GROUPS];
            auto query_at = [&](int step, int n) -> uint2 {
                return QUERY_IN_REGISTERS ? query[step] : team.query[step][n][lane];
            };
            score_slots<AT_ONCE>(score, scale_g, scale_g8, rows + (warp * 16 + g) * ROW, t, query_scale, score_scale,
                                 query_at);
            const u32 keys = __shfl_sync(~0u, held, stage) >> g;  // bit 0: slot g has a key; bit 8: slot g + 8
            float warp_top[TILES][2];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int j = 0; j < 4; j++) score[n][j] = keys >> (j / 2 * 8) & 1 ? score[n][j] : -INFINITY;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float most = fmaxf(score[n][i], score[n][i + 2]);
#pragma unroll
                    for (int distance = 4; distance < 32; distance *= 2)
                        most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
                    warp_top[n][i] = most;
                }
                if (g == 0) *(float2*)&team.top[warp][n * 8 + 2 * t] = make_float2(warp_top[n][0], warp_top[n][1]);
            }
            float most_scale = larger_scale(scale_g, scale_g8, t);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                most_scale = fmaxf(most_scale, __shfl_xor_sync(~0u, most_scale, distance));
            if (g == 0) team.top_scale[warp][t] = most_scale;
            team_barrier(team_id);

            // Weights of 16 slots, with their scales by the largest scale so far: fp16 holds them whatever the scales
            // are.
            float shrink[TILES][2];
            bool shrinks = false;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                float2 most = make_float2(top[n][0], top[n][1]);
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    float2 other = *(const float2*)&team.top[w][n * 8 + 2 * t];
                    most = make_float2(fmaxf(most.x, other.x), fmaxf(most.y, other.y));
                }
                float safe[2] = {most.x == -INFINITY ? 0 : most.x, most.y == -INFINITY ? 0 : most.y};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    shrink[n][i] = exp2_fast(top[n][i] - safe[i]);
                    shrinks |= shrink[n][i] != 1;
                }
                top[n][0] = most.x, top[n][1] = most.y;
#pragma unroll
                for (int j = 0; j < 4; j++) score[n][j] = exp2_fast(score[n][j] - safe[j % 2]);
#pragma unroll
                for (int i = 0; i < 2; i++) sum[n][i] = fmaf(sum[n][i], shrink[n][i], score[n][i] + score[n][i + 2]);
            }
            // top_scale is this thread's view of group t: each thread follows one group and asks its neighbours for
            // others.
            float most_of_t = top_scale;
#pragma unroll
            for (int w = 0; w < 4; w++) most_of_t = fmaxf(most_of_t, team.top_scale[w][t]);
            most_of_t = __uint_as_float(__float_as_uint(most_of_t) & 0x7f800000);  // a power of two
            float inverse_of_t = __uint_as_float(0x7f000000 - __float_as_uint(most_of_t));
            float scale_shrink =
                __shfl_sync(~0u, top_scale * inverse_of_t, warp);  // warp's group of values is number warp
            top_scale = most_of_t;
            shrinks |= scale_shrink != 1;
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float inverse = __shfl_sync(~0u, inverse_of_t, group);
                float by_g = scale_g[group] * inverse, by_g8 = scale_g8[group] * inverse;
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    team.weights[group][warp][n][lane] =
                        make_uint2(transposed(score[n][0] * by_g, score[n][1] * by_g),
                                   transposed(score[n][2] * by_g8, score[n][3] * by_g8));
            }
            if (__any_sync(~0u, shrinks)) {
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int m = 0; m < 8; m++)
#pragma unroll
                        for (int j = 0; j < 4; j++) out[m][n][j] *= shrink[n][j % 2] * scale_shrink;
            }
            team_barrier(team_id);

            // Values of one group: this thread's A columns are slots 2t, 2t + 1, 2t + 8, 2t + 9, its rows values 16g +
            // 2m and 16g + 2m + 1.
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const u8* at = rows + (step * 16 + 2 * t) * ROW + warp * GROUP + g * 16;
                uint4 v0 = *(const uint4*)at, v1 = *(const uint4*)(at + ROW);
                uint4 v8 = *(const uint4*)(at + 8 * ROW), v9 = *(const uint4*)(at + 9 * ROW);
                uint2 weight[TILES];
#pragma unroll
                for (int n = 0; n < TILES; n++) weight[n] = team.weights[warp][step][n][lane];
#pragma unroll
                for (int m = 0; m < 8; m++) {
                    const int order = m % 2 ? 0x7362 : 0x5140;  // two values, each of both slots
                    u32 a[4];
                    widen(__byte_perm(word(v0, m / 2), word(v1, m / 2), order), a[0], a[1]);
                    widen(__byte_perm(word(v8, m / 2), word(v9, m / 2), order), a[2], a[3]);
#pragma unroll
                    for (int n = 0; n < TILES; n++) multiply(out[m][n], a, weight[n]);
                }
            }
            __syncthreads();  // all have read the tile
        }
        const u32 found = copy_rows(next[0], stage);
        if (lane == stage) held = found;
        next[0] = next[1];
        next[1] = look_up();
        if (turn == -1) begin();  // the first copies are under way
        if (turn < 0) continue;

        if (tiles.ends_split()) {
            // Complete the sums over slots, then fold this split into those before.
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int distance = 4; distance < 32; distance *= 2)
                        sum[n][i] += __shfl_xor_sync(~0u, sum[n][i], distance);
                    if (g == 0) team.sum[warp][n * 8 + 2 * t + i] = sum[n][i];
                }
            team_barrier(team_id);
            const float own_scale = __shfl_sync(~0u, top_scale, warp);
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float total = 0;
#pragma unroll
                    for (int w = 0; w < 4; w++) total += team.sum[w][n * 8 + 2 * t + i];
                    if (!FOLDS) {
                        all_top[n][i] = top[n][i], all_sum[n][i] = total;
#pragma unroll
                        for (int m = 0; m < 8; m++) out[m][n][i] *= own_scale, out[m][n][i + 2] *= own_scale;
                    } else {
                        Fold fold(all_top[n][i], all_sum[n][i], top[n][i], total);
#pragma unroll
                        for (int m = 0; m < 8; m++)
#pragma unroll
                            for (int j = i; j < 4; j += 2)
                                all_out[m][n][j] = fold(all_out[m][n][j], out[m][n][j] * own_scale);
                    }
                }
        }
        if (tiles.ends_item()) {
            auto& state = select_state(all_out, out);
            const int num_parts = tiles.parts();
            bool writes = num_parts == 1;
            if (num_parts > 1) {
                const i64 part_stride = (i64)num_rows * HEAD_BLOCKS * 8 * TILES * THREADS,
                          sum_stride = (i64)num_rows * HEADS;
                float4* part = part_ptr + (i64)tiles.unit * 8 * TILES * THREADS + threadIdx.x;
                float2* part_sum = part_sum_ptr + first_head;
#pragma unroll
                for (int n = 0; n < TILES; n++) {
#pragma unroll
                    for (int m = 0; m < 8; m++)
                        part[tiles.part * part_stride + (m * TILES + n) * THREADS] =
                            make_float4(state[m][n][0], state[m][n][1], state[m][n][2], state[m][n][3]);
                    if (warp == 0 && g == 0)
#pragma unroll
                        for (int i = 0; i < 2; i++)
                            part_sum[tiles.part * sum_stride + n * 8 + 2 * t + i] =
                                make_float2(all_top[n][i], all_sum[n][i]);
                }
                __syncthreads();
                if (threadIdx.x == 0) {
                    __threadfence();
                    shared.is_last = atomicInc(ended_ptr + tiles.unit, num_parts - 1) == num_parts - 1;
                    __threadfence();
                }
                __syncthreads();
                writes = shared.is_last;
                if (writes) {
                    float2* sums = (float2*)team.weights;  // [num_parts, TEAM_HEADS]
                    for (int i = threadIdx.x % 128; i < num_parts * TEAM_HEADS; i += 128)
                        sums[i] = __ldcg(part_sum + i / TEAM_HEADS * sum_stride + i % TEAM_HEADS);
                    team_barrier(team_id);
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            all_top[n][i] = -INFINITY, all_sum[n][i] = 0;
#pragma unroll
                            for (int m = 0; m < 8; m++) state[m][n][i] = state[m][n][i + 2] = 0;
                        }
#pragma unroll 4
                        for (int other = 0; other < num_parts; other++) {
                            float2 even = sums[other * TEAM_HEADS + n * 8 + 2 * t],
                                   odd = sums[other * TEAM_HEADS + n * 8 + 2 * t + 1];
                            Fold fold_even(all_top[n][0], all_sum[n][0], even.x, even.y);
                            Fold fold_odd(all_top[n][1], all_sum[n][1], odd.x, odd.y);
#pragma unroll
                            for (int m = 0; m < 8; m++) {
                                float4 values = __ldcg(part + other * part_stride + (m * TILES + n) * THREADS);
                                state[m][n][0] = fold_even(state[m][n][0], values.x);
                                state[m][n][1] = fold_odd(state[m][n][1], values.y);
                                state[m][n][2] = fold_even(state[m][n][2], values.z);
                                state[m][n][3] = fold_odd(state[m][n][3], values.w);
                            }
                        }
                    }
                }
            }
            if (writes) {
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const i64 head = first_head + n * 8 + 2 * t + i;
                        const Result result(all_top[n][i], all_sum[n][i]);
                        if (warp == 0 && g == 0) lse_ptr[head] = result.lse;
                        float values[16];
#pragma unroll
                        for (int m = 0; m < 8; m++)
                            for (int j = 0; j < 2; j++) values[m * 2 + j] = state[m][n][i + 2 * j] * result.by;
                        store(out_ptr + head * LATENT + warp * GROUP, values, g);
                    }
            }
            new_item = true;
        }
        tiles.next();
    }
}
