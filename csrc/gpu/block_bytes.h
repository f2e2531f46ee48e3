// Whole cache blocks, moved as bytes by the threads of a block.
#pragma once

#include "gpu/platform/platform.h"

namespace paged_attn::gpu {

constexpr int kCopyThreads = 256;

template <int kBytes>
PA_DEVICE void copy_packets(char* to, const char* from, int64_t bytes) {
  for (int64_t i = int64_t(platform::thread_index()) * kBytes; i < bytes; i += kCopyThreads * kBytes) {
    platform::store<kBytes>(to + i, platform::load<kBytes>(from + i));
  }
}

// Every thread of a block of kCopyThreads calls. In the widest packets that the addresses and the size allow.
PA_DEVICE void copy_bytes(char* to, const char* from, int64_t bytes) {
  const uint64_t both =
      uint64_t(reinterpret_cast<uintptr_t>(to)) | uint64_t(reinterpret_cast<uintptr_t>(from)) | uint64_t(bytes);
  if (both % 16 == 0) return copy_packets<16>(to, from, bytes);
  if (both % 4 == 0) return copy_packets<4>(to, from, bytes);
  copy_packets<1>(to, from, bytes);
}

}  // namespace paged_attn::gpu
