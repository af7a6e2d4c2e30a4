// The experts of a mixture layer: every active expert's weights pass through the chip once, at the speed of the memory.
//
//     hidden[p] = silu(gate_e x_t) * (up_e x_t)       p = pair (token t, place c), e = its expert
//     out[t]    = sum_c weight[t, c] * down_e hidden[p] + shared expert's, in the order of the places, best first
//
// One block a multiprocessor, the same one from beginning to end, with one or more crews of warps that work apart. In a
// crew a thread claims work, a tile of rows with the pairs of an expert, and requests its weights with the bulk copy
// engine into a ring of stages; a warp fetches the values of the pairs as columns; the other warps multiply. Weights
// are the M side of the matrix instructions and tokens the N side, 8 to an instruction, so that few tokens waste
// little. Tiles of gate and up are claimed before those of down, which wait for the hidden values of their expert
// alone; their weights are requested meanwhile.
//
// The experts of a few tokens are chosen here, by every block for itself: a launch for that takes longer than it does.
//
// A weight byte becomes a bfloat16 without rounding, products are exact, sums are float32: over 128 weights inside the
// matrix units, then scaled and added in order. The bits of a token depend on neither its column nor its neighbours'.
//
// How the weights lie in memory is told by `pack_rows_for_tensor_cores` in moe_experts.py.
//
// Macros: HIDDEN size, WIDTH of an expert, EXPERTS, CHOSEN, SHARED_BYTES that the launcher gives; of a `Shape` there:
// GROUPS of 16 rows in a stage, GROUPS_EACH warp has, COLUMN_TILES of 8 pairs, STAGES of a ring, CREWS, MAX_TOKENS.

#include "moe_choice.cuh"
#include "tensor_core.cuh"

constexpr int UP_STEPS = HIDDEN / 256, DOWN_STEPS = WIDTH / 256;  // stages of a tile of gate and up, and of down
static_assert(WIDTH % 256 == 0 && HIDDEN % 256 == 0 && 128 % (16 * GROUPS) == 0, "tiles");
constexpr bool FEW = MAX_TOKENS <= 8;      // tokens
constexpr int COLUMNS = 8 * COLUMN_TILES;  // pairs of one expert that are multiplied together
constexpr int HELD_COLUMNS = COLUMNS < MAX_TOKENS ? COLUMNS : MAX_TOKENS;  // an expert has no more pairs than tokens
constexpr int PLACES = CHOSEN + 1;         // the last one is the shared expert's
constexpr int ROWS = 16 * GROUPS;          // of a stage
constexpr int WEIGHT_BYTES = ROWS * 256;
constexpr int TILES_OF_PIECE = 128 / ROWS;  // 128 rows by 256 weights lie together in memory
constexpr int COLUMN_PITCH = 2 * 256 + 16;  // bytes; 16 more than a row, so that 8 rows meet no bank twice
constexpr int COLUMN_BYTES = HELD_COLUMNS * COLUMN_PITCH;
constexpr int MAX_JOBS = FEW ? MAX_TOKENS * CHOSEN + 1 : EXPERTS + 1 + MAX_TOKENS * PLACES / COLUMNS;
constexpr int MAX_PAIRS = FEW ? MAX_JOBS * COLUMNS : MAX_TOKENS * PLACES;  // few: each job has room for all tokens
constexpr int UP_TILES = 2 * WIDTH / ROWS, DOWN_TILES = HIDDEN / ROWS;
constexpr int CLAIM = TILES_OF_PIECE < 2 ? 2 : TILES_OF_PIECE;  // tiles of down that are claimed together
constexpr int TEAM = GROUPS / GROUPS_EACH, TEAMS = 2;
constexpr int MULTIPLIERS = 32 * TEAM * TEAMS, CREW = MULTIPLIERS + 64, THREADS = CREWS * CREW;
constexpr int TOO_LONG = 1 << 26;  // polls: seconds

