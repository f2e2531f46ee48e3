// The platform functions (csrc/gpu/platform/platform.h) over the host executor, for warps of PAGED_ATTN_SIMT_LANES lanes.
#pragma once

#include <string>
#include <tuple>

#include "core/codec.h"
#include "simt/executor.h"

#define PA_DEVICE inline
#define PA_DEVICE_VARIABLE
#define PA_KERNEL(max_threads, min_blocks) void

namespace paged_attn::gpu::platform {

constexpr int kWarpLanes = PAGED_ATTN_SIMT_LANES;
// 64 lanes stand for CoreX, with its narrow loads.
constexpr int kLoadBytes = kWarpLanes == 64 ? 4 : 16;

PA_DEVICE int thread_index() { return simt::thread_index(); }
PA_DEVICE int64_t block_index() { return simt::block_index(); }
PA_DEVICE int64_t num_blocks() { return simt::num_blocks(); }
PA_DEVICE void block_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::block_barrier({file, line});
}

template <int Width, typename T>
PA_DEVICE T exchange(simt::Shuffle kind, T value, int argument, simt::Site site) {
  static_assert(sizeof(T) == 4, "shuffles move 32 bits");
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = simt::shuffle(kind, bits, argument, Width, site);
  memcpy(&value, &bits, 4);
  return value;
}
template <int Width, typename T>
PA_DEVICE T shuffle_xor(T value, int mask, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return exchange<Width>(simt::Shuffle::kXor, value, mask, {file, line});
}
template <int Width, typename T>
PA_DEVICE T shuffle_up(T value, int distance, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return exchange<Width>(simt::Shuffle::kUp, value, distance, {file, line});
}
template <int Width, typename T>
PA_DEVICE T shuffle(T value, int lane, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return exchange<Width>(simt::Shuffle::kIndex, value, lane, {file, line});
}

template <typename T>
PA_DEVICE T* shared_array(int64_t offset, int64_t count) {
  return static_cast<T*>(simt::shared_array(offset, count * int64_t(sizeof(T))));
}

PA_DEVICE void check_aligned(const void* pointer, int bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % uintptr_t(bytes)) {
    simt::violation("a packet of " + std::to_string(bytes) + " bytes is not aligned");
  }
}
template <int Bytes>
PA_DEVICE Packet<Bytes> load(const void* pointer) {
  check_aligned(pointer, Bytes);
  Packet<Bytes> packet;
  memcpy(&packet, pointer, Bytes);
  return packet;
}
template <int Bytes>
PA_DEVICE Packet<Bytes> load_shared(const void* pointer) {
  return load<Bytes>(pointer);
}
template <int Bytes>
PA_DEVICE void store(void* pointer, const Packet<Bytes>& packet) {
  check_aligned(pointer, Bytes);
  memcpy(pointer, &packet, Bytes);
}

PA_DEVICE float half_to_float(uint16_t bits) { return to_float(Float16{bits}); }
PA_DEVICE uint16_t float_to_half(float value) { return from_float<Float16>(value).bits; }

PA_DEVICE void set_if_zero(int* word, int value) {
  int zero = 0;
  __atomic_compare_exchange_n(word, &zero, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

PA_DEVICE void raise_to(int* word, int value) {
  int seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

// The host half.

struct Stream {};

inline DeviceFacts device_facts() { return {4, kWarpLanes, 0, 48 * 1024}; }

template <typename T>
T* device_address(T* variable) {
  return variable;
}

template <typename... Parameters>
int max_resident_blocks(void (*)(Parameters...), const LaunchShape&, const char*) {
  return 1;
}

template <typename... Parameters>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, Stream,
            const Parameters&... parameters) {
  if (shape.blocks == 0) return;
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  };
  const Call call{kernel, {parameters...}};
  const auto body = [](const void* argument) {
    const Call& call = *static_cast<const Call*>(argument);
    std::apply(call.kernel, call.parameters);
  };
  simt::run({name, shape.blocks, shape.threads, shape.shared_bytes, kWarpLanes}, body, &call);
}

inline void copy(void* to, const void* from, int64_t bytes, Stream) { memcpy(to, from, size_t(bytes)); }
inline void synchronize(Stream) {}

}  // namespace paged_attn::gpu::platform
