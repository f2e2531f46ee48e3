// Copies of whole cache blocks on the host. Not compiled per instruction set: memcpy picks its own.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/portability.h"

namespace paged_attn::cpu {

// dst block pairs[2i + 1] := src block pairs[2i], in order, for every i, all sources as they were before the call. `set_aside`:
// per pair, whether its source may be overwritten by a copy of this call, and so is saved first.
inline void copy_block_pairs(const char* src, int64_t src_block_stride, char* dst, int64_t dst_block_stride,
                             int64_t block_bytes, const int64_t* pairs, int64_t num_pairs, const std::vector<bool>& set_aside) {
  std::vector<char> saved(size_t(std::count(set_aside.begin(), set_aside.end(), true)) * size_t(block_bytes));
  char* next = saved.data();
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (!set_aside[size_t(i)]) continue;
    std::memcpy(next, src + pairs[2 * i] * src_block_stride, size_t(block_bytes));
    next += block_bytes;
  }
  next = saved.data();
  for (int64_t i = 0; i < num_pairs; ++i) {
    char* to = dst + pairs[2 * i + 1] * dst_block_stride;
    if (set_aside[size_t(i)]) {
      std::memcpy(to, next, size_t(block_bytes));
      next += block_bytes;
    } else {
      std::memmove(to, src + pairs[2 * i] * src_block_stride, size_t(block_bytes));
    }
  }
}

// Pairs whose source block is the destination of some pair.
inline std::vector<bool> overwritten_sources(const int64_t* pairs, int64_t num_pairs, int64_t num_blocks) {
  std::vector<bool> is_destination(static_cast<size_t>(num_blocks), false);
  for (int64_t i = 0; i < num_pairs; ++i) is_destination[size_t(pairs[2 * i + 1])] = true;
  std::vector<bool> result(static_cast<size_t>(num_pairs));
  for (int64_t i = 0; i < num_pairs; ++i) result[size_t(i)] = is_destination[size_t(pairs[2 * i])];
  return result;
}

}  // namespace paged_attn::cpu
