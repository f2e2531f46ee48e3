// The sticky error word of a device: the first wrong sequence, slot or block since it was last read. Kernels set it beside the
// NaN rows they write (report.h; docs/contract.md, rule 5): nothing waits for it, and a caller who wants to know asks.
#pragma once

#include "core/portability.h"

namespace paged_attn::gpu {

enum class Operator : int { kNone, kDecode, kPrefix, kStore, kCopyBlocks, kGatherBlocks, kPackBlocks, kScatterBlocks };
enum class Reason : int { kNone, kLength, kBlock, kSlot };

struct DeviceError {
  Operator op;
  Reason reason;
  int64_t index;  // of the sequence, token or pair; kMaxIndex stands for it and everything beyond

  static constexpr int kIndexBits = 24;
  static constexpr int64_t kMaxIndex = (1 << kIndexBits) - 1;

  // Never 0 for an error, never negative: 3 bits of reason, 4 of operator, 24 of index.
  PA_HD int pack() const {
    return int(reason) << 28 | int(op) << kIndexBits | int(index < kMaxIndex ? index : int64_t(kMaxIndex));
  }
  static DeviceError unpack(int word) { return {Operator(word >> kIndexBits & 15), Reason(word >> 28), word & int(kMaxIndex)}; }
};

// The word of the current device, in its memory.
int* status_word();

}  // namespace paged_attn::gpu
