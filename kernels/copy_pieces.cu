// Pieces of memory to other places, also to those of another GPU: `copy_pieces.py` says what.
//
// A link between GPUs carries lines of 128 bytes, and is at its best when each goes as a whole. So a piece is cut into
// parts at the lines of its destination, and eight lanes move a part: each has the same 16 bytes of every line, all
// lines of the part in flight at once. A warp moves the parts of four neighbours, of one piece or of several, and takes
// its parts from all over the list, so that no warp has only the long pieces.
//
// The rows of a repeated piece that follow each other at the destination are one run there, cut as one: its lines are
// gathered from wherever the rows lie. Rows with gaps at the destination are cut one by one, each into as many parts as
// a row of that length may touch, so that a division finds the row; the last part may have nothing to do.
//
// Macros: THREADS of a block.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int LINE = 128, UNIT = 16;
constexpr int LANES = LINE / UNIT;   // that move a part
constexpr int LINES = 8;             // of a part
constexpr int PART = LINES * LINE;
constexpr int GROUPS = 32 / LANES;   // parts that a warp moves at once
constexpr int TILE = 32;             // parts that a warp looks for together
constexpr int WARPS = THREADS / 32;

// Which piece a part is of: the first whose last part is behind it. A whole warp asks for one part.
__device__ __forceinline__ long long piece_of(u32 part, const u32* __restrict__ end, long long num_pieces) {
    long long low = 0, count = num_pieces;
    while (count > 1) {
        const long long step = (count + 31) / 32, probe = (threadIdx.x % 32 + 1) * step - 1;
        const bool is_before = probe < count && end[low + probe] <= part;
        const long long skipped = __popc(__ballot_sync(~0u, is_before)) * step;
        low += skipped;
        count = min(step, count - skipped);
    }
    return low;
}

// What lies behind each other at the destination, and where it comes from.
struct Run {
    u64 to, from;
    u64 step;  // bytes from row to row at the source
    u32 row;   // bytes of a row
};

// Where the byte for `to` lies. Without rows the source is one run, too.
template <bool HAS_ROWS>
__device__ __forceinline__ u64 source_of(const Run& run, u64 to) {
    if constexpr (!HAS_ROWS) return to - run.to + run.from;
    const u32 offset = to - run.to, row = offset / run.row;
    return run.from + row * run.step + (offset - row * run.row);
}

template <bool HAS_ROWS>
__device__ __forceinline__ u32 load_byte(const Run& run, u64 to) {
    return __ldg((const u8*)source_of<HAS_ROWS>(run, to));
}

// Four bytes for an address of which all that matters is a multiple of ALIGNMENT: a word, or byte by byte.
template <int ALIGNMENT, bool HAS_ROWS>
__device__ __forceinline__ u32 load_word(const Run& run, u64 to) {
    if constexpr (ALIGNMENT == 4) return __ldg((const u32*)source_of<HAS_ROWS>(run, to));
    return load_byte<HAS_ROWS>(run, to) | load_byte<HAS_ROWS>(run, to + 1) << 8 |
           load_byte<HAS_ROWS>(run, to + 2) << 16 | load_byte<HAS_ROWS>(run, to + 3) << 24;
}

// 16 bytes likewise.
template <int ALIGNMENT, bool HAS_ROWS>
__device__ __forceinline__ uint4 load_unit(const Run& run, u64 to) {
    if constexpr (ALIGNMENT == UNIT) return __ldcg((const uint4*)source_of<HAS_ROWS>(run, to));
    return make_uint4(load_word<ALIGNMENT, HAS_ROWS>(run, to), load_word<ALIGNMENT, HAS_ROWS>(run, to + 4),
                      load_word<ALIGNMENT, HAS_ROWS>(run, to + 8), load_word<ALIGNMENT, HAS_ROWS>(run, to + 12));
}

// The whole units of a part: `at` is this lane's in the first line.
template <int ALIGNMENT, int IN_FLIGHT, bool HAS_ROWS>
__device__ __forceinline__ void copy_units(const Run& run, u64 at, u64 begin, u64 finish) {
#pragma unroll 1
    for (int first = 0; first < LINES; first += IN_FLIGHT, at += IN_FLIGHT * LINE) {
        uint4 unit[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const u64 to = at + i * LINE;
            if (to >= begin && to + UNIT <= finish) unit[i] = load_unit<ALIGNMENT, HAS_ROWS>(run, to);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const u64 to = at + i * LINE;
            if (to >= begin && to + UNIT <= finish) __stcg((uint4*)to, unit[i]);
        }
    }
}

