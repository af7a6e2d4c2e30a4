// Sparse MLA decode of many query rows for 32 or 64 heads: the bits of packed_sparse_mla.cu, by warp group products.
//
// A rank of a dcp group has few slots of a row and many heads. So a cached row is copied once for all heads of a query
// row, and a team of 4 warps works on 32 heads with wgmma: m64n32k16 multiplies registers (cached rows, widened) by
// shared memory (queries, softmax weights).
//
//     scores    S[slot, head] = K[slot, :] Q[head, :]^T             a warp takes 16 of the 64 slots of a tile
//     values    O[value, head] += V[slot, value]^T P[slot, head]    a warp takes 32 values of each group of 128
//
// While a team multiplies or waits for a product, the other one widens or weighs: teams share rows, never meet, and may
// be a tile apart. Four more warps copy rows, 16 slots at a time, as soon as all teams have read what was there before.
//
// An item is a split of a query row, for all heads. Its state goes to memory where a row has several, and the team that
// ends a row last folds them from the first to the last.
//
// Macros: HEADS, PIECES of 16 rows in shared memory, PER_SM blocks of an SM, SHARED_BYTES that the launcher gives, and
// those of the header.

#include "packed_sparse_mla.cuh"

constexpr int TEAM_HEADS = 32, TEAMS = HEADS / TEAM_HEADS, TILES = TEAM_HEADS / 8, TEAM_THREADS = 128;
constexpr int THREADS = (TEAMS + 1) * TEAM_THREADS;  // registers are dealt out to whole warp groups
constexpr int PIECE = 16, SUMS = TEAM_HEADS / 2;     // slots of a piece; sums that a thread has of a product
constexpr int REGISTERS = TEAMS == 2 ? 240 : 232, REGISTERS_TO_COPY = 24;  // of a thread: all that an SM has
constexpr int BATCHES = STEPS / 4 + 1;               // of a tile's scores: 4 steps each, the last two of the rope 2
static_assert(PIECES >= 4, "a tile is whole");

// 8 values of inner dimension lie together, those of 8 heads next to each other, 128 bytes: a matrix of the product.
struct Team {
    uint4 weights[GROUPS][SLOTS / 8][TEAM_HEADS];  // softmax weights in fp16
    uint4 query[STEPS][2][TEAM_HEADS];             // fp16 where they meet e4m3, else bf16
    float query_scale[TEAM_HEADS];
    float top[4][TEAM_HEADS];     // largest score of a warp's slots
    float so_far[2][TEAM_HEADS];  // largest score of the split up to a tile of even and of odd number
    float sum[4][TEAM_HEADS];     // sum of softmax weights of a warp's slots
    float top_scale[4][GROUPS];   // largest scale of a warp's slots
};

struct Shared {
    u8 rows[PIECES][PIECE * ROW];
    Team team[TEAMS];
    u64 arrived[PIECES], released[PIECES];
    u32 keys[PIECES];  // bit i: slot i of the piece holds a key
    u32 is_last[TEAMS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher gives too little shared memory");

__device__ void team_barrier(int team) { asm volatile("bar.sync %0, 128;" ::"r"(team + 1) : "memory"); }

// ---- products of a team ------------------------------------------------------------------------------------------

#define FOUR(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define ALL(a) FOUR(a, 0), FOUR(a, 4), FOUR(a, 8), FOUR(a, 12)
#define PRODUCT(type)                                                                                               \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"   \
                 : ALL(sum)                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))

__device__ __forceinline__ void start_product(float (&sum)[SUMS], const u32 (&a)[4], u64 b, bool add) {
    PRODUCT("f16");
}
__device__ __forceinline__ void start_product_bf16(float (&sum)[SUMS], const u32 (&a)[4], u64 b, bool add) {
    PRODUCT("bf16");
}
// Registers that were written are there for the products that follow.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Registers of all products but those between the last `end_products` and the one before it may be written again.
__device__ __forceinline__ void wait_for_earlier_products() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}
__device__ __forceinline__ void wait_for_products(float (&sum)[SUMS]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : ALL(sum)::"memory");
}
// What was written to shared memory is there for products that start behind the team's next barrier.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of `Team`'s matrices: the next heads are 128 bytes on, the next 8 values 512.
__device__ __forceinline__ u64 descriptor(const uint4* matrices) {
    return shared_address(matrices) >> 4 | (u64)(TEAM_HEADS * 16 >> 4) << 16 | (u64)(128 >> 4) << 32;
}

