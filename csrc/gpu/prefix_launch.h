// What the prefix kernel is told beside the parameters of the call, and what a sequence asks for.
#pragma once

#include "core/params.h"
#include "gpu/prefix_policy.h"

namespace paged_attn::gpu {

struct PrefixLaunch {
  PrefixParams params;
  int64_t tiles;     // of rows, per sequence and KV head, for max_query_len queries
  bool key_packets;  // K, or V, of the cache may be loaded in aligned packets
  bool value_packets;
  int* status;
};

struct Chunk {
  int64_t begin;  // token of query
  int64_t end;
  int64_t context;
  bool valid;

  PA_HD int64_t queries() const { return end - begin; }
};

PA_HD Chunk chunk_of(const PrefixParams& params, int64_t sequence) {
  Chunk chunk{params.query_start_loc(sequence), params.query_start_loc(sequence + 1), params.context_lens(sequence), true};
  chunk.valid = chunk.begin >= 0 && chunk.end >= chunk.begin && chunk.end <= params.num_tokens &&
                chunk.queries() <= params.max_query_len && chunk.context >= 0 &&
                params.seq_lens(sequence) == chunk.context + chunk.queries() &&
                chunk.context <= params.max_blocks * params.block_size;
  return chunk;
}

}  // namespace paged_attn::gpu
