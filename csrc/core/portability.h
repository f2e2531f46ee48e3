// What a header in core/ needs to compile unchanged under g++, clang++, nvcc and CoreX clang++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// __CUDACC__: nvcc. __CUDA__: clang in CUDA mode, CoreX's compiler among them (it does not define __NVCC__).
#if defined(__CUDACC__) || defined(__CUDA__)
#define PA_HD __host__ __device__ inline
#else
#define PA_HD inline
#endif

namespace paged_attn {

// A literal rather than std::numeric_limits: constexpr host functions are not callable on the device without nvcc-only flags.
constexpr float kNegativeInfinity = -__builtin_huge_valf();

PA_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
PA_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace paged_attn
