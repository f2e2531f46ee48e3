// How many blocks a launch has when each takes a stride of the work: never limited by the number of sequences or pairs.
#pragma once

#include "core/portability.h"

namespace paged_attn::gpu {

// Enough to fill any card many times over, far below the limit of a grid's first dimension (2^31 - 1).
constexpr int64_t kMaxGridBlocks = 1 << 16;

inline int64_t grid_blocks(int64_t items, int64_t items_per_block) {
  const int64_t blocks = ceil_div(items, items_per_block);
  return blocks < kMaxGridBlocks ? blocks : kMaxGridBlocks;
}

}  // namespace paged_attn::gpu