// Stores what a warp holds of 8 slots (g) by 32 heads (8n + 2t, 8n + 2t + 1), fp16 pairs, with the slots together.
__device__ __forceinline__ void store_transposed(u32 address, const u32 (&pair)[TILES]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(pair[0]),
                 "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                 : "memory");
}

__device__ __forceinline__ u32 half_pair(float even, float odd) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    return pair;
}

// ---- the work of a block -----------------------------------------------------------------------------------------

// The tiles of a block's items, in order: all first splits, then all second ones, and so on.
struct Tiles {
    const int* count;  // [num_rows]
    int num_rows, num_slots, item;
    int row, split, slot, end;  // slot: the tile's first; end: of the item
    bool none;

    __device__ Tiles(const int* count, int num_rows, int num_slots)
        : count(count), num_rows(num_rows), num_slots(num_slots), item(blockIdx.x) {
        find_item();
    }
    __device__ void find_item() {
        for (;; item += gridDim.x) {
            split = item / num_rows, row = item % num_rows, slot = split * SPLIT;
            none = slot >= num_slots;
            if (none) return;
            end = min(min(__ldg(count + row), num_slots), slot + SPLIT);
            if (slot == 0 || slot < end) return;  // an empty row has one tile, without keys
        }
    }
    __device__ bool begins() const { return slot % SPLIT == 0; }
    __device__ bool ends() const { return slot + SLOTS >= end; }
    __device__ void next() {
        if (ends()) item += gridDim.x, find_item();
        else slot += SLOTS;
    }
    __device__ int parts() const {  // of the row
        return max(1, (min(__ldg(count + row), num_slots) + SPLIT - 1) / SPLIT);
    }
};

// A place in the ring of pieces, and the parity of the times round.
struct Place {
    int piece = 0;
    u32 phase = 0;
    __device__ Place ahead(int pieces) const {
        Place place = *this;
        place.piece += pieces;
        if (place.piece >= PIECES) place.piece -= PIECES, place.phase ^= 1;
        return place;
    }
};

// What a copying warp does: it brings the rows of slots 16 * warp .. 16 * warp + 15 of each tile. Slots of a tile are
// looked up while the rows of the one before are copied, those of the first tile before there is a count.
__device__ __forceinline__ void copy_tiles(Shared& shared, const u16* query_ptr, const u8* pool_ptr,
                                           const Index* index_ptr, const int* count_ptr, int num_rows, int num_slots,
                                           i64 page_bytes, int warp, int lane) {
    Index next;
    const auto look_up = [&](int row, int first) {
        const int slot = first + warp * PIECE + lane;
        next = lane < PIECE && slot < num_slots ? index_ptr[(i64)row * num_slots + slot] : -1;
    };
    look_up(blockIdx.x % num_rows, blockIdx.x / num_rows * SPLIT);
    Tiles tiles(count_ptr, num_rows, num_slots);
    if (!tiles.none && tiles.item != blockIdx.x) look_up(tiles.row, tiles.slot);
    for (Place place; !tiles.none; place = place.ahead(4)) {
        const int index = tiles.slot + warp * PIECE + lane < tiles.end ? (int)next : -1;
        const u32 keys = __ballot_sync(~0u, index >= 0);
        tiles.next();
        if (!tiles.none) look_up(tiles.row, tiles.slot);
        if (!tiles.none && tiles.begins()) {
            const u8* heads = (const u8*)(query_ptr + (i64)tiles.row * HEADS * QUERY);
            for (int at = (warp * 32 + lane) * 128; at < HEADS * QUERY * 2; at += 4 * 32 * 128)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(heads + at));
        }
        const Place own = place.ahead(warp);
        if (own.phase == 1) wait_for_kernel_before();  // what is waited for next takes queries
        wait(shared.released + own.piece, own.phase ^ 1);
        u64* arrived = shared.arrived + own.piece;
        if (lane == 0) {
            shared.keys[own.piece] = keys;
            arrive_and_expect(arrived, PIECE * ROW);
        }
        __syncwarp();
        if (lane < PIECE) copy_row(shared.rows[own.piece] + lane * ROW, pool_ptr, index, page_bytes, arrived);
    }
    wait_for_kernel_before();
}

// The larger of each of two bf16 values, without their signs.
__device__ __forceinline__ u32 larger_pair(u32 top, u32 values) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(top) : "r"(values & 0x7fff7fff));
    return top;
}

