// gather_blocks: the tokens of a cache's blocks as rows. Elements of the output's type go there in one pass; others are first
// laid out as rows in scratch, and then decoded.

#include "core/even_share.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/registers.h"
#include "cpu/kernels/rows.h"
#include "cpu/kernels/scratch.h"

namespace paged_attn::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Rows of more bytes than this, K's or V's, are written past the caches, which would fetch them first and lose all else: the
// size of an ample second-level cache.
constexpr int64_t kStreamBytes = 2 << 20;
constexpr int64_t kTileTokens = 16;  // as many rows are laid out in scratch before they are decoded: they stay in the cache

// Groups of x dims, as K has them: each is a register of the output. Tiles are a line of the output wide.
template <bool kStream, typename T>
void copy_groups(const T* from, const CacheTensor& cache, int64_t tokens, int64_t size, T* to, int64_t to_stride) {
  constexpr int64_t x = kRegisterBytes / sizeof(T), kLineGroups = kLineBytes / kRegisterBytes;
  const int64_t groups = size / x;
  for (int64_t first = 0; first < groups; first += kLineGroups) {
    const int64_t count = first + kLineGroups < groups ? kLineGroups : groups - first;
    for (int64_t t = 0; t < tokens; ++t) {
      const T* group = from + t * cache.token_stride + first * cache.group_stride;
      T* row = to + t * to_stride + first * x;
      if (count == kLineGroups) {  // unrolled
        for (int64_t g = 0; g < kLineGroups; ++g) copy_register<kStream>(group + g * cache.group_stride, row + g * x);
      } else {
        for (int64_t g = 0; g < count; ++g) copy_register<kStream>(group + g * cache.group_stride, row + g * x);
      }
    }
  }
}

// Dims of contiguous tokens, as V has them. Tiles are a line wide in both directions where the block is.
template <bool kStream, typename T>
void transpose_dims(const T* from, const CacheTensor& cache, int64_t tokens, int64_t size, T* to, int64_t to_stride) {
  constexpr int64_t x = kRegisterBytes / sizeof(T), kLine = kLineBytes / sizeof(T);
  T lines[x * kLine];  // streamed lines are put together here: as many at once would not fit the processor's buffers
  for (int64_t t0 = 0; t0 < tokens; t0 += kLine) {
    const int64_t t1 = t0 + kLine < tokens ? t0 + kLine : tokens;
    for (int64_t d0 = 0; d0 < size; d0 += kLine) {
      const int64_t dims = d0 + kLine < size ? kLine : size - d0;
      for (int64_t t = t0; t < t1; t += x) {
        const int64_t count = t + x < t1 ? x : t1 - t;
        T* row = to + t * to_stride + d0;
        for (int64_t d = 0; d < dims; d += x) {
          const T* tile = from + (d0 + d) * cache.group_stride + t;
          T* transposed = (kStream ? lines : row) + d;
          const int64_t stride = kStream ? kLine : to_stride;
          if (count == x) {
            transpose_tile(tile, cache.group_stride, transposed, stride);
          } else {
            transpose_columns(tile, cache.group_stride, transposed, stride, count);
          }
        }
        for (int64_t j = 0; kStream && j < count; ++j) {
          for (int64_t d = 0; d < dims; d += x) copy_register<true>(lines + j * kLine + d, row + j * to_stride + d);
        }
      }
    }
  }
}

// Where rows of elements go, as they are stored.
template <typename T>
struct Rows {
  T* data;
  int64_t token_stride;
  int64_t dim_stride;
};

// `tokens` places from `place` on. kStream: the rows are aligned to registers.
template <bool kStream, typename T>
void copy_rows(const CacheTensor& cache, int64_t block, int64_t head, int64_t place, int64_t tokens, int64_t size, Rows<T> to) {
  constexpr int64_t x = kRegisterBytes / sizeof(T);
  const T* from = static_cast<const T*>(cache.data) + cache.offset(block, head) + place * cache.token_stride;
  if (to.dim_stride == 1 && size % x == 0) {
    if (cache.dim_group == x) return copy_groups<kStream>(from, cache, tokens, size, to.data, to.token_stride);
    if (cache.dim_group == 1 && cache.token_stride == 1) {
      return transpose_dims<kStream>(from, cache, tokens, size, to.data, to.token_stride);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < size; ++d) {
      to.data[t * to.token_stride + d * to.dim_stride] = from[t * cache.token_stride + cache.dim_offset(d)];
    }
  }
}

// Whether rows of T are to be written past the caches: they do not fit there, and each register of them is aligned.
template <typename T>
bool streams(const TokenTensor& out, const GatherParams& params, int64_t size) {
  const int64_t bytes = params.num_tokens * params.num_kv_heads * size * int64_t(sizeof(T));
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(out.data) | uintptr_t(out.token_stride * int64_t(sizeof(T))) |
                               uintptr_t(out.head_stride * int64_t(sizeof(T)));
  return bytes >= kStreamBytes && misaligned % kRegisterBytes == 0;
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
    finish_streaming();
  }

  // Block i of the table, for one head.
  void gather_block(const CacheTensor& cache, float scale, int64_t size, int64_t i, int64_t head,
                    const TokenTensor& out) const {
    const int64_t block = params.block_table(i), first = i * params.block_size;
    const int64_t tokens = first + params.block_size < params.num_tokens ? params.block_size : params.num_tokens - first;
    with_type(cache.type, [&](auto tag) {
      using T = decltype(tag);
      if (out.type == cache.type) {
        const Rows<T> to{static_cast<T*>(out.data) + out.offset(first, head), out.token_stride, out.dim_stride};
        if (streams<T>(out, params, size)) return copy_rows<true>(cache, block, head, 0, tokens, size, to);
        return copy_rows<false>(cache, block, head, 0, tokens, size, to);
      }
      static thread_local Scratch scratch;
      scratch.reset(Scratch::bytes_for<T>(kTileTokens * size) + Scratch::bytes_for<float>(size));
      T* rows = scratch.take<T>(kTileTokens * size);
      float* numbers = scratch.take<float>(size);
      const TokenTensor stored{rows, cache.type, size, 0, 1};
      for (int64_t place = 0; place < tokens; place += kTileTokens) {
        const int64_t count = place + kTileTokens < tokens ? kTileTokens : tokens - place;
        copy_rows<false>(cache, block, head, place, count, size, Rows<T>{rows, size, 1});
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
