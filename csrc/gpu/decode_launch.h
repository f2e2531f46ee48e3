// What the decode kernels are told beside the parameters of the call, and how a sequence divides into partitions.
#pragma once

#include "core/logits.h"
#include "core/params.h"

namespace paged_attn::gpu {

struct DecodeLaunch {
  DecodeParams params;
  int heads_per_block;  // of a group, up to kHeadBlock
  int head_blocks;      // per group
  bool split;           // v2
  bool key_packets;     // K, or V, may be loaded in aligned packets; kernels of a fixed head size take that for granted
  bool value_packets;
  float* running;  // v1's output so far, [blocks][heads_per_block][value_size], where shared memory has no room for it
  int* status;

  // (KV head, head block) pairs of a sequence.
  PA_HD int64_t num_rows() const { return params.num_kv_heads * head_blocks; }
};

// A sequence whose length does not fit the call counts as one partition, whose state is NaN.
struct Partitions {
  int64_t length;
  int64_t first;
  int64_t end;
  bool valid;

  PA_HD int64_t count() const { return end - first; }
};

PA_HD Partitions partitions_of(const DecodeParams& params, int64_t sequence) {
  const int64_t length = params.seq_lens(sequence);
  if (length < 0 || length > params.max_seq_len || length > params.max_blocks * params.block_size) return {length, 0, 1, false};
  // The window leaves out whole partitions.
  const int64_t first = visible_range(params.logits, length - 1).begin / kPartitionTokens;
  return {length, length == 0 ? 0 : first, length == 0 ? 0 : ceil_div(length, kPartitionTokens), true};
}

}  // namespace paged_attn::gpu