// Brings a team's queries, bf16 [TEAM_HEADS, QUERY], into the order of score steps: step 8 * group + s takes of each t
// values 32t + 4s .. 32t + 4s + 3 of the group, the first two of each t in front; likewise of the rope, 16t + 4s.
__device__ __forceinline__ void load_queries(Team& team, const u16* query, int warp, int lane) {
    const int head = warp * 8 + lane % 8, c = lane / 8;
    const uint4* latent = (const uint4*)(query + head * QUERY);
    const uint2* rope = (const uint2*)(query + head * QUERY + LATENT);
    uint4 values[GROUPS][4];
    uint2 rotated[4];
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int t = 0; t < 4; t++) values[group][t] = __ldg(latent + group * 16 + t * 4 + c);
#pragma unroll
    for (int t = 0; t < 4; t++) rotated[t] = __ldg(rope + t * 4 + c);
    u32 tops = 0;  // of even and of odd values: as pairs, for widened values would not all fit into registers
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) tops = larger_pair(tops, word(values[group][t], i));
    float top = fmaxf(__uint_as_float(tops << 16), __uint_as_float(tops & 0xffff0000));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
    const u32 exponent = query_exponent(top);
    const float inverse = __uint_as_float(0x7f000000 - exponent);
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) {  // half i % 2 of step 2c + i / 2
            u32 pair[4];
#pragma unroll
            for (int t = 0; t < 4; t++) pair[t] = scaled(word(values[group][t], i), inverse);
            team.query[group * 8 + c * 2 + i / 2][i % 2][head] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    team.query[LATENT_STEPS + c][0][head] = make_uint4(rotated[0].x, rotated[1].x, rotated[2].x, rotated[3].x);
    team.query[LATENT_STEPS + c][1][head] = make_uint4(rotated[0].y, rotated[1].y, rotated[2].y, rotated[3].y);
    if (c == 0) team.query_scale[head] = __uint_as_float(exponent);
}

// Scores of a warp's 16 slots for the team's heads, before their factors, in the order of `score_slots`.
__device__ __forceinline__ void multiply_queries(float (&score)[TILES][4], float (&rotated)[SUMS], const u8* row_g,
                                                 int t, u64 queries) {
    constexpr u64 STEP = 2 * TEAM_HEADS;  // of descriptors
    uint4 values, values8;
    u32 a[2][4][4];
    float part[SUMS];
    auto load = [&](int batch) {
        const u8* at = row_g + (batch < 8 ? batch / 2 * GROUP + t * 32 : LATENT + 4 * GROUPS + t * 32) + batch % 2 * 16;
        values = *(const uint4*)at, values8 = *(const uint4*)(at + 8 * ROW);
    };
    auto widen_batch = [&](int batch) {
#pragma unroll
        for (int step = 0; step < (batch < 8 ? 4 : 2); step++) {
            u32(&of_step)[4] = a[batch % 2][step];
            if (batch < 8) {
                widen(word(values, step), of_step[0], of_step[2]);
                widen(word(values8, step), of_step[1], of_step[3]);
            } else {
                of_step[0] = word(values, step * 2), of_step[2] = word(values, step * 2 + 1);
                of_step[1] = word(values8, step * 2), of_step[3] = word(values8, step * 2 + 1);
            }
        }
    };
    load(0);
    widen_batch(0);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) score[n][j] = 0;
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) {
        begin_products();
#pragma unroll
        for (int step = 0; step < (batch < 8 ? 4 : 2); step++) {
            const u32(&of_step)[4] = a[batch % 2][step];
            const bool add = batch % 2 || step;
            if (batch < 8) start_product(part, of_step, queries + (batch * 4 + step) * STEP, add);
            else start_product_bf16(rotated, of_step, queries + (16 + batch * 2 + step) * STEP, add);
        }
        end_products();
        if (batch + 1 < BATCHES) {
            load(batch + 1);
            wait_for_earlier_products();
            widen_batch(batch + 1);
        }
        if (batch < 8 && batch % 2 == 1) {
            const float* scale = (const float*)(row_g + LATENT) + batch / 2;
            const float scale_g = *scale, scale_g8 = scale[8 * ROW / 4];
            wait_for_products(part);
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    score[n][j] = fmaf(j < 2 ? scale_g : scale_g8, part[n * 4 + j], score[n][j]);
        }
    }
    wait_for_products(rotated);
}

