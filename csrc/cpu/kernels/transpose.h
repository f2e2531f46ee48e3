// Transposes in registers of 16 bytes: kTile rows of kTile elements, as many elements as a register holds.
//
// A register is as wide as the x of the cache layout, whatever the element, and interleaving is in every x86-64 processor's
// baseline, so there is one version for all instruction sets: wider ones would need 32 rows of V, twice the block that most
// caches have.
#pragma once

#include <cstddef>

#include "core/portability.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace paged_attn::cpu {

constexpr int64_t kRegisterBytes = 16;

#if defined(__SSE2__)

using Register = __m128i;

// Elements of the lower (upper) halves of a and b in turns.
template <size_t kElementBytes>
inline Register interleave_low(Register a, Register b) {
  if constexpr (kElementBytes == 1) return _mm_unpacklo_epi8(a, b);
  if constexpr (kElementBytes == 2) return _mm_unpacklo_epi16(a, b);
  if constexpr (kElementBytes == 4) return _mm_unpacklo_epi32(a, b);
}
template <size_t kElementBytes>
inline Register interleave_high(Register a, Register b) {
  if constexpr (kElementBytes == 1) return _mm_unpackhi_epi8(a, b);
  if constexpr (kElementBytes == 2) return _mm_unpackhi_epi16(a, b);
  if constexpr (kElementBytes == 4) return _mm_unpackhi_epi32(a, b);
}

#else

struct Register {
  char bytes[kRegisterBytes];
};

template <size_t kElementBytes>
inline Register interleave(const char* a, const char* b) {
  Register result;
  for (size_t i = 0; i < kRegisterBytes / 2; i += kElementBytes) {
    memcpy(result.bytes + 2 * i, a + i, kElementBytes);
    memcpy(result.bytes + 2 * i + kElementBytes, b + i, kElementBytes);
  }
  return result;
}
template <size_t kElementBytes>
inline Register interleave_low(Register a, Register b) {
  return interleave<kElementBytes>(a.bytes, b.bytes);
}
template <size_t kElementBytes>
inline Register interleave_high(Register a, Register b) {
  return interleave<kElementBytes>(a.bytes + kRegisterBytes / 2, b.bytes + kRegisterBytes / 2);
}

#endif

// to[j * to_stride + i] = from[i * from_stride + j] for i < kTile, j < columns <= kTile; reads and writes nothing else.
// Interleaving row i with row i + kTile / 2 rotates the bits of an element's place (row, column) by one; log2(kTile) rounds
// exchange row and column.
template <typename T>
inline void transpose_tile(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t columns) {
  constexpr int kTile = kRegisterBytes / sizeof(T);
  Register rows[kTile];
  if (columns == kTile) {
    for (int i = 0; i < kTile; ++i) memcpy(&rows[i], from + i * from_stride, kRegisterBytes);
  } else {
    memset(rows, 0, sizeof rows);
    for (int i = 0; i < kTile; ++i) memcpy(&rows[i], from + i * from_stride, size_t(columns) * sizeof(T));
  }
  for (int round = 1; round < kTile; round *= 2) {
    Register next[kTile];
    for (int i = 0; i < kTile / 2; ++i) {
      next[2 * i] = interleave_low<sizeof(T)>(rows[i], rows[i + kTile / 2]);
      next[2 * i + 1] = interleave_high<sizeof(T)>(rows[i], rows[i + kTile / 2]);
    }
    memcpy(rows, next, sizeof rows);
  }
  if (columns == kTile) {
    for (int j = 0; j < kTile; ++j) memcpy(to + j * to_stride, &rows[j], kRegisterBytes);
  } else {
    for (int64_t j = 0; j < columns; ++j) memcpy(to + j * to_stride, &rows[j], kRegisterBytes);
  }
}

}  // namespace paged_attn::cpu
