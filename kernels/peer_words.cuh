// What ranks tell each other through memory that all of them have mapped: flags, words that say when they were written,
// and when to stop waiting for them. `peer_slab.py` says where they lie.

#pragma once

#include "hopper.cuh"

typedef unsigned char u8;

// A look at the host's memory takes a microsecond, and looks take turns: were they made by all warps that wait, they
// would keep the bus busy for longer than what these wait for. So a warp asks after some 0.3 ms and again after as many
// more, and every 64th that asks looks for all.
constexpr u32 ASK_CYCLES = 1 << 19;
constexpr u32 ASKED = 64;

// When to stop waiting.
struct GivenUp {
    const u32* by_host;  // in its memory: not 0 once peers will not come
    u32* seen;           // here: how often warps have asked, and not 0 once one saw that peers will not come
};

// The two bfloat16 of a word.
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Whoever sees the flag sees all that the threads of this block had written before their last barrier.
__device__ __forceinline__ void raise_flag(u32* flag, u32 epoch) {
    asm volatile("fence.acq_rel.sys;\n\tst.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

__device__ __forceinline__ bool is_raised(const u32* flag, u32 epoch) {
    u32 seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    return (int)(seen - epoch) >= 0;  // a peer may be one ahead; epochs begin anew after 2^32
}

// Two words of 32 bits, each in one store with the epoch: no fence and no flag, for twice the bytes.
__device__ __forceinline__ void send_words(ulonglong2* to, u32 first, u32 second, u32 epoch) {
    const u64 stamp = (u64)epoch << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(stamp | first), "l"(stamp | second)
                 : "memory");
}

// Whether both are there.
__device__ __forceinline__ bool have_words(const ulonglong2* from, u32& first, u32& second, u32 epoch) {
    u64 a, b;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
    first = (u32)a, second = (u32)b;
    return (u32)(a >> 32) == epoch && (u32)(b >> 32) == epoch;
}

// Polls until something is so for all threads of the warp, which call together; false where the host has said meanwhile
// that it never will be.
template <typename Condition>
__device__ __forceinline__ bool await(const Condition& is_so, GivenUp given_up) {
    for (u32 since = clock(); !__all_sync(~0u, is_so());) {
        if ((u32)clock() - since < ASK_CYCLES) continue;
        u32 is_over = 0;
        if (threadIdx.x % 32 == 0) {
            volatile u32* const seen = given_up.seen + 1;
            if (atomicAdd(given_up.seen, 1) % ASKED == 0) {
                asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(is_over) : "l"(given_up.by_host) : "memory");
                if (is_over) *seen = 1;
            }
            is_over = *seen;
        }
        if (__shfl_sync(~0u, is_over, 0)) return false;
        since = clock();
    }
    return true;
}