// Writes a thread's four neighbours of latent values.
__device__ __forceinline__ void store(Out* out, const float (&values)[4], float by) {
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

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) packed_sparse_mla_teams(
    const u16* query_ptr,    // [num_rows, HEADS, QUERY]
    const u8* pool_ptr,      // pages of PAGE_ROWS rows, page_bytes apart
    const Index* index_ptr,  // [num_rows, num_slots] number of a cached row; -1: no key
    const int* count_ptr,    // [num_rows] slots that are read, a prefix
    Out* out_ptr,            // [num_rows, HEADS, LATENT]
    float* lse_ptr,          // [num_rows, HEADS]
    float4* part_ptr,        // [num_splits, num_rows, TEAMS, GROUPS * 2 * TILES, TEAM_THREADS] values of splits
    float2* part_sum_ptr,    // [num_splits, num_rows, HEADS] largest exponent and sum of weights of splits
    u32* ended_ptr,          // [num_rows, TEAMS] splits that ended; zeros before and after
    i64 rows_of_batch, i64 slots_of_row, i64 page_bytes, float scale) {
    const int num_rows = rows_of_batch, num_slots = slots_of_row;
    extern __shared__ __align__(128) u8 shared_bytes[];
    Shared& shared = *(Shared*)shared_bytes;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / 32 % 4, team_id = threadIdx.x / TEAM_THREADS;
    const float score_scale = scale * LOG2_E;  // scores are exponents of two

    if (threadIdx.x < PIECES) {
        init_barrier(shared.arrived + threadIdx.x, 1);
        init_barrier(shared.released + threadIdx.x, TEAMS * 4);
    }
    publish_barriers();
    __syncthreads();
    if (team_id == TEAMS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_TO_COPY));
        if (!LIST_IS_OLD) begin();
        copy_tiles(shared, query_ptr, pool_ptr, index_ptr, count_ptr, num_rows, num_slots, page_bytes, warp, lane);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    begin();

    Team& team = shared.team[team_id];
    const u64 queries = descriptor(team.query[0][0]), weights = descriptor(team.weights[0][0]);
    const u32 stored = shared_address(team.weights[0][warp * 2] + lane);  // a row of a matrix for each lane
    float out[GROUPS][2][SUMS], sum[TILES][2], top_scale = 0;
    Place place;
    for (Tiles tiles(count_ptr, num_rows, num_slots); !tiles.none; tiles.next(), place = place.ahead(4)) {
        const i64 first_head = (i64)tiles.row * HEADS + team_id * TEAM_HEADS;  // of all rows' heads
        if (tiles.begins()) {
            load_queries(team, query_ptr + first_head * QUERY, warp, lane);
            publish_to_products();
            team_barrier(team_id);
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) sum[n][i] = 0;
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int i = 0; i < SUMS; i++) out[group][m][i] = 0;
            top_scale = LOWEST_SCALE;
        }

        float score[TILES][4], scale_g[GROUPS], scale_g8[GROUPS];
        {
            const Place own = place.ahead(warp);
            wait(shared.arrived + own.piece, own.phase);
            const u8* row_g = shared.rows[own.piece] + g * ROW;
            float rotated[SUMS];
            multiply_queries(score, rotated, row_g, t, queries);
            *(float4*)scale_g = *(const float4*)(row_g + LATENT);
            *(float4*)scale_g8 = *(const float4*)(row_g + LATENT + 8 * ROW);
            const u32 keys = shared.keys[own.piece] >> g;  // bit 0: slot g has a key; bit 8: slot g + 8
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float2 query_scale = *(const float2*)&team.query_scale[n * 8 + 2 * t];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float by = j % 2 ? query_scale.y : query_scale.x;
                    const float whole = fmaf(score[n][j], by, rotated[n * 4 + j]) * score_scale;
                    score[n][j] = keys >> (j / 2 * 8) & 1 ? whole : -INFINITY;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float most[2] = {fmaxf(score[n][0], score[n][2]), fmaxf(score[n][1], score[n][3])};
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
                for (int i = 0; i < 2; i++) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], distance));
            if (g == 0) *(float2*)&team.top[warp][n * 8 + 2 * t] = make_float2(most[0], most[1]);
        }
        float most_scale = larger_scale(scale_g, scale_g8, t);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            most_scale = fmaxf(most_scale, __shfl_xor_sync(~0u, most_scale, distance));
        if (g == 0) team.top_scale[warp][t] = most_scale;
        team_barrier(team_id);

        // Weights of 16 slots, with their scales by the largest scale so far: fp16 holds them whatever the scales are.
        const int odd = tiles.slot / SLOTS % 2;
        float shrink[TILES][2];
        bool shrinks = false;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int head = n * 8 + 2 * t;
            float2 before = *(const float2*)&team.so_far[odd ^ 1][head];
            if (tiles.begins()) before = make_float2(-INFINITY, -INFINITY);
            float2 most = before;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const float2 other = *(const float2*)&team.top[w][head];
                most = make_float2(fmaxf(most.x, other.x), fmaxf(most.y, other.y));
            }
            const float safe[2] = {most.x == -INFINITY ? 0 : most.x, most.y == -INFINITY ? 0 : most.y};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                shrink[n][i] = exp2_fast((i ? before.y : before.x) - safe[i]);
                shrinks |= shrink[n][i] != 1;
            }
            if (warp == 0 && g == 0) *(float2*)&team.so_far[odd][head] = most;
