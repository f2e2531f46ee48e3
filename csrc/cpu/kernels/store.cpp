// reshape_and_cache: tokens to their slots, in the cache's type. An fp8 code is the nearest to value / scale, saturating.

#include "core/even_share.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/rows.h"

namespace paged_attn::cpu {
namespace {

template <typename From, typename To>
To convert(From value, float scale) {
  return from_float<To>(to_float(value) / scale);
}
// The same type is stored bit for bit: NaN payloads included, and no arithmetic that could flush subnormals.
template <>
float convert<float, float>(float value, float) {
  return value;
}
template <>
Float16 convert<Float16, Float16>(Float16 value, float) {
  return value;
}
template <>
BFloat16 convert<BFloat16, BFloat16>(BFloat16 value, float) {
  return value;
}

template <typename From, typename To>
void store_head(const TokenTensor& tensor, int64_t token, const CacheTensor& cache, int64_t block, int64_t place, int64_t head,
                int64_t size, float scale) {
  const From* from = static_cast<const From*>(tensor.data) + tensor.offset(token, head);
  To* to = static_cast<To*>(cache.data) + cache.offset(block, head) + place * cache.token_stride;
  for (int64_t first = 0; first < size; first += cache.dim_group, to += cache.group_stride) {
    const int64_t count = first + cache.dim_group <= size ? cache.dim_group : size - first;
    for (int64_t i = 0; i < count; ++i) to[i] = convert<From, To>(from[(first + i) * tensor.dim_stride], scale);
  }
}

// Work is shared by KV head and by K or V, never by token: of two tokens for one slot the later one stays, whoever stores it.
struct Store {
  const StoreParams& params;
  const Parallel& parallel;

  void share(int64_t worker) const {
    const Range units = even_share(2 * params.num_kv_heads, parallel.num_threads, worker);
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
      const int64_t head = unit / 2;
      if (unit % 2 == 0) {
        store_all(params.key, params.key_cache, head, params.key_size, params.key_scale(head));
      } else {
        store_all(params.value, params.value_cache, head, params.value_size, params.value_scale(head));
      }
    }
  }

  void store_all(const TokenTensor& tensor, const CacheTensor& cache, int64_t head, int64_t size, float scale) const {
    with_type(tensor.type, [&](auto from) {
      using From = decltype(from);
      switch (cache.type) {
        case ElementType::kFp8E4M3: return store_tokens<From, Fp8E4M3>(tensor, cache, head, size, scale);
        case ElementType::kFp8E5M2: return store_tokens<From, Fp8E5M2>(tensor, cache, head, size, scale);
        default: return store_tokens<From, From>(tensor, cache, head, size, scale);
      }
    });
  }

  template <typename From, typename To>
  void store_tokens(const TokenTensor& tensor, const CacheTensor& cache, int64_t head, int64_t size, float scale) const {
    for (int64_t token = 0; token < params.num_slots; ++token) {
      const int64_t slot = params.slot_mapping[token];
      if (slot < 0) continue;
      store_head<From, To>(tensor, token, cache, slot / params.block_size, slot % params.block_size, head, size, scale);
    }
  }
};

}  // namespace

void store(const StoreParams& params, const Parallel& parallel) {
  Store store{params, parallel};
  parallel.run(parallel.num_threads, [](void* self, int64_t i) { static_cast<Store*>(self)->share(i); }, &store);
}

}  // namespace paged_attn::cpu
