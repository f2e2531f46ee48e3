// Copies of whole cache blocks on the host. Not compiled per instruction set: memcpy picks its own.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/even_share.h"
#include "core/params.h"
#include "cpu/kernel_table.h"

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

// Calls copy(i, block, entry) for every entry (i, c) of the buffer and its block of cache c, in parallel.
template <typename Copy>
inline void for_each_entry(const BlockTransfer& transfer, const Parallel& parallel, const Copy& copy) {
  struct Job {
    const BlockTransfer& transfer;
    int64_t num_workers;
    const Copy& copy;
  } job{transfer, parallel.num_threads, copy};
  const auto share = [](void* argument, int64_t worker) {
    const Job& job = *static_cast<const Job*>(argument);
    const BlockTransfer& transfer = job.transfer;
    const Range entries = even_share(transfer.num_ids * transfer.num_caches, job.num_workers, worker);
    for (int64_t entry = entries.begin; entry < entries.end; ++entry) {
      const int64_t i = entry / transfer.num_caches;
      const BlockArray& cache = transfer.caches[entry % transfer.num_caches];
      job.copy(i, cache.data + transfer.block_ids(i) * cache.block_stride, transfer.buffer + entry * transfer.block_bytes);
    }
  };
  parallel.run(parallel.num_threads, share, &job);
}

inline void pack_blocks(const BlockTransfer& transfer, const Parallel& parallel) {
  for_each_entry(transfer, parallel,
                 [&](int64_t, const char* block, char* entry) { std::memcpy(entry, block, size_t(transfer.block_bytes)); });
}

// Of entries for one block the last alone is copied, so that no two threads write the same block.
inline void scatter_blocks(const BlockTransfer& transfer, const Parallel& parallel) {
  std::vector<bool> seen(size_t(transfer.num_blocks), false), is_last(size_t(transfer.num_ids));
  for (int64_t i = transfer.num_ids - 1; i >= 0; --i) {
    const size_t block = size_t(transfer.block_ids(i));
    is_last[size_t(i)] = !seen[block];
    seen[block] = true;
  }
  for_each_entry(transfer, parallel, [&](int64_t i, char* block, const char* entry) {
    if (is_last[size_t(i)]) std::memcpy(block, entry, size_t(transfer.block_bytes));
  });
}

}  // namespace paged_attn::cpu
