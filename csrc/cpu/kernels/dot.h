// Dot products of query heads with 16 tokens of K as they lie in the cache.
//
// In layout x, the x dims of a dim group lie together and its tokens follow each other, so one vector covers several dims of
// several tokens, and a lane sums the dims that fall on it. Which dims those are is all that differs between element types: a
// policy below says it.
#pragma once

#include "cpu/kernels/vec.h"

namespace paged_attn::cpu {

constexpr int kChunkTokens = 16;

// x: dims that lie together.
template <typename T>
constexpr int kDimGroup = 16 / int(sizeof(T));

// Operands widened to float.
template <typename T>
struct FloatDot {
  using Key = T;
  using Query = float;
  static constexpr int kElements = Vec::kLanes;  // of K in one vector
  static constexpr int kLanesPerToken = kDimGroup<T> < Vec::kLanes ? kDimGroup<T> : Vec::kLanes;

  struct Operand {
    Vec v;
  };
  static Operand key(const Key* p) { return {Vec::load(p)}; }
  static Operand query(const Query* p) { return {Vec::load_periodic<kLanesPerToken>(p)}; }
  static Vec multiply_add(Operand q, Operand k, Vec sum) { return fma(q.v, k.v, sum); }
  static Query to_query(float value) { return value; }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16 products, exact, summed in float: one lane takes two dims of a token.
struct BFloat16Dot {
  using Key = BFloat16;
  using Query = BFloat16;
  static constexpr int kElements = 32;
  static constexpr int kLanesPerToken = 4;

  struct Operand {
    __m512bh v;
  };
  static Operand key(const Key* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
  static Operand query(const Query* p) { return {(__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))}; }
  static Vec multiply_add(Operand q, Operand k, Vec sum) { return Vec(_mm512_dpbf16_ps(sum.v, q.v, k.v)); }
  static Query to_query(float value) { return from_float<BFloat16>(value); }
};
#endif

// logits[h][t] = sum over dims of query[h][d] * key[t][d], for kHeads heads and a chunk of 16 tokens.
// query: [kHeads][dims], dims a multiple of x. key: x dims of 16 tokens at key + group * group_stride.
template <typename Dot, int kHeads>
inline void dot_chunk(const typename Dot::Query* query, int64_t dims, const typename Dot::Key* key, int64_t group_stride,
                      float* logits, int64_t logits_stride) {
  constexpr int kX = kDimGroup<typename Dot::Key>;
  constexpr int kVectorsPerToken = kX > Dot::kElements ? kX / Dot::kElements : 1;
  constexpr int kTokensPerVector = kX > Dot::kElements ? 1 : Dot::kElements / kX;
  constexpr int kTokens = 4 * kTokensPerVector;  // four sums per head: what quad_sums reduces at once
  static_assert(kChunkTokens % kTokens == 0, "a chunk is a whole number of token blocks");

  for (int token = 0; token < kChunkTokens; token += kTokens) {
    Vec sums[kHeads][4];
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < 4; ++i) sums[h][i] = Vec(0.0f);
    const typename Dot::Key* group = key + token * kX;
    for (int64_t d = 0; d < dims; d += kX, group += group_stride) {
#pragma GCC unroll 4
      for (int part = 0; part < kVectorsPerToken; ++part) {
        typename Dot::Operand k[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) k[i] = Dot::key(group + (i * kVectorsPerToken + part) * Dot::kElements);
#pragma GCC unroll 8
        for (int h = 0; h < kHeads; ++h) {
          const typename Dot::Operand q = Dot::query(query + h * dims + d + part * Dot::kElements);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sums[h][i] = Dot::multiply_add(q, k[i], sums[h][i]);
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      store_token_sums<Dot::kLanesPerToken / 4>(quad_sums(sums[h]), logits + h * logits_stride + token);
    }
  }
}

}  // namespace paged_attn::cpu
