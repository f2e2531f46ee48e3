// The host half that CUDA and CoreX share: CoreX offers the CUDA 10.2 runtime, so nothing newer is used here.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace paged_attn::gpu::platform {

using Stream = cudaStream_t;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "the current device");
  check(cudaDeviceGetAttribute(&value, which, device), "a device attribute");
  return value;
}

// Of the current device, which the caller has set.
inline DeviceFacts device_facts() {
  // Opt-in sizes beyond 48 KiB are asked for where the driver offers them; where it answers 0 or an error, the default stands.
  int device = 0, opt_in = 0;
  check(cudaGetDevice(&device), "the current device");
  if (cudaDeviceGetAttribute(&opt_in, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    cudaGetLastError();
    opt_in = 0;
  }
  return {attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrWarpSize),
          10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
          std::max(opt_in, attribute(cudaDevAttrMaxSharedMemoryPerBlock))};
}

constexpr int64_t kDefaultSharedBytes = 48 * 1024;

// Kernels may use more shared memory than the default only after saying so.
template <typename... Parameters>
void allow_shared(void (*kernel)(Parameters...), int64_t bytes, const char* name) {
  if (bytes <= kDefaultSharedBytes) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
        name);
}

template <typename... Parameters>
int max_resident_blocks(void (*kernel)(Parameters...), const LaunchShape& shape, const char* name) {
  allow_shared(kernel, shape.shared_bytes, name);
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, shape.threads, size_t(shape.shared_bytes)), name);
  return std::max(blocks, 1);
}

// Throws std::runtime_error that names the kernel and the launch where the runtime refuses it. Does not wait.
template <typename... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, Stream stream,
            const Parameters&... parameters) {
  if (shape.blocks == 0) return;
  const std::string what = std::string(name) + " with " + std::to_string(shape.blocks) + " blocks of " +
                           std::to_string(shape.threads) + " threads and " + std::to_string(shape.shared_bytes) +
                           " bytes of shared memory";
  allow_shared(kernel, shape.shared_bytes, what.c_str());
  kernel<<<dim3(unsigned(shape.blocks)), dim3(unsigned(shape.threads)), size_t(shape.shared_bytes), stream>>>(parameters...);
  check(cudaGetLastError(), what.c_str());
}

// Of a PA_DEVICE_VARIABLE, on the current device.
template <typename T>
T* device_address(T* variable) {
  void* address = nullptr;
  check(cudaGetSymbolAddress(&address, *variable), "the address of a device variable");
  return static_cast<T*>(address);
}

// Between any two of device and host memory, in stream order.
inline void copy(void* to, const void* from, int64_t bytes, Stream stream) {
  check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, stream), "copy");
}

inline void synchronize(Stream stream) { check(cudaStreamSynchronize(stream), "synchronize"); }

}  // namespace paged_attn::gpu::platform
