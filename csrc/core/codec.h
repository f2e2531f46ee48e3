// Element types and their exact conversion to and from float, in integer arithmetic so that the result does not depend on
// the flush-to-zero mode of the thread. Vector code has faster forms; these are the definition they are tested against.
#pragma once

#include "core/portability.h"

namespace paged_attn {

enum class ElementType : int32_t { kFloat32, kFloat16, kBFloat16, kFp8E4M3, kFp8E5M2 };

constexpr bool is_fp8(ElementType type) { return type == ElementType::kFp8E4M3 || type == ElementType::kFp8E5M2; }

// Storage types: distinct, so that templates can be chosen by them.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Fp8E4M3 {
  uint8_t bits;
};
struct Fp8E5M2 {
  uint8_t bits;
};

// Calls f with a value of the storage type that `type` names.
template <typename F>
inline void with_type(ElementType type, F&& f) {
  switch (type) {
    case ElementType::kFloat32: return f(float{});
    case ElementType::kFloat16: return f(Float16{});
    case ElementType::kBFloat16: return f(BFloat16{});
    case ElementType::kFp8E4M3: return f(Fp8E4M3{});
    case ElementType::kFp8E5M2: return f(Fp8E5M2{});
  }
}

PA_HD float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

PA_HD uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A small float of 1 sign bit, `ExponentBits`, `MantissaBits`. `kHasInfinity`: IEEE rules (the top exponent holds infinity and
// NaN); otherwise the OCP "fn" rules (only the all-ones code is NaN, no infinity).
template <int ExponentBits, int MantissaBits, bool kHasInfinity>
struct SmallFloat {
  static constexpr int kBias = (1 << (ExponentBits - 1)) - 1;
  static constexpr int kTopExponent = (1 << ExponentBits) - 1;
  static constexpr uint32_t kMagnitudeMask = (1u << (ExponentBits + MantissaBits)) - 1;
  static constexpr uint32_t kNaN = kMagnitudeMask;
  // Largest finite magnitude code.
  static constexpr uint32_t kMax = kHasInfinity ? (uint32_t(kTopExponent) << MantissaBits) - 1 : kMagnitudeMask - 1;

  PA_HD static float decode(uint32_t code) {
    const uint32_t sign = ((code >> (ExponentBits + MantissaBits)) & 1u) << 31;
    const uint32_t magnitude = code & kMagnitudeMask;
    const int exponent = int(magnitude >> MantissaBits);
    uint32_t mantissa = magnitude & ((1u << MantissaBits) - 1);
    if (kHasInfinity ? exponent == kTopExponent : magnitude == kNaN) {
      // 0x7fc00000 | mantissa keeps a NaN a NaN whatever its payload; infinity has mantissa 0.
      const bool infinite = kHasInfinity && mantissa == 0;
      return bits_to_float(sign | (infinite ? 0x7f800000u : 0x7fc00000u | (mantissa << (23 - MantissaBits))));
    }
    if (exponent == 0) {
      if (mantissa == 0) return bits_to_float(sign);
      int shift = 0;  // normalise: every subnormal of these types is a normal float
      while (!(mantissa >> MantissaBits)) {
        mantissa <<= 1;
        ++shift;
      }
      mantissa &= (1u << MantissaBits) - 1;
      return bits_to_float(sign | (uint32_t(1 - kBias - shift + 127) << 23) | (mantissa << (23 - MantissaBits)));
    }
    return bits_to_float(sign | (uint32_t(exponent - kBias + 127) << 23) | (mantissa << (23 - MantissaBits)));
  }

  // Round to nearest, ties to even. `saturate`: beyond the largest finite value, infinity included, store that value (what fp8
  // caches do); otherwise overflow to infinity (what float16 does).
  PA_HD static uint32_t encode(float value, bool saturate) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t sign = (bits >> 31) << (ExponentBits + MantissaBits);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | kNaN;
    const int exponent = int(magnitude >> 23) - 127 + kBias;
    // Bits of the float's significand (24 with the hidden one) that do not fit; more of them below the normal range.
    const int dropped = (23 - MantissaBits) + (exponent < 1 ? 1 - exponent : 0);
    uint32_t code;
    if (dropped > 25) {
      code = 0;  // below half of the smallest subnormal
    } else {
      const uint32_t significand = (magnitude & 0x7fffffu) | (magnitude >> 23 ? 0x800000u : 0u);
      const uint32_t kept = dropped > 24 ? 0 : significand >> dropped;
      const uint32_t rest = significand & ((1u << dropped) - 1);
      const uint32_t half = 1u << (dropped - 1);
      const uint32_t rounded = kept + (rest > half || (rest == half && (kept & 1)));
      // `rounded` holds the hidden bit of a normal number, which adds one to the exponent field: hence exponent - 1. A carry
      // out of the mantissa, or out of the subnormals, moves to the next exponent by itself.
      code = rounded + (exponent < 1 ? 0u : uint32_t(exponent - 1) << MantissaBits);
    }
    if (code > kMax) code = saturate ? kMax : uint32_t(kTopExponent) << MantissaBits;
    return sign | code;
  }
};

using E4M3 = SmallFloat<4, 3, false>;
using E5M2 = SmallFloat<5, 2, true>;
using Half = SmallFloat<5, 10, true>;

PA_HD float to_float(float v) { return v; }
PA_HD float to_float(Float16 v) { return Half::decode(v.bits); }
PA_HD float to_float(BFloat16 v) { return bits_to_float(uint32_t(v.bits) << 16); }
PA_HD float to_float(Fp8E4M3 v) { return E4M3::decode(v.bits); }
PA_HD float to_float(Fp8E5M2 v) { return E5M2::decode(v.bits); }

template <typename T>
PA_HD T from_float(float value);
template <>
PA_HD float from_float<float>(float value) {
  return value;
}
template <>
PA_HD Float16 from_float<Float16>(float value) {
  return {uint16_t(Half::encode(value, false))};
}
template <>
PA_HD BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40u)};
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
PA_HD Fp8E4M3 from_float<Fp8E4M3>(float value) {
  return {uint8_t(E4M3::encode(value, true))};
}
template <>
PA_HD Fp8E5M2 from_float<Fp8E5M2>(float value) {
  return {uint8_t(E5M2::encode(value, true))};
}

}  // namespace paged_attn
