// Moving elements without looking at them, in registers of 16 bytes: as many elements as the x of the cache layout, whatever
// their type. Transposes, and stores past the caches.
//
// What this takes is in every x86-64 processor's baseline, so there is one version for all instruction sets. Wider registers
// would want 32 tokens of V in a row, twice the block that most caches have, and the memory is what bounds these copies.
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

// At any address.
inline Register load(const void* from) { return _mm_loadu_si128(static_cast<const Register*>(from)); }
inline void store(Register value, void* to) { _mm_storeu_si128(static_cast<Register*>(to), value); }

// A store to 16-byte-aligned memory that the caches need not fetch first, best by whole lines. Others see it after
// finish_streaming().
inline void stream(Register value, void* to) { _mm_stream_si128(static_cast<Register*>(to), value); }
inline void finish_streaming() { _mm_sfence(); }

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

inline Register load(const void* from) {
  Register value;
  memcpy(&value, from, kRegisterBytes);
  return value;
}
inline void store(Register value, void* to) { memcpy(to, &value, kRegisterBytes); }
inline void stream(Register value, void* to) { store(value, to); }
inline void finish_streaming() {}

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

// Copies a register's bytes, streaming where asked to.
template <bool kStream>
inline void copy_register(const void* from, void* to) {
  if constexpr (kStream) {
    stream(load(from), to);
  } else {
    store(load(from), to);
  }
}

// to[j * to_stride + i] = from[i * from_stride + j] for i, j < kTile = kRegisterBytes / sizeof(T).
// Interleaving row i with row i + kTile / 2 rotates the bits of an element's place (row, column) by one; log2(kTile) rounds
// exchange row and column.
template <typename T>
inline void transpose_tile(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  constexpr int kTile = kRegisterBytes / sizeof(T);
  Register rows[kTile];
  for (int i = 0; i < kTile; ++i) rows[i] = load(from + i * from_stride);
  for (int round = 1; round < kTile; round *= 2) {
    Register next[kTile];
    for (int i = 0; i < kTile / 2; ++i) {
      next[2 * i] = interleave_low<sizeof(T)>(rows[i], rows[i + kTile / 2]);
      next[2 * i + 1] = interleave_high<sizeof(T)>(rows[i], rows[i + kTile / 2]);
    }
    for (int i = 0; i < kTile; ++i) rows[i] = next[i];
  }
  for (int j = 0; j < kTile; ++j) store(rows[j], to + j * to_stride);
}

// The same for j < columns alone, of which nothing else is read or written. A branch in the whole tile would keep its rows in
// memory.
template <typename T>
inline void transpose_columns(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t columns) {
  constexpr int kTile = kRegisterBytes / sizeof(T);
  T tile[kTile * kTile] = {}, transposed[kTile * kTile];
  for (int i = 0; i < kTile; ++i) memcpy(tile + i * kTile, from + i * from_stride, size_t(columns) * sizeof(T));
  transpose_tile(tile, kTile, transposed, kTile);
  for (int64_t j = 0; j < columns; ++j) store(load(transposed + j * kTile), to + j * to_stride);
}

}  // namespace paged_attn::cpu
