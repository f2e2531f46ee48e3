// C += A . B on small tiles in the cache, the inner product of the prefix kernel: A [rows][depth], B packed in panels, C
// [rows][columns].
//
// B is packed in panels of kPanel columns, panel after panel, each [depth][kPanel]: one pass over a panel reads straight on.
// Every element of C is the sum over one block of depth, ascending, added to C: its bits do not depend on how many rows
// or columns are computed beside it.
#pragma once

#include <algorithm>

#include "cpu/kernels/vec.h"

namespace paged_attn::cpu {

// Sums that stay in registers: rows x vectors of columns, beside the vectors of B and one of A. 6 x 4 of 32; 6 x 2 of 16; 2
// x 4.
struct ProductShape {
  int rows;
  int vectors;
};
constexpr ProductShape kProductShape = Vec::kLanes == 16  ? ProductShape{6, 4}
                                       : Vec::kLanes == 8 ? ProductShape{6, 2}
                                                          : ProductShape{2, 4};
constexpr int kPanel = kProductShape.vectors * Vec::kLanes;

// Longest run of terms in one sum before it is added to C: the rounding error grows with the length of a run, not of the depth.
constexpr int64_t kDepthBlock = 64;

// Operands as they are multiplied: a panel row holds kPanel columns of kDepthPerStep depths.
struct FloatProduct {
  using Element = float;
  static constexpr int kDepthPerStep = 1;
  struct Operand {
    Vec v;
  };
  static Operand broadcast(const Element* p) { return {Vec(*p)}; }
  static Operand load(const Element* p) { return {Vec::load(p)}; }
  static Vec multiply_add(Operand a, Operand b, Vec sum) { return fma(a.v, b.v, sum); }
  static Element to_element(float value) { return value; }
};

#if defined(__AVX512BF16__)
// Pairs of depths lie together, in A and in B.
struct BFloat16Product {
  using Element = BFloat16;
  static constexpr int kDepthPerStep = 2;
  struct Operand {
    __m512bh v;
  };
  static Operand broadcast(const Element* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    // Not set1: clang 16 crashes on it here (VectorCombine, without end).
    return {(__m512bh)_mm512_broadcastd_epi32(_mm_cvtsi32_si128(pair))};
  }
  static Operand load(const Element* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
  static Vec multiply_add(Operand a, Operand b, Vec sum) { return Vec(_mm512_dpbf16_ps(sum.v, a.v, b.v)); }
  static Element to_element(float value) { return from_float<BFloat16>(value); }
};
#endif

// Where element (depth, column) of B lies in its packed form of `depths` (a multiple of kDepthPerStep) rows.
template <typename Product>
inline int64_t packed_offset(int64_t depth, int64_t column, int64_t depths) {
  constexpr int kStep = Product::kDepthPerStep;
  return column / kPanel * kPanel * depths + (depth / kStep * kPanel + column % kPanel) * kStep + depth % kStep;
}

// c[r][column] += sum of `depths` terms, for kRows rows and one panel.
template <typename Product, int kRows>
inline void product_block(const typename Product::Element* a, int64_t a_stride, const typename Product::Element* panel,
                          int64_t depths, float* c, int64_t c_stride) {
  constexpr int kVectors = kProductShape.vectors;
  constexpr int kStep = Product::kDepthPerStep;
  Vec sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) sums[r][i] = Vec(0.0f);
  for (int64_t d = 0; d < depths; d += kStep) {
    typename Product::Operand b[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) b[i] = Product::load(panel + d * kPanel + i * Vec::kLanes * kStep);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const typename Product::Operand broadcast = Product::broadcast(a + r * a_stride + d);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sums[r][i] = Product::multiply_add(broadcast, b[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      float* to = c + r * c_stride + i * Vec::kLanes;
      (Vec::load(to) + sums[r][i]).store(to);
    }
}

// The last rows of a tile, fewer than a full block.
template <typename Product, int kRows>
inline void product_rest(int64_t rows, const typename Product::Element* a, int64_t a_stride,
                         const typename Product::Element* panel, int64_t depths, float* c, int64_t c_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return product_block<Product, kRows>(a, a_stride, panel, depths, c, c_stride);
    product_rest<Product, kRows - 1>(rows, a, a_stride, panel, depths, c, c_stride);
  }
}

// depths: a multiple of kDepthPerStep; columns: a multiple of kPanel. `packed_depths`: those that B was packed with.
template <typename Product>
inline void tile_product(const typename Product::Element* a, int64_t a_stride, const typename Product::Element* b,
                         int64_t packed_depths, float* c, int64_t c_stride, int64_t rows, int64_t columns, int64_t depths) {
  constexpr int kRows = kProductShape.rows;
  for (int64_t column = 0; column < columns; column += kPanel) {
    for (int64_t depth = 0; depth < depths; depth += kDepthBlock) {  // this block of the panel stays in the first-level cache
      const int64_t block = std::min(kDepthBlock, depths - depth);
      const typename Product::Element* panel = b + column * packed_depths + depth * kPanel;
      int64_t r = 0;
      for (; r + kRows <= rows; r += kRows) {
        product_block<Product, kRows>(a + r * a_stride + depth, a_stride, panel, block, c + r * c_stride + column, c_stride);
      }
      product_rest<Product, kRows - 1>(rows - r, a + r * a_stride + depth, a_stride, panel, block, c + r * c_stride + column,
                                       c_stride);
    }
  }
}

}  // namespace paged_attn::cpu