struct __align__(16) Ring {
    unsigned char weights[STAGES][WEIGHT_BYTES];
    unsigned char columns[STAGES][COLUMN_BYTES];
    float scales[STAGES][4];  // of rows 0-7 of all groups by both blocks of 128, then of rows 8-15
    u64 named[STAGES], full[STAGES], empty[STAGES];  // barriers of a stage, in the order it passes them
    u32 work[STAGES];
};

// Where in a ring one is, who passes its stages again and again: a barrier's phases are even and odd.
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Shared {
    Ring rings[CREWS];
    u64 of_expert[EXPERTS];  // few tokens: 1 + the place that it has in token t, in byte t; else its first pair
    u32 num_jobs;
    u32 jobs[MAX_JOBS];
    u16 pairs[MAX_PAIRS];  // by expert
};

// Pairs of one expert, no more than COLUMNS, in one word.
struct Job {
    int expert, first, count;
    __device__ explicit Job(u32 word) : expert(word >> 19), first(word >> 6 & 0x1fff), count(word & 0x3f) {}
    __device__ static u32 word(int expert, int first, int count) { return expert << 19 | first << 6 | count; }
};
static_assert(EXPERTS < 1 << 13 && MAX_PAIRS < 1 << 13 && COLUMNS < 1 << 6, "a job is one word");

// What a stage holds, in one word.
struct Work {
    int job, tile, step;
    bool is_up;
    __device__ explicit Work(u32 word)
        : job(word >> 14), tile(word >> 6 & 0xff), step(word >> 1 & 0x1f), is_up(word & 1) {}
    __device__ static u32 word(int job, int tile, int step, bool is_up) {
        return job << 14 | tile << 6 | step << 1 | is_up;
    }
};
static_assert(DOWN_TILES <= 1 << 8 && UP_TILES <= 1 << 8, "a stage's work is one word");
static_assert(UP_STEPS <= 1 << 5 && DOWN_STEPS <= 1 << 5 && MAX_JOBS < 1 << 17, "a stage's work is one word");
constexpr u32 NO_WORK = ~0u;

__device__ void wait(u64* barrier, u32 parity) {
#pragma unroll 1
    for (int polls = 0; polls < TOO_LONG; polls++) {
        u32 passed;
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(passed) : "r"(shared_address(barrier)), "r"(parity) : "memory");
        if (passed) return;
    }
    __trap();
}

__device__ void copy(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// After a meeting of threads, one of them reports for all.
__device__ void report(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ u32 reports(const u32* counter) {
    u32 number;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(counter) : "memory");
    return number;
}

__device__ void wait_for(const u32* counter, u32 number) {
#pragma unroll 1
    for (int polls = 0; polls < TOO_LONG; polls++)
        if (reports(counter) >= number) return;
    __trap();
}

// Which jobs' hidden values are written, as a warp knows it: of 32 neighbours at once, since each look takes long.
struct Finished {
    const u32* done;  // for each job, the warps that wrote
    const int lane;
    int jobs = -1;
    u32 known = 0;  // a bit for each of jobs * 32 ..

    __device__ void wait_for(int job) {
        if (job / 32 != jobs) jobs = job / 32, known = 0;
#pragma unroll 1
        for (int polls = 0; polls < TOO_LONG; polls++) {
            if (known >> job % 32 & 1) return;
            known = __ballot_sync(~0u, reports(&done[jobs * 32 + lane]) >= UP_TILES * TEAM);
            __syncwarp();  // what one lane has seen to be written, all may read
        }
        __trap();
    }
};

// The warps of both teams that have the same rows. A barrier's number is a constant here: with one that is not, a block
// takes all barriers that there are.
template <int ROWS_OF = 0>
__device__ void teams_meet(int rows_of) {
    if (ROWS_OF == CREWS * TEAM - 1 || rows_of == ROWS_OF)
        asm volatile("bar.sync %0, 64;" ::"n"(2 + ROWS_OF) : "memory");
    else
        teams_meet<ROWS_OF == CREWS * TEAM - 1 ? 0 : ROWS_OF + 1>(rows_of);
}

__device__ void multipliers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CREWS * MULTIPLIERS) : "memory"); }

