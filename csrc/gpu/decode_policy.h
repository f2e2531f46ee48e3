// How decode is laid out on a card: numbers, each with its reason. Their tuning needs a card; see bench/.
#pragma once

#include "gpu/platform/platform.h"

namespace paged_attn::gpu {

// Query heads that share one pass over K and V. 8 covers the groups of current models (4 to 8); their sums stay in registers.
constexpr int kHeadBlock = 8;

// Lanes that share a row (one dim) of V: 32 bytes of it, a memory sector, between them.
constexpr int kRowLanes = 32 / platform::kLoadBytes;

// Query dims held in shared memory at once by the kernel for head sizes known only at run time: 8 heads of 512 floats are
// 16 KiB of the 48 that every card has.
constexpr int kQueryChunk = 512;

// v1 of the run-time kernel keeps its running output in shared memory up to this head size, beyond it in global memory.
constexpr int kMaxSharedOutput = 256;

// v2: blocks per place on the card. Partitions differ in cost (the last is short, masks leave some empty); a few blocks per
// place let the card even that out. CUB's GridEvenShare uses 5.
constexpr int kSubscription = 5;

template <typename T, int kHeadSize>
struct DecodePolicy {
  static constexpr bool kAnySize = kHeadSize == 0;
  // 512 tokens over 256 lanes: two each. Sixteen fp8 tokens per load times two dims per lane do not fit 128 registers (80 to
  // 120 bytes spilled), so there each lane takes one dim.
  static constexpr int kMaxThreads = sizeof(T) == 1 && kHeadSize > 128 ? 512 : 256;
  // A lane for every 1 / kRowLanes of a dim, up to kMaxThreads.
  static constexpr int kThreads =
      kAnySize || kHeadSize * kRowLanes >= kMaxThreads ? kMaxThreads : (kHeadSize * kRowLanes + 63) / 64 * 64;
  // Blocks that a processor has registers for, 128 per thread: 512 threads hide each other's latency.
  static constexpr int kBlocks = kMaxThreads == 512 ? 1 : 2;
  static constexpr int kDimsPerPass = kThreads / kRowLanes;
  // Dims per lane; the run-time kernel passes over the probabilities once per 128 dims.
  static constexpr int kSlots = kAnySize ? 128 / kDimsPerPass : (kHeadSize + kDimsPerPass - 1) / kDimsPerPass;
  // Loads of K in flight per lane: 16-byte ones as far as 128 registers reach (a second one of float32 spilled 20 to 60 bytes),
  // narrow ones until they are worth two of those.
  static constexpr int kUnrolledGroups = platform::kLoadBytes < 16 ? 32 / platform::kLoadBytes : sizeof(T) == 2 ? 4 : 1;
};

}  // namespace paged_attn::gpu