#pragma unroll
            for (int j = 0; j < 4; j++) score[n][j] = exp2_fast(score[n][j] - safe[j % 2]);
#pragma unroll
            for (int i = 0; i < 2; i++) sum[n][i] = fmaf(sum[n][i], shrink[n][i], score[n][i] + score[n][i + 2]);
        }
        // top_scale is this thread's view of group t: each thread follows one group and asks its neighbours for others.
        float most_of_t = top_scale;
#pragma unroll
        for (int w = 0; w < 4; w++) most_of_t = fmaxf(most_of_t, team.top_scale[w][t]);
        most_of_t = __uint_as_float(__float_as_uint(most_of_t) & 0x7f800000);  // a power of two
        const float inverse_of_t = __uint_as_float(0x7f000000 - __float_as_uint(most_of_t));
        const float scale_shrink_of_t = top_scale * inverse_of_t;
        top_scale = most_of_t;
        shrinks |= scale_shrink_of_t != 1;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const float inverse = __shfl_sync(~0u, inverse_of_t, group);
            const float by[2] = {scale_g[group] * inverse, scale_g8[group] * inverse};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 pair[TILES];
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    pair[n] = half_pair(score[n][2 * half] * by[half], score[n][2 * half + 1] * by[half]);
                store_transposed(stored + (group * (SLOTS / 8) + half) * TEAM_HEADS * 16, pair);
            }
        }
        publish_to_products();
        if (__any_sync(~0u, shrinks)) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const float scale_shrink = __shfl_sync(~0u, scale_shrink_of_t, group);
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float by = shrink[n][j % 2] * scale_shrink;
                        out[group][0][n * 4 + j] *= by, out[group][1][n * 4 + j] *= by;
                    }
            }
        }

        // Values: this thread's A columns are slots 2t, 2t + 1, 2t + 8, 2t + 9 of a piece, its rows four neighbours of
        // each group. A batch is one piece and two groups.
        u32 a[2][2][2][4];
        auto widen_batch = [&](int batch) {
            const Place of_batch = place.ahead(batch / 2);
            if (batch % 2 == 0) wait(shared.arrived + of_batch.piece, of_batch.phase);
            const u8* rows = shared.rows[of_batch.piece] + 2 * t * ROW + warp * 32 + g * 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u8* at = rows + (batch % 2 * 2 + i) * GROUP;
                const u32 v0 = *(const u32*)at, v1 = *(const u32*)(at + ROW);
                const u32 v8 = *(const u32*)(at + 8 * ROW), v9 = *(const u32*)(at + 9 * ROW);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const int order = m ? 0x7362 : 0x5140;  // two values, each of both slots
                    u32(&of_rows)[4] = a[batch % 2][i][m];
                    widen(__byte_perm(v0, v1, order), of_rows[0], of_rows[1]);
                    widen(__byte_perm(v8, v9, order), of_rows[2], of_rows[3]);
                }
            }
            if (batch % 2 == 1) {
                __syncwarp();
                if (lane == 0) arrive(shared.released + of_batch.piece);
            }
        };
        widen_batch(0);
        team_barrier(team_id);
#pragma unroll
        for (int batch = 0; batch < 8; batch++) {
            begin_products();
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const int group = batch % 2 * 2 + i;
                    start_product(out[group][m], a[batch % 2][i][m],
                                  weights + group * (SLOTS / 8 * TEAM_HEADS) + batch / 2 * (2 * TEAM_HEADS), true);
                }
            end_products();
            if (batch < 7) {
                wait_for_earlier_products();
                widen_batch(batch + 1);
            }
        }