// Two of four e4m3 values, those in bytes 1 and 3, as bfloat16 times 2^-120: the bits only move into place, subnormals
// included; weights are never NaN. Half of the 120 is given back to the columns, so that no product leaves the range of
// float32, and half to the scale.
__device__ u32 as_bf16(u32 signs, u32 shifted) { return (shifted & 0x07f007f0u) | (signs & 0x80008000u); }

constexpr float SCALE_UP = 1152921504606846976.0f;  // 2^60

__device__ u32 scaled_up(u32 pair) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x5d805d80u));  // 2^60
    return pair;
}

// Adds a block of a stage: 16 rows of each of the warp's groups by 128 weights times 8 * TILES columns.
template <int TILES>
__device__ void multiply_block(float (&total)[GROUPS_EACH][TILES][4], const Ring& ring, int stage, int group,
                               int block, int lane) {
    const uint4* weights = (const uint4*)ring.weights[stage] + group * 256 + block * 128 + lane;
    const unsigned char* columns =
        ring.columns[stage] + min(lane / 4, HELD_COLUMNS - 1) * COLUMN_PITCH + block * 256 + lane % 4 * 32;
    float sum[GROUPS_EACH][TILES][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 b[TILES][8];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint4* column = (const uint4*)(columns + tile * 8 * COLUMN_PITCH + half * 128);
            *(uint4*)&b[tile][0] = column[0];
            *(uint4*)&b[tile][4] = column[1];
#pragma unroll
            for (int i = 0; i < 8; i++) b[tile][i] = scaled_up(b[tile][i]);
        }
#pragma unroll
        for (int g = 0; g < GROUPS_EACH; g++) {
            const uint4 rows0 = weights[g * 256 + half * 64], rows1 = weights[g * 256 + half * 64 + 32];
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const u32 row0 = words(rows0)[step], row1 = words(rows1)[step];
                const Weights a = {as_bf16(row0, row0 >> 4), as_bf16(row1, row1 >> 4),
                                   as_bf16(row0 << 8, row0 << 4), as_bf16(row1 << 8, row1 << 4)};
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    multiply_add(sum[g][tile], a, b[tile][2 * step], b[tile][2 * step + 1]);
            }
        }
    }
    const float* scales = ring.scales[stage];
    const float low_scale = scales[block] * SCALE_UP, high_scale = scales[2 + block] * SCALE_UP;
#pragma unroll
    for (int g = 0; g < GROUPS_EACH; g++) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                total[g][tile][j] = fmaf(j < 2 ? low_scale : high_scale, sum[g][tile][j], total[g][tile][j]);
        }
    }
}

__device__ u32 bf16_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// A warp that multiplies: its groups of rows in a stage.
struct Multiplier {
    const Shared& shared;
    Ring& ring;
    u16* hidden;
    u16* parts;
    u32* done;  // for each job, the warps that wrote hidden values
    const int crew, team, group, lane;
    Turn turn;

    __device__ void run() {
        for (;;) {
            wait(&ring.full[turn.stage], turn.parity);
            const u32 word = ring.work[turn.stage];
            if (word == NO_WORK) return;
            const Work work(word);
            const Job job(shared.jobs[work.job]);
            if (COLUMN_TILES == 1 || job.count <= 8)
                multiply_tile<1>(work, job);
            else if (COLUMN_TILES == 2 || job.count <= 16)
                multiply_tile<(COLUMN_TILES > 2 ? 2 : COLUMN_TILES)>(work, job);
            else
                multiply_tile<COLUMN_TILES>(work, job);
        }
    }

