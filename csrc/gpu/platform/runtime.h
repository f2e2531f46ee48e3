// Streams and copies, for CUDA and CoreX: what the registration needs of the platform, so any C++ compiler reads it. CoreX
// offers the CUDA 10.2 runtime: nothing newer is used here or in launch.h.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace paged_attn::gpu::platform {

using Stream = cudaStream_t;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Between any two of device and host memory, in stream order.
inline void copy(void* to, const void* from, int64_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, stream), "copy");
}

inline void synchronize(Stream stream) { check(cudaStreamSynchronize(stream), "synchronize"); }

}  // namespace paged_attn::gpu::platform
