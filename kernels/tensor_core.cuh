// Tensor core products of 16 rows of weights with 8 rows of activations, fed by 16-byte loads.
//
// An m16n8k16 product wants from lane (r = lane / 4, q = lane % 4) the columns 2q, 2q + 1, 2q + 8, 2q + 9 of its rows.
// Which columns those are is free, as long as both factors agree. So a lane takes 16 adjacent bytes of weights and the
// activations of the same columns, and neither is ever shuffled: of 64 FP8 columns the lane owns 16q .. 16q + 15, and
// product j adds up its columns 4j .. 4j + 3; of 32 bfloat16 columns it owns 8q .. 8q + 7, two products of 4.

#pragma once

#include "hopper.cuh"

struct Weights {  // of one product: rows r and r + 8, columns 2q .. and 2q + 8 ..
    u32 low_row0 = 0, low_row1 = 0, high_row0 = 0, high_row1 = 0;
};

__device__ __forceinline__ void multiply_add(float (&sum)[4], const Weights& w, u32 x_low, u32 x_high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(w.low_row0), "r"(w.low_row1), "r"(w.high_row0), "r"(w.high_row1), "r"(x_low), "r"(x_high));
}

// Four e4m3 values as bfloat16, exactly. By way of float: shifts and masks of integers would take twice as long.
__device__ __forceinline__ void widen(u32 e4m3, u32& low, u32& high) {
    asm("{.reg .b16 a, b, c, d, e, f; .reg .b32 g, h; .reg .f32 i, j, k, l;"
        " mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 g, a; cvt.rn.f16x2.e4m3x2 h, b; mov.b32 {c, d}, g; mov.b32 {e, f}, h;"
        " cvt.f32.f16 i, c; cvt.f32.f16 j, d; cvt.f32.f16 k, e; cvt.f32.f16 l, f;"
        " cvt.rn.bf16x2.f32 %0, j, i; cvt.rn.bf16x2.f32 %1, l, k;}"
        : "=r"(low), "=r"(high)
        : "r"(e4m3));
}

// Rows of 128 bytes lie in shared memory with the halves of odd rows swapped, so that 8 lanes of two rows meet no bank
// twice: where a 16-byte chunk of a row is.
__device__ __forceinline__ int chunk_at(int row, int chunk) { return row * 128 + (chunk ^ (row % 2 * 4)) * 16; }

__device__ __forceinline__ const u32* words(const uint4& chunk) { return reinterpret_cast<const u32*>(&chunk); }

__device__ __forceinline__ void copy_async(u32 to, const void* from) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ uint4 load_now(const void* from) {  // where it stands: in front of copies that follow
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {  // all but the last PENDING groups
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(u16* to, float value) {  // bfloat16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(*to) : "f"(value));
}
