// Where the arrays of a kernel lie in its block's shared memory. The same function of a kernel makes the layout on the host,
// which asks for bytes(), and on the device, which asks for the arrays: the two cannot differ.
#pragma once

#include "core/portability.h"

namespace paged_attn::gpu {

class SharedLayout {
 public:
  // Offset in bytes of an array of `count` elements; aligned for the widest load.
  template <typename T>
  PA_HD int64_t take(int64_t count) {
    const int64_t offset = bytes_;
    bytes_ += round_up(count * int64_t(sizeof(T)), 16);
    return offset;
  }
  PA_HD int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

}  // namespace paged_attn::gpu
