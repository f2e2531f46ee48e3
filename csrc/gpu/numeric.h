// Storage types to and from float on the device: exact, as the codecs in core/ define them, in fewer instructions.
#pragma once

#include "core/codec.h"
#include "gpu/platform/platform.h"

namespace paged_attn::gpu {

PA_DEVICE float widen(float value) { return value; }
PA_DEVICE float widen(Float16 value) { return platform::half_to_float(value.bits); }
PA_DEVICE float widen(BFloat16 value) { return to_float(value); }
// The top byte of a half: the same exponent field, two of its ten mantissa bits.
PA_DEVICE float widen(Fp8E5M2 value) { return platform::half_to_float(uint16_t(value.bits << 8)); }
// One exponent bit and seven mantissa bits fewer than a half: the code, shifted to the half's mantissa, is a half 2^8 too
// small, subnormals included. Only the all-ones code is NaN.
PA_DEVICE float widen(Fp8E4M3 value) {
  const unsigned magnitude = value.bits & 0x7fu;
  const uint16_t half = uint16_t((value.bits & 0x80u) << 8 | (magnitude == 0x7fu ? 0x7e00u : magnitude << 7));
  return platform::half_to_float(half) * 256.0f;
}

template <typename T>
PA_DEVICE T narrow(float value) {
  return from_float<T>(value);
}
template <>
PA_DEVICE Float16 narrow<Float16>(float value) {
  return {platform::float_to_half(value)};
}

}  // namespace paged_attn::gpu
