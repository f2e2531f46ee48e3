// Elements that a lane loads at once, as floats.
#pragma once

#include "core/params.h"
#include "gpu/numeric.h"

namespace paged_attn::gpu {

template <typename T, int kBytes>
constexpr int kPacketElements = kBytes / int(sizeof(T));

template <typename T, int kBytes>
PA_DEVICE void unpack(const Packet<kBytes>& packet, float (&values)[kPacketElements<T, kBytes>]) {
  T elements[kPacketElements<T, kBytes>];
  memcpy(elements, &packet, kBytes);
  for (int i = 0; i < kPacketElements<T, kBytes>; ++i) values[i] = widen(elements[i]);
}

// From global memory, aligned to kBytes.
template <typename T, int kBytes>
PA_DEVICE void load_elements(const T* from, float (&values)[kPacketElements<T, kBytes>]) {
  unpack<T, kBytes>(platform::load<kBytes>(from), values);
}

// From shared memory, in the widest packets that `kCount` floats allow; `from` is aligned to them.
template <int kCount>
PA_DEVICE void read_floats(const float* from, float (&values)[kCount]) {
  constexpr int kBytes = kCount % 4 == 0 ? 16 : kCount % 2 == 0 ? 8 : 4;
  constexpr int kStep = kBytes / 4;
  for (int i = 0; i < kCount; i += kStep) {
    const Packet<kBytes> packet = platform::load_shared<kBytes>(from + i);
    memcpy(values + i, &packet, kBytes);
  }
}

// Host side, for the choice of a path: whether packets may be loaded wherever the strides lead.
template <typename... Strides>
bool are_aligned(const CacheTensor& cache, Strides... strides) {
  const int64_t element_bytes = cache.type == ElementType::kFloat32 ? 4 : is_fp8(cache.type) ? 1 : 2;
  const auto whole = [&](int64_t elements) { return elements * element_bytes % platform::kLoadBytes == 0; };
  return reinterpret_cast<uintptr_t>(cache.data) % platform::kLoadBytes == 0 && (whole(strides) && ...);
}

// Packets of dims: K in layout "x".
inline bool has_key_packets(const CacheTensor& k) {
  return are_aligned(k, k.dim_group, k.block_stride, k.head_stride, k.group_stride, k.token_stride);
}

// Packets of tokens of one dim, each in one block.
inline bool has_value_packets(const CacheTensor& v, int64_t block_size) {
  return v.dim_group == 1 && v.token_stride == 1 && are_aligned(v, v.block_stride, v.head_stride, v.group_stride, block_size);
}

}  // namespace paged_attn::gpu
