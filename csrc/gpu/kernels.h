// The boundary between csrc/ops, which knows torch, and the GPU kernels, which do not: one function per operator, on the host.
// All work is queued on the stream; nothing waits. A launch that the runtime refuses throws std::runtime_error.
#pragma once

#include "core/params.h"
#include "gpu/platform/platform.h"

namespace paged_attn::gpu {

struct Queue {
  platform::Stream stream;
  int* status;  // a word on the device; see status.h
};

void merge_partials(const MergeParams& params, const Queue& queue);

}  // namespace paged_attn::gpu