    template <int TILES>
    __device__ void multiply_tile(const Work& work, const Job& job) {
        float total[GROUPS_EACH][TILES][4] = {};
        if (work.is_up || DOWN_STEPS > 1) {
            // Each team adds one block of every stage.
            const int steps = work.is_up ? UP_STEPS : DOWN_STEPS;
            for (int step = 1; step < steps; step++) {
                multiply_block(total, ring, turn.stage, group, team, lane);
                release();
                wait(&ring.full[turn.stage], turn.parity);
            }
            multiply_block(total, ring, turn.stage, group, team, lane);
            join_teams(total);
            release();
            if (team == 0) {
                if (work.is_up)
                    write_hidden(total, work, job);
                else
                    write_parts(total, work, job);
            }
        } else {
            // The teams take tiles in turn.
            static_assert(CLAIM % TEAMS == 0, "teams have equally many");
            const bool is_mine = work.tile % TEAMS == team;
            if (is_mine) {
                multiply_block(total, ring, turn.stage, group, 0, lane);
                multiply_block(total, ring, turn.stage, group, 1, lane);
            }
            release();
            if (is_mine) write_parts(total, work, job);
        }
    }

    __device__ void release() {
        __syncwarp();
        if (lane == 0) arrive(&ring.empty[turn.stage]);
        turn.next();
    }

    // Adds team 1's sums to those of team 0; they pass where team 1's weights of this stage were.
    template <int TILES>
    __device__ void join_teams(float (&total)[GROUPS_EACH][TILES][4]) {
        static_assert(TILES * 32 <= 128, "sums fit where weights were");
        float4* place = (float4*)ring.weights[turn.stage] + group * 256 + 128 + lane;
        if (team == 1) {
            __syncwarp();
#pragma unroll
            for (int g = 0; g < GROUPS_EACH; g++)
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    place[g * 256 + tile * 32] = *(const float4*)total[g][tile];
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        teams_meet(crew * TEAM + group / GROUPS_EACH);
        if (team == 0) {
#pragma unroll
            for (int g = 0; g < GROUPS_EACH; g++)
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const float4 other = place[g * 256 + tile * 32];
                    total[g][tile][0] += other.x, total[g][tile][1] += other.y;
                    total[g][tile][2] += other.z, total[g][tile][3] += other.w;
                }
        }
    }

    template <int TILES, typename Write>
    __device__ void for_each_pair(const Job& job, Write write) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int column = tile * 8 + lane % 4 * 2 + j;
                if (column < job.count) write((long long)shared.pairs[job.first + column], tile, j);
            }
    }

    template <int TILES>
    __device__ void write_hidden(const float (&total)[GROUPS_EACH][TILES][4], const Work& work, const Job& job) {
        for_each_pair<TILES>(job, [&](long long pair, int tile, int j) {
#pragma unroll
            for (int g = 0; g < GROUPS_EACH; g++) {
                const int row = (work.tile * GROUPS + group + g) * 8 + lane / 4;
                const float gate = total[g][tile][j], up = total[g][tile][2 + j];
                hidden[pair * WIDTH + row] = (u16)bf16_pair(gate / (1.0f + __expf(-gate)) * up, 0.0f);
            }
        });
        __syncwarp();
        if (lane == 0) report(&done[work.job]);
    }

    template <int TILES>
    __device__ void write_parts(const float (&total)[GROUPS_EACH][TILES][4], const Work& work, const Job& job) {
        for_each_pair<TILES>(job, [&](long long pair, int tile, int j) {
#pragma unroll
            for (int g = 0; g < GROUPS_EACH; g++) {
                const int row = (work.tile * GROUPS + group + g) * 16 + lane / 4 * 2;
                *(u32*)(parts + pair * HIDDEN + row) = bf16_pair(total[g][tile][j], total[g][tile][2 + j]);
            }
        });
    }
};

