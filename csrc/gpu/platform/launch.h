// Launches and what they depend on, for CUDA and CoreX: host code that only the device's compiler reads.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "gpu/platform/runtime.h"

namespace paged_attn::gpu::platform {

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

}  // namespace paged_attn::gpu::platform
