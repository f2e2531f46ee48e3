// From q.k to the softmax, in the order of the contract: scale, soft cap, ALiBi, masks. Written once for all kernels.
#pragma once

#include "core/even_share.h"
#include "core/params.h"

namespace paged_attn {

PA_HD float lane_tanh(float x) { return tanhf(x); }

// The logit before masks. `distance` is k_pos - q_pos; `scale` holds the K cache's scale too.
template <typename Lane>
PA_HD Lane logit(Lane dot, float scale, float soft_cap, float alibi_slope, Lane distance) {
  Lane value = dot * Lane(scale);
  if (soft_cap != 0.0f) value = lane_tanh(value * Lane(1.0f / soft_cap)) * Lane(soft_cap);
  if (alibi_slope != 0.0f) value = value + Lane(alibi_slope) * distance;
  return value;
}

PA_HD float alibi_slope(const LogitParams& params, int64_t head) {
  return params.alibi_slopes ? params.alibi_slopes[head] : 0.0f;
}

// Keys [begin, end) that the causal rule and the window leave to a query; block-sparse rows may have holes in it.
PA_HD Range visible_range(const LogitParams& params, int64_t query_position) {
  const int64_t end = query_position + 1;
  const int64_t begin = params.window > 0 && params.window < end ? end - params.window : 0;
  return {begin, end};
}

PA_HD bool is_block_sparse(const LogitParams& params) { return params.sparse.vert_stride > 1; }

// The block-sparse rule for a key inside visible_range().
PA_HD bool sparse_visible(const BlockSparse& sparse, int64_t num_heads, int64_t num_kv_heads, int64_t head,
                          int64_t query_position, int64_t key_position) {
  const int64_t query_block = query_position / sparse.block_size;
  const int64_t key_block = key_position / sparse.block_size;
  if (key_block > query_block - sparse.local_blocks) return true;
  const int64_t kv_head = head / (num_heads / num_kv_heads);
  const int64_t slide = sparse.head_sliding_step >= 0 ? (sparse.tp_rank * num_heads + head) * sparse.head_sliding_step
                                                      : (sparse.tp_rank * num_kv_heads + kv_head) * -sparse.head_sliding_step;
  return (key_block + slide + 1) % sparse.vert_stride == 0;
}

PA_HD bool is_visible(const AttentionParams& params, int64_t head, int64_t query_position, int64_t key_position) {
  const Range range = visible_range(params.logits, query_position);
  if (key_position < range.begin || key_position >= range.end) return false;
  return !is_block_sparse(params.logits) ||
         sparse_visible(params.logits.sparse, params.num_heads, params.num_kv_heads, head, query_position, key_position);
}

}  // namespace paged_attn