// The thread that claims work and requests its weights, by a ring ahead of the multipliers.
struct Requester {
    const Shared& shared;
    Ring& ring;
    const unsigned char* gate_up;
    const float* gate_up_scale;
    const unsigned char* down;
    const float* down_scale;
    u32* claimed;
    const u32* done;  // for each job, the warps that wrote hidden values
    const int number, num_crews;  // of the crew among those of all blocks, and how many these are
    u64 once, again;  // in the cache: most weights are used once, those of the shared expert by each of its jobs
    Turn turn;

    __device__ void run() {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again));
        constexpr int CLAIMS = DOWN_TILES / CLAIM;
        const int num_up = shared.num_jobs * UP_TILES, num_claims = num_up + shared.num_jobs * CLAIMS;
        // A crew without a tile of gate and up leaves the memory to them until the first end, all at about one time.
        if (number >= num_up) wait_for(&done[0], 1);
        for (int claim = number; claim < num_claims; claim = num_crews + atomicAdd(claimed, 1)) {
            if (claim < num_up) {
                const int job = claim / UP_TILES, tile = claim % UP_TILES;
                request_tile<UP_TILES, UP_STEPS>(job, tile, true, gate_up, gate_up_scale);
            } else {
                const int job = (claim - num_up) / CLAIMS, tile = (claim - num_up) % CLAIMS * CLAIM;
                for (int i = 0; i < CLAIM; i++)
                    request_tile<DOWN_TILES, DOWN_STEPS>(job, tile + i, false, down, down_scale);
            }
        }
        name(NO_WORK);
        arrive(&ring.full[turn.stage]);
    }

    __device__ void name(u32 word) {
        wait(&ring.empty[turn.stage], turn.parity ^ 1);
        ring.work[turn.stage] = word;
        arrive(&ring.named[turn.stage]);
    }

    // One thread asks for all weights of a crew: what it can do once a tile, it does not do once a stage.
    template <int TILES, int STEPS>
    __device__ void request_tile(int job, int tile, bool is_up, const unsigned char* weights, const float* scales) {
        const int expert = Job(shared.jobs[job]).expert;
        const long long piece = (long long)((expert * TILES + tile) / TILES_OF_PIECE) * STEPS;
        const u64 policy = expert < EXPERTS ? once : again;
        weights += (piece * TILES_OF_PIECE + tile % TILES_OF_PIECE) * WEIGHT_BYTES;
        scales += piece * 4;
        for (int step = 0; step < STEPS; step++) {
            u64* const full = &ring.full[turn.stage];
            name(Work::word(job, tile, step, is_up));
            arrive_and_expect(full, WEIGHT_BYTES + 16);
            copy(ring.weights[turn.stage], weights, WEIGHT_BYTES, full, policy);
            copy(ring.scales[turn.stage], scales, 16, full, again);
            weights += TILES_OF_PIECE * WEIGHT_BYTES, scales += 4;
            turn.next();
        }
    }
};

// The warp that fetches the columns of each stage, 256 values of a pair: x, or hidden values once they are written.
__device__ void fetch_columns(const Shared& shared, Ring& ring, const u16* x, const u16* hidden, const u32* done,
                              int lane) {
    Finished finished{done, lane};
    int count = 0;  // of the tile's pairs
    const u16* own = nullptr;
    for (Turn turn;; turn.next()) {
        wait(&ring.named[turn.stage], turn.parity);
        const u32 word = ring.work[turn.stage];
        if (word == NO_WORK) return arrive(&ring.full[turn.stage]);
        const Work work(word);
        if (work.step == 0) {
            const Job job(shared.jobs[work.job]);
            const int pair = shared.pairs[job.first + min(lane, job.count - 1)];
            count = job.count;
            own = work.is_up ? x + pair / PLACES * HIDDEN : hidden + pair * WIDTH;
            if (!work.is_up) finished.wait_for(work.job);
        }
        const u32 place = shared_address(ring.columns[turn.stage] + lane * 16);
        for (int column = 0; column < count; column++) {
            const auto values = (const u16*)__shfl_sync(~0u, (u64)own, column) + work.step * 256 + lane * 8;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + column * COLUMN_PITCH), "l"(values)
                         : "memory");
        }
        const u32 full = shared_address(&ring.full[turn.stage]);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
    }
}

