// The total order of scores, as integers: higher score first, then the earlier position. NaN counts as +inf.
//
// A key is 64 bits: the score's bits, made to rise with the score, above the complement of the position. The greater
// key is the better candidate, no two candidates have the same, and 0 is no candidate's.
//
// A bin is a range of scores, 16 to an octave for magnitudes of 2^-32 to 2^32 of either sign; what is beyond falls
// into the bins at the ends and in the middle. Bins rise with the score, so that counting them bounds the k-th best
// score.

#pragma once

constexpr int NUM_BINS = 2048;
constexpr int HALF_BINS = NUM_BINS / 2;  // below them are the negative scores
constexpr unsigned BIN_SHIFT = 19;       // 4 bits of the mantissa remain
constexpr unsigned LEAST_BITS = (127 - 32) << 23;
constexpr unsigned MOST_BITS = ((127 + 32) << 23) - 1;
constexpr unsigned LARGEST_BITS = 0x7f7fffff;  // of the largest finite float

using Key = unsigned long long;

struct __align__(8) Candidate {
    float score;
    int position;
};

constexpr int CHUNK = 128;  // bins whose counts are summed, too
constexpr int NUM_CHUNKS = NUM_BINS / CHUNK;
constexpr int COUNTS = NUM_BINS + 32;  // ints of a row's counts: its bins, its chunks
constexpr int STATE = 32;  // ints of a row's state, a cache line: its number of candidates, the bin of its threshold

__device__ inline int bin_of(float score) {
    const unsigned magnitude = __float_as_uint(score) & 0x7fffffff;
    const int step = (min(max(magnitude, LEAST_BITS), MOST_BITS) - LEAST_BITS) >> BIN_SHIFT;
    return score < 0.0f ? HALF_BINS - 1 - step : HALF_BINS + step;
}

// The least score of a bin. That of bin 0 is the least finite one: -inf marks what may not be chosen.
__device__ inline float bin_edge(int bin) {
    if (bin == HALF_BINS) return 0.0f;
    if (bin > HALF_BINS) return __uint_as_float(LEAST_BITS + (unsigned(bin - HALF_BINS) << BIN_SHIFT));
    const unsigned magnitude = LEAST_BITS + (unsigned(HALF_BINS - bin) << BIN_SHIFT) - 1;
    return -__uint_as_float(bin ? magnitude : LARGEST_BITS);
}

__device__ inline unsigned rising_bits(float score) {
    const unsigned bits = __float_as_uint(score + 0.0f);  // no -0.0
    return bits ^ (unsigned(int(bits) >> 31) | 0x80000000u);
}

__device__ inline Key key_of(float score, int position) {
    return Key(rising_bits(score)) << 32 | (0xffffffffu - unsigned(position));
}

__device__ inline int position_of(Key key) { return int(0xffffffffu - unsigned(key)); }

__device__ inline float score_of(Key key) {
    const unsigned rising = unsigned(key >> 32);
    return __uint_as_float(rising ^ (rising >> 31 ? 0x80000000u : 0xffffffffu));
}
