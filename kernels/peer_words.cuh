// What ranks tell each other through memory that all of them have mapped: flags, words that say when they were written,
// and when to stop waiting for them. `peer_slab.py` says where they lie.

#pragma once

#include "hopper.cuh"

typedef unsigned char u8;

// Between two looks of a warp at the host's memory, some 0.3 ms: they are slow, and thousands of threads that look
// again and again keep the bus busy for longer than what they wait for.
constexpr long long LOOK_CYCLES = 1 << 19;

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
__device__ __forceinline__ bool await(const Condition& is_so, const u32* given_up) {
    for (long long look_at = clock64() + LOOK_CYCLES; !__all_sync(~0u, is_so());) {
        if (clock64() < look_at) continue;
        u32 is_over = 0;
        if (threadIdx.x % 32 == 0)
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(is_over) : "l"(given_up) : "memory");
        if (__shfl_sync(~0u, is_over, 0)) return false;
        look_at = clock64() + LOOK_CYCLES;
    }
    return true;
}