// Chooses the experts of a few tokens, a warp a token, and makes a job of each expert's pairs; every block for itself.
__device__ void choose_and_make_jobs(Shared& shared, const float* quarter_sum, const float* bias, int* expert_TC,
                                     float* weight_TC, float scaling, int num_tokens) {
    constexpr int WARPS = THREADS / 32, FOURS = EXPERTS / 4;
    constexpr int ROUNDS = FEW ? (MAX_TOKENS * FOURS + THREADS - 1) / THREADS : 1;
    static_assert(!FEW || MAX_TOKENS * EXPERTS * 4 <= STAGES * WEIGHT_BYTES, "scores fit into the ring");
    auto scores = (float*)shared.rings[0].weights;  // [T, EXPERTS]; the ring is not in use yet
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) shared.of_expert[i] = 0;
    float bias_of[8];
#pragma unroll
    for (int j = 0; j < 8; j++) bias_of[j] = bias[lane * 8 + j];
    wait_for_kernel_before();
    let_next_kernel_start();
    const int num_fours = num_tokens * FOURS;
    float4 quarter[ROUNDS][4];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int i = round * THREADS + threadIdx.x;
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (i < num_fours) quarter[round][q] = __ldcg((const float4*)quarter_sum + q * num_fours + i);
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const int i = round * THREADS + threadIdx.x;
        if (i >= num_fours) break;
        float4 logit = quarter[round][0];
