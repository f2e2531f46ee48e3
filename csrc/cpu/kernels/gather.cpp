// gather_blocks: the tokens of a cache's blocks as rows. Elements of the output's type go there in one pass; others are first
// laid out as rows in scratch, and then decoded.

#include "core/even_share.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/rows.h"
#include "cpu/kernels/scratch.h"
#include "cpu/kernels/transpose.h"

namespace paged_attn::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kTileTokens = 16;  // as many rows are laid out in scratch before they are decoded: they stay in the cache

// Groups of x dims, as K has them: each is a register of the output. Tiles are a line of the output wide.
template <typename T>
void copy_groups(const T* from, const CacheTensor& cache, int64_t tokens, int64_t size, T* to, int64_t to_stride) {
  constexpr int64_t x = kRegisterBytes / sizeof(T), kGroups = kLineBytes / kRegisterBytes;
  const int64_t groups = size / x;
  int64_t first = 0;
  for (; first + kGroups <= groups; first += kGroups, from += kGroups * cache.group_stride, to += kGroups * x) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t g = 0; g < kGroups; ++g) {
        memcpy(to + t * to_stride + g * x, from + t * cache.token_stride + g * cache.group_stride, kRegisterBytes);
      }
    }
  }
  for (; first < groups; ++first, from += cache.group_stride, to += x) {
    for (int64_t t = 0; t < tokens; ++t) memcpy(to + t * to_stride, from + t * cache.token_stride, kRegisterBytes);
  }
}

// Dims of contiguous tokens, as V has them. Tiles are a line wide in both directions where the block is.
template <typename T>
void transpose_dims(const T* from, const CacheTensor& cache, int64_t tokens, int64_t size, T* to, int64_t to_stride) {
  constexpr int64_t x = kRegisterBytes / sizeof(T), kLine = kLineBytes / sizeof(T);
  for (int64_t t0 = 0; t0 < tokens; t0 += kLine) {
    const int64_t t1 = t0 + kLine < tokens ? t0 + kLine : tokens;
    for (int64_t d0 = 0; d0 < size; d0 += kLine) {
      const int64_t d1 = d0 + kLine < size ? d0 + kLine : size;
      for (int64_t t = t0; t < t1; t += x) {
        const int64_t count = t + x < t1 ? x : t1 - t;
        for (int64_t d = d0; d < d1; d += x) {
          transpose_tile(from + d * cache.group_stride + t, cache.group_stride, to + t * to_stride + d, to_stride, count);
        }
      }
    }
  }
}

// Elements as they are stored, for `tokens` places from `place` on. `to`: rows of the cache's type.
template <typename T>
void copy_rows(const CacheTensor& cache, int64_t block, int64_t head, int64_t place, int64_t tokens, int64_t size, T* to,
               int64_t to_stride, int64_t to_dim_stride) {
  constexpr int64_t x = kRegisterBytes / sizeof(T);
  const T* from = static_cast<const T*>(cache.data) + cache.offset(block, head) + place * cache.token_stride;
  if (to_dim_stride == 1 && size % x == 0) {
    if (cache.dim_group == x) return copy_groups(from, cache, tokens, size, to, to_stride);
    if (cache.dim_group == 1 && cache.token_stride == 1) return transpose_dims(from, cache, tokens, size, to, to_stride);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < size; ++d) {
      to[t * to_stride + d * to_dim_stride] = from[t * cache.token_stride + cache.dim_offset(d)];
    }
  }
}

struct Gather {
  const GatherParams& params;
  const Parallel& parallel;

  void share(int64_t worker) const {
    const int64_t num_blocks = ceil_div(params.num_tokens, params.block_size);
    const Range units = even_share(num_blocks * params.num_kv_heads, parallel.num_threads, worker);
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
      const int64_t i = unit / params.num_kv_heads, head = unit % params.num_kv_heads;
      gather_block(params.key_cache, params.key_scale(head), params.key_size, i, head, params.key);
      gather_block(params.value_cache, params.value_scale(head), params.value_size, i, head, params.value);
    }
  }

  // Block i of the table, for one head.
  void gather_block(const CacheTensor& cache, float scale, int64_t size, int64_t i, int64_t head,
                    const TokenTensor& out) const {
    const int64_t block = params.block_table(i), first = i * params.block_size;
    const int64_t tokens = first + params.block_size < params.num_tokens ? params.block_size : params.num_tokens - first;
    with_type(cache.type, [&](auto tag) {
      using T = decltype(tag);
      if (out.type == cache.type) {
        T* to = static_cast<T*>(out.data) + out.offset(first, head);
        return copy_rows(cache, block, head, 0, tokens, size, to, out.token_stride, out.dim_stride);
      }
      static thread_local Scratch scratch;
      scratch.reset(Scratch::bytes_for<T>(kTileTokens * size) + Scratch::bytes_for<float>(size));
      T* rows = scratch.take<T>(kTileTokens * size);
      float* numbers = scratch.take<float>(size);
      const TokenTensor stored{rows, cache.type, size, 0, 1};
      for (int64_t place = 0; place < tokens; place += kTileTokens) {
        const int64_t count = place + kTileTokens < tokens ? kTileTokens : tokens - place;
        copy_rows(cache, block, head, place, count, size, rows, size, 1);
        for (int64_t t = 0; t < count; ++t) {
          load_row(stored, t, 0, size, numbers);
          store_row(out, first + place + t, head, size, numbers, scale);
        }
      }
    });
  }
};

}  // namespace

void gather(const GatherParams& params, const Parallel& parallel) {
  Gather gather{params, parallel};
  parallel.run(parallel.num_threads, [](void* self, int64_t i) { static_cast<Gather*>(self)->share(i); }, &gather);
}

}  // namespace paged_attn::cpu
