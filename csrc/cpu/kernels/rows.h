// One row of a [token, head, dim] tensor to and from float.
#pragma once

#include "core/params.h"
#include "cpu/kernels/vec.h"

namespace paged_attn::cpu {

inline void load_row(const TokenTensor& tensor, int64_t token, int64_t head, int64_t size, float* to) {
  with_type(tensor.type, [&](auto tag) {
    using T = decltype(tag);
    const T* from = static_cast<const T*>(tensor.data) + tensor.offset(token, head);
    int64_t d = 0;
    if (tensor.dim_stride == 1) {
      for (; d + Vec::kLanes <= size; d += Vec::kLanes) Vec::load(from + d).store(to + d);
    }
    for (; d < size; ++d) to[d] = to_float(from[d * tensor.dim_stride]);
  });
}

// Stores factor * from; where factor is 0 the row is zero whatever `from` holds.
inline void store_row(const TokenTensor& tensor, int64_t token, int64_t head, int64_t size, const float* from, float factor) {
  const auto store = [&](auto tag) {
    using T = decltype(tag);
    T* to = static_cast<T*>(tensor.data) + tensor.offset(token, head);
    int64_t d = 0;
    if (tensor.dim_stride == 1 && factor != 0.0f) {
      const Vec f(factor);
      for (; d + Vec::kLanes <= size; d += Vec::kLanes) store_as(Vec::load(from + d) * f, to + d);
    }
    for (; d < size; ++d) to[d * tensor.dim_stride] = from_float<T>(factor == 0.0f ? 0.0f : from[d] * factor);
  };
  switch (tensor.type) {  // outputs are never fp8
    case ElementType::kFloat32: return store(float{});
    case ElementType::kFloat16: return store(Float16{});
    default: return store(BFloat16{});
  }
}

// to = to * a + from * b, for unnormalised outputs.
inline void scale_add(float* to, float a, const float* from, float b, int64_t size) {
  const Vec va(a), vb(b);
  int64_t d = 0;
  for (; d + Vec::kLanes <= size; d += Vec::kLanes) { fma(Vec::load(from + d), vb, Vec::load(to + d) * va).store(to + d); }
  for (; d < size; ++d) to[d] = to[d] * a + from[d] * b;
}

}  // namespace paged_attn::cpu
