// reshape_and_cache: tokens to their slots, in the cache's type. An fp8 code is the nearest to value / scale, saturating. Of
// two tokens for one slot either may stay.

#include "gpu/grid.h"
#include "gpu/kernels.h"
#include "gpu/numeric.h"
#include "gpu/report.h"

namespace paged_attn::gpu {
namespace {

constexpr int kThreads = 256;

template <typename From, typename To>
PA_DEVICE To convert(From value, float scale) {
  if constexpr (sizeof(To) == 1) {
    return narrow<To>(widen(value) / scale);
  } else {
    return value;  // the same type is stored bit for bit
  }
}

template <typename From, typename To>
PA_DEVICE void store_element(const TokenTensor& from, int64_t token, const CacheTensor& to, int64_t slot, int64_t block_size,
                             int64_t head, int64_t dim, float scale) {
  const From value = static_cast<const From*>(from.data)[from.offset(token, head) + dim * from.dim_stride];
  To* place = static_cast<To*>(to.data) + to.offset(slot / block_size, head) + slot % block_size * to.token_stride;
  place[to.dim_offset(dim)] = convert<From, To>(value, scale);
}

// A thread per (token, KV head, dim), dims fastest: K and V are read in whole sectors; K is written in runs of x, V, whose
// neighbouring dims lie a block apart, element by element.
template <typename From, typename To>
PA_KERNEL(kThreads, 1)
store_kernel(const StoreParams params, int* status) {
  const int64_t dims = params.key_size > params.value_size ? params.key_size : params.value_size;
  const int64_t items = params.num_slots * params.num_kv_heads * dims;
  const int64_t slots = params.key_cache.num_blocks * params.block_size;
  for (int64_t item = platform::block_index() * kThreads + platform::thread_index(); item < items;
       item += platform::num_blocks() * kThreads) {
    const int64_t dim = item % dims;
    const int64_t head = item / dims % params.num_kv_heads;
    const int64_t token = item / dims / params.num_kv_heads;
    const int64_t slot = params.slot_mapping[token];
    if (slot < 0) continue;
    if (slot >= slots) {
      if (dim == 0 && head == 0) report(status, Operator::kStore, Reason::kSlot, token);
      continue;
    }
    if (dim < params.key_size) {
      store_element<From, To>(params.key, token, params.key_cache, slot, params.block_size, head, dim, params.key_scale(head));
    }
    if (dim < params.value_size) {
      store_element<From, To>(params.value, token, params.value_cache, slot, params.block_size, head, dim,
                              params.value_scale(head));
    }
  }
}

template <typename From, typename To>
void launch_store(const StoreParams& params, const Queue& queue) {
  const int64_t dims = params.key_size > params.value_size ? params.key_size : params.value_size;
  const int64_t items = params.num_slots * params.num_kv_heads * dims;
  platform::launch("reshape_and_cache", store_kernel<From, To>, {grid_blocks(items, kThreads), kThreads, 0}, queue.stream,
                   params, queue.status);
}

template <typename From>
void launch_from(const StoreParams& params, const Queue& queue) {
  switch (params.key_cache.type) {
    case ElementType::kFp8E4M3: return launch_store<From, Fp8E4M3>(params, queue);
    case ElementType::kFp8E5M2: return launch_store<From, Fp8E5M2>(params, queue);
    default: return launch_store<From, From>(params, queue);
  }
}

}  // namespace

void store(const StoreParams& params, const Queue& queue) {
  switch (params.key.type) {
    case ElementType::kFloat32: return launch_from<float>(params, queue);
    case ElementType::kFloat16: return launch_from<Float16>(params, queue);
    default: return launch_from<BFloat16>(params, queue);
  }
}

}  // namespace paged_attn::gpu
