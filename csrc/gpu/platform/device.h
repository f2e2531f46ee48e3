// The device half that CUDA and CoreX share: what CUDA C++ spells the same for both.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define PA_DEVICE __device__ __forceinline__
#define PA_DEVICE_VARIABLE __device__
#define PA_KERNEL(max_threads, min_blocks) __global__ void __launch_bounds__(max_threads, min_blocks)

namespace paged_attn::gpu::platform {

// Vector types rather than structs: clang splits a struct of halves into narrower loads.
template <int Bytes>
struct WordOf;
template <>
struct WordOf<1> {
  using type = unsigned char;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

PA_DEVICE int thread_index() { return int(threadIdx.x); }
PA_DEVICE int64_t block_index() { return int64_t(blockIdx.x); }
PA_DEVICE int64_t num_blocks() { return int64_t(gridDim.x); }
PA_DEVICE void block_barrier() { __syncthreads(); }

// Every shuffle names its width: the default is the card's warp, 32 or 64.
#define PA_ALL_LANES 0xffffffffu
template <int Width, typename T>
PA_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(PA_ALL_LANES, value, mask, Width);
}
template <int Width, typename T>
PA_DEVICE T shuffle_up(T value, int distance) {
  return __shfl_up_sync(PA_ALL_LANES, value, unsigned(distance), Width);
}
template <int Width, typename T>
PA_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(PA_ALL_LANES, value, lane, Width);
}
#undef PA_ALL_LANES

// Shared memory of a block is one array whose size the launch gives. (`count` lets the host executor check bounds.)
template <typename T>
PA_DEVICE T* shared_array(int64_t offset, int64_t count) {
  extern __shared__ uint4 paged_attn_shared[];
  (void)count;
  return reinterpret_cast<T*>(reinterpret_cast<char*>(paged_attn_shared) + offset);
}

template <int Bytes>
PA_DEVICE Packet<Bytes> load_shared(const void* pointer) {
  using Word = typename WordOf<Bytes>::type;
  const Word word = *static_cast<const Word*>(pointer);
  Packet<Bytes> packet;
  memcpy(&packet, &word, Bytes);
  return packet;
}

template <int Bytes>
PA_DEVICE void store(void* pointer, const Packet<Bytes>& packet) {
  using Word = typename WordOf<Bytes>::type;
  Word word;
  memcpy(&word, &packet, Bytes);
  *static_cast<Word*>(pointer) = word;
}

PA_DEVICE float half_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
PA_DEVICE uint16_t float_to_half(float value) { return __half_as_ushort(__float2half_rn(value)); }

PA_DEVICE void raise_to(int* word, int value) { atomicMax(word, value); }
PA_DEVICE void set_if_zero(int* word, int value) { atomicCAS(word, 0, value); }

}  // namespace paged_attn::gpu::platform
