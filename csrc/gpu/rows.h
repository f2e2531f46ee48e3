// One element of a [token, head, dim] tensor to and from float, its type known only at run time.
#pragma once

#include "core/params.h"
#include "gpu/numeric.h"

namespace paged_attn::gpu {

PA_DEVICE float load_element(const TokenTensor& tensor, int64_t row, int64_t dim) {
  const int64_t at = row + dim * tensor.dim_stride;
  switch (tensor.type) {
    case ElementType::kFloat32: return static_cast<const float*>(tensor.data)[at];
    case ElementType::kFloat16: return widen(static_cast<const Float16*>(tensor.data)[at]);
    default: return widen(static_cast<const BFloat16*>(tensor.data)[at]);
  }
}

PA_DEVICE void store_element(const TokenTensor& tensor, int64_t row, int64_t dim, float value) {
  const int64_t at = row + dim * tensor.dim_stride;
  switch (tensor.type) {
    case ElementType::kFloat32: static_cast<float*>(tensor.data)[at] = value; break;
    case ElementType::kFloat16: static_cast<Float16*>(tensor.data)[at] = narrow<Float16>(value); break;
    default: static_cast<BFloat16*>(tensor.data)[at] = narrow<BFloat16>(value); break;
  }
}

}  // namespace paged_attn::gpu
