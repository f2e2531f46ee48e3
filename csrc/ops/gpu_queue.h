// Where an operator's work goes: the device of its tensors, and the stream that the caller has made current there.
#pragma once

#include <ATen/core/Tensor.h>

#include "gpu/kernels.h"
#include "gpu/status.h"

// Only these headers of c10/cuda: those of ATen/cuda need libraries that a toolkit may lack.
#if !defined(PAGED_ATTN_SIMT)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace paged_attn::ops {

#if defined(PAGED_ATTN_SIMT)

#define PA_DEVICE_KEY CPU  // the host executor works on the host's tensors

class DeviceScope {
 public:
  explicit DeviceScope(c10::Device) {}
  gpu::Queue queue() const { return {gpu::platform::Stream{}, gpu::status_word()}; }
};

#else

#define PA_DEVICE_KEY CUDA

class DeviceScope {
 public:
  explicit DeviceScope(c10::Device device) : guard_(device) {}
  gpu::Queue queue() const { return {c10::cuda::getCurrentCUDAStream().stream(), gpu::status_word()}; }

 private:
  c10::cuda::CUDAGuard guard_;
};

#endif

}  // namespace paged_attn::ops
