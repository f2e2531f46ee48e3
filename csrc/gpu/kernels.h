// The boundary between csrc/ops, which knows torch, and the GPU kernels, which do not: one function per operator, on the host.
// All work is queued on the stream; nothing waits. A launch that the runtime refuses throws std::runtime_error.
#pragma once

#include "core/params.h"
#include "gpu/platform/host.h"

namespace paged_attn::gpu {

struct Queue {
  platform::Stream stream;
  int* status;  // a word on the device; see status.h
};

// `scratch`: decode_scratch_floats(params) floats on the device.
int64_t decode_scratch_floats(const DecodeParams& params);
void decode(const DecodeParams& params, float* scratch, const Queue& queue);

void prefix(const PrefixParams& params, const Queue& queue);
void merge_partials(const MergeParams& params, const Queue& queue);
void store(const StoreParams& params, const Queue& queue);

// Block pairs[2i] to block pairs[2i + 1] within each cache, all sources as they were before the call; a later pair wins. Pairs
// that name no block are skipped and reported. `scratch`: copy_scratch_bytes(...) bytes on the device.
struct CacheBlocks {
  char* data;
  int64_t block_stride;  // bytes
  int64_t block_bytes;
  int64_t num_blocks;
};
int64_t copy_scratch_bytes(const CacheBlocks* caches, int64_t num_caches, int64_t num_pairs);
void copy_blocks(const CacheBlocks* caches, int64_t num_caches, const int64_t* pairs, int64_t num_pairs, char* scratch,
                 const Queue& queue);

void gather_blocks(const GatherParams& params, const Queue& queue);

// BlockTransfer::caches lies on the host. `scratch`: scatter_scratch_ints(transfer) ints on the device.
void pack_blocks(const BlockTransfer& transfer, const Queue& queue);
int64_t scatter_scratch_ints(const BlockTransfer& transfer);
void scatter_blocks(const BlockTransfer& transfer, int* scratch, const Queue& queue);

}  // namespace paged_attn::gpu
