// The vector of the instruction set this library is compiled for: kLanes floats, and the few operations that the kernels are
// written over. Three implementations of one interface; nothing above this file knows an intrinsic.
//
// Everything is internal to one library (built with hidden visibility), and multiply-add is fused exactly where it is
// written (the build says -ffp-contract=off), so that two instances of one loop give the same bits.
#pragma once

#include <cstddef>

#include "core/codec.h"
#include "core/portability.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

namespace paged_attn::cpu {

#if defined(__AVX512F__)

struct Vec {
  static constexpr int kLanes = 16;
  __m512 v;

  Vec() = default;
  explicit Vec(__m512 value) : v(value) {}
  explicit Vec(float value) : v(_mm512_set1_ps(value)) {}

  static Vec load(const float* p) { return Vec(_mm512_loadu_ps(p)); }
  static Vec load(const Float16* p) { return Vec(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))); }
  static Vec load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
  }
  // e5m2 is the upper byte of a float16.
  static Vec load(const Fp8E5M2* p) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    return Vec(_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8)));
  }
  // e4m3 read as a float16 of the same bits is 2^-8 of its value, subnormals included; the one NaN code needs setting.
  static Vec load(const Fp8E4M3* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));  // the sign fills the upper byte
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), _mm256_and_si256(wide, _mm256_set1_epi16(-0x8000)));
    const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    return Vec(_mm512_mask_blend_ps(is_nan, value, _mm512_set1_ps(__builtin_nanf(""))));
  }

  // The same 4 or 8 floats in each group of 4 or 8 lanes; all lanes for 16.
  template <int kPeriod>
  static Vec load_periodic(const float* p) {
    if constexpr (kPeriod == 4) return Vec(_mm512_broadcast_f32x4(_mm_loadu_ps(p)));
    if constexpr (kPeriod == 8) return Vec(_mm512_broadcast_f32x8(_mm256_loadu_ps(p)));
    return load(p);
  }

  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(Float16* p) const {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  friend Vec operator+(Vec a, Vec b) { return Vec(_mm512_add_ps(a.v, b.v)); }
  friend Vec operator-(Vec a, Vec b) { return Vec(_mm512_sub_ps(a.v, b.v)); }
  friend Vec operator*(Vec a, Vec b) { return Vec(_mm512_mul_ps(a.v, b.v)); }
  friend Vec operator/(Vec a, Vec b) { return Vec(_mm512_div_ps(a.v, b.v)); }
  friend Vec fma(Vec a, Vec b, Vec c) { return Vec(_mm512_fmadd_ps(a.v, b.v, c.v)); }
  friend Vec lane_max(Vec a, Vec b) { return Vec(_mm512_max_ps(a.v, b.v)); }
  friend Vec abs(Vec a) { return Vec(_mm512_abs_ps(a.v)); }
  friend Vec round_to_int(Vec a) { return Vec(_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
  // x * 2^n for integral n in [-126, 127].
  friend Vec scale_by_power(Vec x, Vec n) { return Vec(_mm512_scalef_ps(x.v, n.v)); }
  friend Vec select_less(Vec a, Vec b, Vec if_less, Vec otherwise) {
    return Vec(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, if_less.v));
  }
  friend Vec copy_sign(Vec magnitude, Vec sign) {
    const __m512i bit = _mm512_and_si512(_mm512_castps_si512(sign.v), _mm512_set1_epi32(int(0x80000000u)));
    return Vec(_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude.v), bit)));
  }
  // Sums of even and odd neighbours, of a then of b, within each 128 bits (the rule of SSE3's haddps).
  friend Vec pairwise_sum(Vec a, Vec b) {
    return Vec(_mm512_add_ps(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xdd)));
  }
  float reduce_sum() const { return _mm512_reduce_add_ps(v); }
  float reduce_max() const { return _mm512_reduce_max_ps(v); }
};

// `sums` holds, in each 128 bits, one partial sum for each of four vectors; kQuads such quadruples belong to one token. Adds
// them and stores the tokens in order: 4 * (4 / kQuads) floats.
template <int kQuads>
inline void store_token_sums(Vec sums, float* out) {
  if constexpr (kQuads == 1) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, sums.v));
  } else {
    __m512 total = _mm512_add_ps(sums.v, _mm512_shuffle_f32x4(sums.v, sums.v, 0xb1));
    if constexpr (kQuads == 2) {
      const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
      _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, total)));
    } else {
      total = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e));
      _mm_storeu_ps(out, _mm512_castps512_ps128(total));
    }
  }
}

