// NVIDIA, sm_75 and later.
#pragma once

#include <cuda_fp16.h>

#include "gpu/platform/device.h"
#include "gpu/platform/launch.h"

namespace paged_attn::gpu::platform {

constexpr int kWarpLanes = 32;
constexpr int kLoadBytes = 16;  // fewest instructions per byte; a warp's packets are whole sectors at any width

// Through the read-only path: what is loaded by packets is never written by the same kernel.
template <int Bytes>
PA_DEVICE Packet<Bytes> load(const void* pointer) {
  using Word = typename WordOf<Bytes>::type;
  const Word word = __ldg(static_cast<const Word*>(pointer));
  Packet<Bytes> packet;
  memcpy(&packet, &word, Bytes);
  return packet;
}

}  // namespace paged_attn::gpu::platform