#pragma unroll
        for (int group = 0; group < GROUPS; group++) wait_for_products(out[group][0]), wait_for_products(out[group][1]);
        if (!tiles.ends()) continue;

        // The state of the split: its sums over slots complete, its values without the largest scale.
        float top[TILES][2];
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
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                top[n][i] = team.so_far[odd][n * 8 + 2 * t + i], sum[n][i] = 0;
#pragma unroll
                for (int w = 0; w < 4; w++) sum[n][i] += team.sum[w][n * 8 + 2 * t + i];
            }
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const float own_scale = __shfl_sync(~0u, top_scale, group);
#pragma unroll
            for (int i = 0; i < SUMS; i++) out[group][0][i] *= own_scale, out[group][1][i] *= own_scale;
        }
        const int num_parts = tiles.parts();
        if (num_parts > 1) {
            const i64 part_stride = (i64)num_rows * HEADS * (LATENT / 4), sum_stride = (i64)num_rows * HEADS;
            float4* part = part_ptr + first_head * (LATENT / 4) + threadIdx.x % TEAM_THREADS;
            float2* part_sum = part_sum_ptr + first_head;
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int n = 0; n < TILES; n++) {
                        const float* of_tile = out[group][m] + n * 4;
                        part[tiles.split * part_stride + ((group * 2 + m) * TILES + n) * TEAM_THREADS] =
                            make_float4(of_tile[0], of_tile[1], of_tile[2], of_tile[3]);
                    }
            if (warp == 0 && g == 0)
#pragma unroll
                for (int n = 0; n < TILES; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        part_sum[tiles.split * sum_stride + n * 8 + 2 * t + i] = make_float2(top[n][i], sum[n][i]);
            team_barrier(team_id);
            if (threadIdx.x % TEAM_THREADS == 0) {
                __threadfence();
                shared.is_last[team_id] =
                    atomicInc(ended_ptr + tiles.row * TEAMS + team_id, num_parts - 1) == num_parts - 1;
                __threadfence();
            }
            team_barrier(team_id);
            if (!shared.is_last[team_id]) continue;
            float2* sums = (float2*)team.weights;  // [num_parts, TEAM_HEADS]
            for (int i = threadIdx.x % TEAM_THREADS; i < num_parts * TEAM_HEADS; i += TEAM_THREADS)
                sums[i] = __ldcg(part_sum + i / TEAM_HEADS * sum_stride + i % TEAM_HEADS);
            team_barrier(team_id);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) top[n][i] = -INFINITY, sum[n][i] = 0;
#pragma unroll
                for (int group = 0; group < GROUPS; group++)
#pragma unroll
                    for (int m = 0; m < 2; m++)
#pragma unroll
                        for (int j = 0; j < 4; j++) out[group][m][n * 4 + j] = 0;
#pragma unroll 1
                for (int other = 0; other < num_parts; other++) {
                    const float4 both = *(const float4*)&sums[other * TEAM_HEADS + n * 8 + 2 * t];
                    Fold fold_even(top[n][0], sum[n][0], both.x, both.y);
                    Fold fold_odd(top[n][1], sum[n][1], both.z, both.w);
#pragma unroll
                    for (int group = 0; group < GROUPS; group++)
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            float* of_tile = out[group][m] + n * 4;
                            const float4 values = __ldcg(part + other * part_stride +
                                                         ((group * 2 + m) * TILES + n) * TEAM_THREADS);
                            of_tile[0] = fold_even(of_tile[0], values.x), of_tile[1] = fold_odd(of_tile[1], values.y);
                            of_tile[2] = fold_even(of_tile[2], values.z), of_tile[3] = fold_odd(of_tile[3], values.w);
                        }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const i64 head = first_head + n * 8 + 2 * t + i;
                const Result result(top[n][i], sum[n][i]);
                if (warp == 0 && g == 0) lse_ptr[head] = result.lse;
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const float(&low)[SUMS] = out[group][0];
                    const float(&high)[SUMS] = out[group][1];
                    const float values[4] = {low[n * 4 + i], low[n * 4 + i + 2], high[n * 4 + i], high[n * 4 + i + 2]};
                    store(out_ptr + head * LATENT + group * GROUP + warp * 32 + g * 4, values, result.by);
                }
            }
    }
}