#elif defined(__AVX2__)

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;

  Vec() = default;
  explicit Vec(__m256 value) : v(value) {}
  explicit Vec(float value) : v(_mm256_set1_ps(value)) {}

  static Vec load(const float* p) { return Vec(_mm256_loadu_ps(p)); }
  static Vec load(const Float16* p) { return Vec(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))); }
  static Vec load(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return Vec(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
  static Vec load(const Fp8E5M2* p) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return Vec(_mm256_cvtph_ps(_mm_slli_epi16(wide, 8)));
  }
  static Vec load(const Fp8E4M3* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_and_si128(wide, _mm_set1_epi16(-0x8000)));
    const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
    const __m256i is_nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)));
    return Vec(_mm256_blendv_ps(value, _mm256_set1_ps(__builtin_nanf("")), _mm256_castsi256_ps(is_nan)));
  }

  template <int kPeriod>
  static Vec load_periodic(const float* p) {
    if constexpr (kPeriod == 4) return Vec(_mm256_broadcast_ps((const __m128*)p));
    return load(p);
  }

  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(Float16* p) const {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  friend Vec operator+(Vec a, Vec b) { return Vec(_mm256_add_ps(a.v, b.v)); }
  friend Vec operator-(Vec a, Vec b) { return Vec(_mm256_sub_ps(a.v, b.v)); }
  friend Vec operator*(Vec a, Vec b) { return Vec(_mm256_mul_ps(a.v, b.v)); }
  friend Vec operator/(Vec a, Vec b) { return Vec(_mm256_div_ps(a.v, b.v)); }
  friend Vec fma(Vec a, Vec b, Vec c) { return Vec(_mm256_fmadd_ps(a.v, b.v, c.v)); }
  friend Vec lane_max(Vec a, Vec b) { return Vec(_mm256_max_ps(a.v, b.v)); }
  friend Vec abs(Vec a) { return Vec(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)); }
  friend Vec round_to_int(Vec a) { return Vec(_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
  friend Vec scale_by_power(Vec x, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return Vec(_mm256_mul_ps(x.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))));
  }
  friend Vec select_less(Vec a, Vec b, Vec if_less, Vec otherwise) {
    return Vec(_mm256_blendv_ps(otherwise.v, if_less.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)));
  }
  friend Vec copy_sign(Vec magnitude, Vec sign) {
    return Vec(_mm256_or_ps(magnitude.v, _mm256_and_ps(sign.v, _mm256_set1_ps(-0.0f))));
  }
  friend Vec pairwise_sum(Vec a, Vec b) { return Vec(_mm256_hadd_ps(a.v, b.v)); }
  float reduce_sum() const {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  float reduce_max() const {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
};

template <int kQuads>
inline void store_token_sums(Vec sums, float* out) {
  if constexpr (kQuads == 1) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(sums.v, order));
  } else {
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums.v), _mm256_extractf128_ps(sums.v, 1)));
  }
}

#else  // portable: four lanes of plain C++, which compilers turn into the baseline's vectors

struct Vec {
  static constexpr int kLanes = 4;
  typedef float Lanes __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  Lanes v;

  Vec() = default;
  explicit Vec(Lanes value) : v(value) {}
  explicit Vec(float value) : v(Lanes{value, value, value, value}) {}

  template <typename T>
  static Vec load(const T* p) {
    return Vec(Lanes{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])});
  }
  static Vec load(const float* p) {
    Vec result;
    memcpy(&result.v, p, sizeof result.v);
    return result;
  }

  template <int kPeriod>
  static Vec load_periodic(const float* p) {
    return load(p);
  }

  void store(float* p) const { memcpy(p, &v, sizeof v); }
  void store(Float16* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = from_float<Float16>(v[i]);
  }

  friend Vec operator+(Vec a, Vec b) { return Vec(a.v + b.v); }
  friend Vec operator-(Vec a, Vec b) { return Vec(a.v - b.v); }
  friend Vec operator*(Vec a, Vec b) { return Vec(a.v * b.v); }
  friend Vec operator/(Vec a, Vec b) { return Vec(a.v / b.v); }
  friend Vec fma(Vec a, Vec b, Vec c) { return Vec(a.v * b.v + c.v); }
  // Second operand where the comparison fails, NaN included: the rule of x86's maxps.
  friend Vec lane_max(Vec a, Vec b) { return select_less(b, a, a, b); }
  friend Vec abs(Vec a) { return Vec((Lanes)((Ints)a.v & 0x7fffffff)); }
  friend Vec round_to_int(Vec a) {  // for |a| < 2^22, which is all that exp needs
    const float magic = 12582912.0f;
    return Vec((a.v + magic) - magic);
  }
  friend Vec scale_by_power(Vec x, Vec n) {
    Ints exponent;
    for (int i = 0; i < kLanes; ++i) exponent[i] = int32_t(n.v[i]) + 127;
    return Vec(x.v * (Lanes)(exponent << 23));
  }
  friend Vec select_less(Vec a, Vec b, Vec if_less, Vec otherwise) {
    const Ints mask = a.v < b.v;
    return Vec((Lanes)((mask & (Ints)if_less.v) | (~mask & (Ints)otherwise.v)));
  }
  friend Vec copy_sign(Vec magnitude, Vec sign) {
    return Vec((Lanes)((Ints)magnitude.v | ((Ints)sign.v & int32_t(0x80000000u))));
  }
  friend Vec pairwise_sum(Vec a, Vec b) {
    return Vec(Lanes{a.v[0] + a.v[1], a.v[2] + a.v[3], b.v[0] + b.v[1], b.v[2] + b.v[3]});
  }
  float reduce_sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
  float reduce_max() const {
    float result = v[0];
    for (int i = 1; i < kLanes; ++i) result = v[i] > result ? v[i] : result;
    return result;
  }
};

