// What ranks tell each other through memory that all of them have mapped: flags, words that say when they were written,
// and when to stop waiting for them. `peer_slab.py` says where they lie.

#pragma once

#include "hopper.cuh"

typedef unsigned char u8;

constexpr int POLLS = 64;  // between two looks at the host's memory, which take longer

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

// Polls until something is so; false where the host has said meanwhile that it never will be.
template <typename Condition>
__device__ __forceinline__ bool await(const Condition& is_so, const u32* given_up) {
    for (u32 polls = 1; !is_so(); ++polls) {
        u32 is_over = 0;
        if (polls % POLLS == 0)
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(is_over) : "l"(given_up) : "memory");
        if (is_over) return false;
    }
    return true;
}