template <bool HAS_ROWS>
__device__ __forceinline__ void copy_bytes(const Run& run, u64 begin, u64 finish, int lane) {
    for (u64 to = begin + lane; to < finish; to += LANES) __stcg((u8*)to, (u8)load_byte<HAS_ROWS>(run, to));
}

// A part: bytes begin..finish - 1 of a run, of which `line` is the first line.
template <bool HAS_ROWS>
__device__ __forceinline__ void copy_part(const Run& run, u64 line, u64 begin, u64 finish, int lane) {
    // A unit at the destination is one at the source where rows begin at the same places of units on both sides.
    const u64 skew = HAS_ROWS ? run.to | run.from | run.step | run.row : run.to - run.from;
    const u64 at = line + lane * UNIT;
    if (skew % 16 == 0) copy_units<16, LINES, HAS_ROWS>(run, at, begin, finish);
    else if (skew % 4 == 0) copy_units<4, LINES / (HAS_ROWS ? 4 : 1), HAS_ROWS>(run, at, begin, finish);
    else copy_units<1, 1, HAS_ROWS>(run, at, begin, finish);
    // What is in front of the first unit and behind the last.
    const u64 first_unit = min((begin + UNIT - 1) / UNIT * UNIT, finish);
    copy_bytes<HAS_ROWS>(run, begin, first_unit, lane);
    copy_bytes<HAS_ROWS>(run, max(first_unit, finish / UNIT * UNIT), finish, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_pieces(
    const u64* __restrict__ source,       // [num_pieces] addresses
    const u64* __restrict__ destination,  // [num_pieces]
    const u32* __restrict__ length,       // [num_pieces] bytes, >= 1
    const u32* __restrict__ end,          // [num_pieces] parts up to the end of each piece
    // Of pieces that are repeated; null where none is.
    const u32* __restrict__ count,             // [num_pieces] rows of `length` bytes, >= 1
    const u32* __restrict__ source_step,       // [num_pieces] bytes from row to row
    const u32* __restrict__ destination_step,  // [num_pieces]
    long long layer_source_step,       // bytes from a layer to the next, of which gridDim.y are copied alike
    long long layer_destination_step,
    long long num_pieces, long long num_parts) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x % 32 / LANES;
    const long long warp = threadIdx.x / 32 * (long long)gridDim.x + blockIdx.x;
    for (long long tile = warp * TILE; tile < num_parts; tile += (long long)gridDim.x * WARPS * TILE) {
        const u32 tile_end = min(tile + TILE, num_parts);
        long long piece = piece_of(tile, end, num_pieces);
        for (u32 first = tile; first < tile_end; first += GROUPS) {
            const u32 part = first + group;
            long long own = piece;
            int passed = 0;
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {  // no piece is without a part
                const u32 piece_end = end[min(piece + i, num_pieces - 1)];
                own += piece_end <= part;
                passed += piece_end <= first + GROUPS;
            }
            piece += passed;
            if (part >= tile_end) continue;

            Run run = {destination[own] + blockIdx.y * layer_destination_step,
                       source[own] + blockIdx.y * layer_source_step, 0, length[own]};
            u32 num_bytes = run.row, number = part - (own ? end[own - 1] : 0);
            if (count) {
                const u64 to_step = destination_step[own];
                const u32 num_rows = count[own];
                run.step = source_step[own];
                if (num_rows == 1 || to_step == run.row) num_bytes *= num_rows;
                else {
                    const u32 parts_of_row = (run.row + LINE - 1 + PART - 1) / PART, row = number / parts_of_row;
                    number -= row * parts_of_row;
                    run.from += row * run.step;
                    run.to += row * to_step;
                }
            }
            const u64 line = run.to / LINE * LINE + (u64)number * PART;
            const u64 begin = max(line, run.to), finish = min(line + PART, run.to + num_bytes);
            if (num_bytes == run.row) copy_part<false>(run, line, begin, finish, lane);
            else copy_part<true>(run, line, begin, finish, lane);
        }
    }
    // Whoever sees that the kernel has ended, on whichever GPU or host, sees what it wrote.
    __threadfence_system();
}