template <int kQuads>
inline void store_token_sums(Vec sums, float* out) {
  sums.store(out);
}

#endif

// One element to float, by the instruction where there is one.
template <typename T>
inline float widen(T value) {
  return to_float(value);
}
#if defined(__F16C__)
inline float widen(Float16 value) { return _cvtsh_ss(value.bits); }
#endif

// Bfloat16 has no conversion instruction in the baseline sets; rounding in integers is the same everywhere.
inline void store_as(Vec value, float* p) { value.store(p); }
inline void store_as(Vec value, Float16* p) { value.store(p); }
inline void store_as(Vec value, BFloat16* p) {
  float lanes[Vec::kLanes];
  value.store(lanes);
  for (int i = 0; i < Vec::kLanes; ++i) p[i] = from_float<BFloat16>(lanes[i]);
}

// Four vectors to four sums in each 128 bits.
inline Vec quad_sums(const Vec a[4]) { return pairwise_sum(pairwise_sum(a[0], a[1]), pairwise_sum(a[2], a[3])); }

inline Vec iota() {
  alignas(64) static const float kIota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Vec::load(kIota);
}

// exp(x) to 1 ulp for x <= 88.3; 0 below -87.33, where the result would leave the normal range; -inf gives 0.
// Cody-Waite reduction and the degree-5 minimax polynomial of Cephes' expf (Moshier).
inline Vec lane_exp(Vec x) {
  const Vec lowest(-87.33654f), highest(88.3f);
  const Vec clamped = select_less(x, lowest, lowest, select_less(highest, x, highest, x));
  const Vec n = round_to_int(clamped * Vec(1.44269504f));
  Vec r = fma(n, Vec(-0.693359375f), clamped);
  r = fma(n, Vec(2.12194440e-4f), r);
  Vec p = fma(Vec(1.9875691500e-4f), r, Vec(1.3981999507e-3f));
  p = fma(p, r, Vec(8.3334519073e-3f));
  p = fma(p, r, Vec(4.1665795894e-2f));
  p = fma(p, r, Vec(1.6666665459e-1f));
  p = fma(p, r, Vec(5.0000001201e-1f));
  p = fma(p, r * r, r) + Vec(1.0f);
  return select_less(x, lowest, Vec(0.0f), scale_by_power(p, n));
}

inline Vec zero_where_empty(Vec max_logit, Vec value) {
  // -inf is the only float below the lowest finite one.
  return select_less(max_logit, Vec(-3.4028234e38f), Vec(0.0f), value);
}

// tanh(x) to 2 ulp: the odd polynomial of Cephes' tanhf near zero, 1 - 2 / (exp(2x) + 1) beyond.
inline Vec lane_tanh(Vec x) {
  const Vec magnitude = abs(x);
  const Vec z = x * x;
  Vec p = fma(Vec(-5.70498872745e-3f), z, Vec(2.06390887954e-2f));
  p = fma(p, z, Vec(-5.37397155531e-2f));
  p = fma(p, z, Vec(1.33314422036e-1f));
  p = fma(p, z, Vec(-3.33332819422e-1f));
  const Vec near = fma(p * z, x, x);
  const Vec far = Vec(1.0f) - Vec(2.0f) / (lane_exp(magnitude + magnitude) + Vec(1.0f));
  return select_less(magnitude, Vec(0.625f), near, copy_sign(far, x));
}

}  // namespace paged_attn::cpu
