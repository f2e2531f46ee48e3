// Iluvatar CoreX (BI-V100 and kin): 64 lanes, no PTX, no fp64, and no warp-level barrier that orders shared memory.
#pragma once

#include <cuda_fp16.h>

#include "gpu/platform/device.h"
#include "gpu/platform/launch.h"

namespace paged_attn::gpu::platform {

// The mask that shuffles pass is ignored here, and its 32 bits are proven to serve all 64 lanes: the width alone forms groups.
constexpr int kWarpLanes = 64;
// On BI-V150, with 4 blocks or more per processor, loads of 32 bits reached 676 GB/s, of 64 bits 589, of 128 bits 373.
constexpr int kLoadBytes = 4;

// A plain load: the cache-hint intrinsics are PTX underneath.
template <int Bytes>
PA_DEVICE Packet<Bytes> load(const void* pointer) {
  using Word = typename WordOf<Bytes>::type;
  const Word word = *static_cast<const Word*>(pointer);
  Packet<Bytes> packet;
  memcpy(&packet, &word, Bytes);
  return packet;
}

}  // namespace paged_attn::gpu::platform