#pragma unroll
        for (int q = 1; q < 4; q++) {
            logit.x += quarter[round][q].x, logit.y += quarter[round][q].y;
            logit.z += quarter[round][q].z, logit.w += quarter[round][q].w;
        }
        ((float4*)scores)[i] = {score_of(logit.x), score_of(logit.y), score_of(logit.z), score_of(logit.w)};
    }
    __syncthreads();
    for (int token = warp; token < num_tokens; token += WARPS) {
        const Choice choice = choose_experts(scores + token * EXPERTS, bias_of, scaling, lane);
        if (lane < CHOSEN) {
            ((unsigned char*)&shared.of_expert[choice.expert])[token] = lane + 1;
            if (blockIdx.x == 0) {
                expert_TC[token * CHOSEN + lane] = choice.expert;
                weight_TC[token * CHOSEN + lane] = choice.weight;
            }
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine overwrites the scores
    __syncthreads();
    int num_jobs = 0;
#pragma unroll 1  // what no block ran before is fetched from far
    for (int first = 0; first < EXPERTS; first += 32) {
        const u64 places = shared.of_expert[first + lane];
        const u32 chosen = __ballot_sync(~0u, places != 0);
        const int job = num_jobs + __popc(chosen & ((1u << lane) - 1));
        num_jobs += __popc(chosen);
        if (places == 0 || first / 32 % WARPS != warp) continue;
        int count = 0;
#pragma unroll 1
        for (int token = 0; token < num_tokens; token++) {
            const int place = places >> 8 * token & 0xff;
            if (place) shared.pairs[job * COLUMNS + count++] = token * PLACES + place - 1;
        }
        shared.jobs[job] = Job::word(first + lane, job * COLUMNS, count);
    }
    if (threadIdx.x < num_tokens) shared.pairs[num_jobs * COLUMNS + threadIdx.x] = threadIdx.x * PLACES + CHOSEN;
    if (threadIdx.x == 0) {
        shared.jobs[num_jobs] = Job::word(EXPERTS, num_jobs * COLUMNS, num_tokens);
        shared.num_jobs = num_jobs + 1;
    }
    __syncthreads();
}

// Sorts the pairs by expert, then token, and cuts each expert's into jobs; every block for itself.
__device__ void make_jobs(Shared& shared, const int* expert_TC, int num_tokens) {
    constexpr int WORDS = (MAX_TOKENS + 31) / 32;
    auto chosen_by = (u32(*)[EXPERTS])shared.rings[0].weights;  // a bit for each token of an expert; not yet a ring
    static_assert(EXPERTS * WORDS * 4 <= STAGES * WEIGHT_BYTES && CHOSEN == 8, "bits fit into the ring");
    const int words = (num_tokens + 31) / 32;
    for (int i = threadIdx.x; i < EXPERTS * words; i += THREADS) chosen_by[0][i] = 0;
    __syncthreads();
    wait_for_kernel_before();
    let_next_kernel_start();
    int experts[CHOSEN];
    const auto load = [&](int token) {
        *(int4*)&experts[0] = ((const int4*)expert_TC)[token * 2];
        *(int4*)&experts[4] = ((const int4*)expert_TC)[token * 2 + 1];
    };
    for (int t = threadIdx.x; t < num_tokens; t += THREADS) {
        load(t);
#pragma unroll
        for (int c = 0; c < CHOSEN; c++) atomicOr(&chosen_by[t / 32][experts[c]], 1u << t % 32);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        constexpr int EACH_LANE = EXPERTS / 32;
        const int lane = threadIdx.x;
        int counts[EACH_LANE];
        u32 before = 0;  // pairs, jobs
#pragma unroll
        for (int j = 0; j < EACH_LANE; j++) {
            counts[j] = 0;
            for (int word = 0; word < words; word++) counts[j] += __popc(chosen_by[word][j * 32 + lane]);
            before += counts[j] << 16 | (counts[j] + COLUMNS - 1) / COLUMNS;
        }
        const u32 own = before;
        for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += other;
        }
        const u32 all = __shfl_sync(~0u, before, 31);
        before -= own;
        int first = before >> 16, num_jobs = before & 0xffff;
        const auto add = [&](int expert, int count) {
            for (; count > 0; count -= COLUMNS, first += COLUMNS)
                shared.jobs[num_jobs++] = Job::word(expert, first, min(count, COLUMNS));
            first += count;  // what the last job was short of
        };
#pragma unroll
        for (int j = 0; j < EACH_LANE; j++) {
            shared.of_expert[j * 32 + lane] = first;
            add(j * 32 + lane, counts[j]);
        }
        if (lane == 0) {
            first = all >> 16, num_jobs = all & 0xffff;
            add(EXPERTS, num_tokens);
            shared.num_jobs = num_jobs;
        }
    }
    __syncthreads();
    for (int t = threadIdx.x; t < num_tokens; t += THREADS) {
        if (MAX_TOKENS > THREADS) load(t);
#pragma unroll
        for (int c = 0; c < CHOSEN; c++) {
            int at = (int)shared.of_expert[experts[c]] + __popc(chosen_by[t / 32][experts[c]] & ((1u << t % 32) - 1));
            for (int word = 0; word < t / 32; word++) at += __popc(chosen_by[word][experts[c]]);
            shared.pairs[at] = t * PLACES + c;
        }
        shared.pairs[num_tokens * CHOSEN + t] = t * PLACES + CHOSEN;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine overwrites the bits
    __syncthreads();
}

__device__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Adds the rows of each token's places by weight, 8 values a thread.
__device__ void combine(const u16* parts, const float* weight_TC, u16* out, int num_tokens, int multiplier) {
    constexpr int CHUNKS = HIDDEN / 8;
    constexpr int ALL = CREWS * MULTIPLIERS;
    for (int i = blockIdx.x * ALL + multiplier; i < num_tokens * CHUNKS; i += gridDim.x * ALL) {
        const int token = i / CHUNKS, chunk = i % CHUNKS;
        uint4 part[PLACES];
#pragma unroll
        for (int place = 0; place < PLACES; place++)
            part[place] = __ldcg((const uint4*)(parts + ((long long)token * PLACES + place) * HIDDEN) + chunk);
        float sum[8] = {};
#pragma unroll
        for (int place = 0; place < PLACES; place++) {
            const float weight = place < CHOSEN ? __ldcg(weight_TC + token * CHOSEN + place) : 1.0f;
            const u32 words[4] = {part[place].x, part[place].y, part[place].z, part[place].w};
#pragma unroll
            for (int word = 0; word < 4; word++) {
                sum[2 * word] = fmaf(weight, low_half(words[word]), sum[2 * word]);
                sum[2 * word + 1] = fmaf(weight, high_half(words[word]), sum[2 * word + 1]);
            }
        }
        const uint4 value = {bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]), bf16_pair(sum[4], sum[5]),
                             bf16_pair(sum[6], sum[7])};
        ((uint4*)(out + (long long)token * HIDDEN))[chunk] = value;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(
    const u16* x,                  // [T, HIDDEN] bf16
    const float* quarter_sum,      // [4, T, EXPERTS] of the router, for few tokens
    const float* bias,             // [EXPERTS]
    int* expert_TC,                // [T, CHOSEN], written for few tokens, else read
    float* weight_TC,              // [T, CHOSEN], likewise
    const unsigned char* gate_up,  // packed, EXPERTS + 1 of [2 * WIDTH, HIDDEN] e4m3
    const float* gate_up_scale,    // a piece's four
    const unsigned char* down,     // packed, EXPERTS + 1 of [HIDDEN, WIDTH] e4m3
    const float* down_scale,
    u16* hidden,                   // [T * PLACES, WIDTH] bf16: between both products
    u16* parts,                    // [T * PLACES, HIDDEN] bf16: each expert's output
    u16* out,                      // [T, HIDDEN] bf16
    u32* counters,                 // zeros: claims, blocks that ended, then for each job the warps that wrote hidden
    float scaling,
    long long num_tokens) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher knows the size");
    const int crew = threadIdx.x / CREW, warp = threadIdx.x % CREW / 32, lane = threadIdx.x % 32;
    Ring& ring = shared.rings[crew];
    if (threadIdx.x % CREW < STAGES) {
        const int stage = threadIdx.x % CREW;
        init_barrier(&ring.named[stage], 1);
        init_barrier(&ring.full[stage], 1 + 32);  // weights, columns
        init_barrier(&ring.empty[stage], MULTIPLIERS / 32);
        publish_barriers();
    }
    if constexpr (FEW)
        choose_and_make_jobs(shared, quarter_sum, bias, expert_TC, weight_TC, scaling, num_tokens);
    else
        make_jobs(shared, expert_TC, num_tokens);
    u32 *claimed = &counters[0], *ended = &counters[1], *done = &counters[2];
    if (warp == MULTIPLIERS / 32) {
        const int number = crew * gridDim.x + blockIdx.x, num_crews = CREWS * gridDim.x;
        Requester requester{shared,  ring, gate_up, gate_up_scale, down, down_scale,
                            claimed, done, number,  num_crews};
        if (lane == 0) requester.run();
        return;
    }
    if (warp == MULTIPLIERS / 32 + 1) return fetch_columns(shared, ring, x, hidden, done, lane);
    Multiplier{shared, ring, hidden, parts, done, crew, warp / TEAM, warp % TEAM * GROUPS_EACH, lane}.run();
    multipliers_meet();
    if (threadIdx.x == 0) {
        report(ended);
        wait_for(ended, gridDim.x);
    }
    multipliers_meet();
    combine(parts, weight_TC, out, num_tokens, crew * MULTIPLIERS + threadIdx.x % CREW);
}
