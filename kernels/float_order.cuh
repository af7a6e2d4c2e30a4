// Unsigned integers in the order of floats, which atomics, reductions and comparisons of integers then know.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY __int_as_float(0x7f800000)

// Zeros are equal, NaN stands above infinity, nothing is 0.
__device__ __forceinline__ u32 order_of(float value) {
    const u32 bits = __float_as_uint(value + 0.0f);
    return value != value ? ~0u : bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ float float_of(u32 order) {
    return __uint_as_float(order >> 31 ? order ^ 0x80000000u : ~order);
}
__device__ __forceinline__ u64 order_of(double value) {
    const u64 bits = __double_as_longlong(value + 0.0);
    return value != value ? ~0ull : bits ^ ((u64)((long long)bits >> 63) | 0x8000000000000000ull);
}
__device__ __forceinline__ double double_of(u64 order) {
    return __longlong_as_double(order >> 63 ? order ^ 0x8000000000000000ull : ~order);
}
