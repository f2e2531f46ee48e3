// The functions behind the schemas, the same for every backend: they gather arguments into structs and hand them to
// `Backend`, a struct of static functions decode, prefix, merge, store, gather, pack, scatter, copy_blocks and swap_blocks.
#pragma once

#include "ops/arguments.h"
#include "ops/namespace.h"

namespace paged_attn::ops {

template <typename Backend>
struct EntryPoints {
  static void paged_attention_v1(const at::Tensor& out, const at::Tensor& query, const at::Tensor& key_cache,
                                 const at::Tensor& value_cache, int64_t num_kv_heads, double scale,
                                 const at::Tensor& block_tables, const at::Tensor& seq_lens, int64_t block_size,
                                 int64_t max_seq_len, const OptionalTensor& alibi_slopes, const std::string& kv_cache_dtype,
                                 double k_scale, double v_scale, int64_t tp_rank, int64_t blocksparse_local_blocks,
                                 int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                                 int64_t blocksparse_head_sliding_step, const OptionalTensor& k_scales,
                                 const OptionalTensor& v_scales) {
    const DecodeArguments arguments{out,
                                    query,
                                    key_cache,
                                    value_cache,
                                    num_kv_heads,
                                    scale,
                                    block_tables,
                                    seq_lens,
                                    block_size,
                                    max_seq_len,
                                    alibi_slopes,
                                    kv_cache_dtype,
                                    k_scale,
                                    v_scale,
                                    tp_rank,
                                    blocksparse_local_blocks,
                                    blocksparse_vert_stride,
                                    blocksparse_block_size,
                                    blocksparse_head_sliding_step,
                                    k_scales,
                                    v_scales};
    Backend::decode("paged_attention_v1", arguments, nullptr);
  }

  static void paged_attention_v2(const at::Tensor& out, const at::Tensor& exp_sums, const at::Tensor& max_logits,
                                 const at::Tensor& tmp_out, const at::Tensor& query, const at::Tensor& key_cache,
                                 const at::Tensor& value_cache, int64_t num_kv_heads, double scale,
                                 const at::Tensor& block_tables, const at::Tensor& seq_lens, int64_t block_size,
                                 int64_t max_seq_len, const OptionalTensor& alibi_slopes, const std::string& kv_cache_dtype,
                                 double k_scale, double v_scale, int64_t tp_rank, int64_t blocksparse_local_blocks,
                                 int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                                 int64_t blocksparse_head_sliding_step, const OptionalTensor& k_scales,
                                 const OptionalTensor& v_scales) {
    const DecodeArguments arguments{out,
                                    query,
                                    key_cache,
                                    value_cache,
                                    num_kv_heads,
                                    scale,
                                    block_tables,
                                    seq_lens,
                                    block_size,
                                    max_seq_len,
                                    alibi_slopes,
                                    kv_cache_dtype,
                                    k_scale,
                                    v_scale,
                                    tp_rank,
                                    blocksparse_local_blocks,
                                    blocksparse_vert_stride,
                                    blocksparse_block_size,
                                    blocksparse_head_sliding_step,
                                    k_scales,
                                    v_scales};
    const PartitionArguments partitions{exp_sums, max_logits, tmp_out};
    Backend::decode("paged_attention_v2", arguments, &partitions);
  }

  static void prefix_attention(const at::Tensor& out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& block_tables,
                               const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& context_lens,
                               int64_t max_query_len, double scale, const OptionalTensor& alibi_slopes,
                               c10::optional<int64_t> sliding_window, const std::string& kv_cache_dtype, double k_scale,
                               double v_scale, c10::optional<double> logits_soft_cap, const OptionalTensor& sinks,
                               const OptionalTensor& lse, const OptionalTensor& k_scales, const OptionalTensor& v_scales,
                               const std::string& precision) {
    Backend::prefix(
        "prefix_attention",
        {out,      query,           key,           value, key_cache,    value_cache,    block_tables,   query_start_loc,
         seq_lens, context_lens,    max_query_len, scale, alibi_slopes, sliding_window, kv_cache_dtype, k_scale,
         v_scale,  logits_soft_cap, sinks,         lse,   k_scales,     v_scales,       precision});
  }

  static void merge_attn_states(const at::Tensor& out, const OptionalTensor& out_lse, const at::Tensor& prefix_out,
                                const at::Tensor& prefix_lse, const at::Tensor& suffix_out, const at::Tensor& suffix_lse) {
    Backend::merge("merge_attn_states", {out, out_lse, prefix_out, prefix_lse, suffix_out, suffix_lse});
  }

  static void reshape_and_cache(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
                                const at::Tensor& value_cache, const at::Tensor& slot_mapping,
                                const std::string& kv_cache_dtype, double k_scale, double v_scale,
                                const OptionalTensor& k_scales, const OptionalTensor& v_scales) {
    Backend::store("reshape_and_cache",
                   {key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, k_scales, v_scales});
  }

  static void gather_blocks(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
                            const at::Tensor& value_cache, const at::Tensor& block_table, const std::string& kv_cache_dtype,
                            double k_scale, double v_scale, const OptionalTensor& k_scales, const OptionalTensor& v_scales) {
    Backend::gather("gather_blocks",
                    {key, value, key_cache, value_cache, block_table, kv_cache_dtype, k_scale, v_scale, k_scales, v_scales});
  }

  static void pack_blocks(const at::Tensor& buffer, at::TensorList caches, const at::Tensor& block_ids) {
    Backend::pack("pack_blocks", transfer_call("pack_blocks", Direction::kPack, caches, buffer, block_ids));
  }

  static void scatter_blocks(at::TensorList caches, const at::Tensor& buffer, const at::Tensor& block_ids) {
    Backend::scatter("scatter_blocks", transfer_call("scatter_blocks", Direction::kScatter, caches, buffer, block_ids));
  }

  static void copy_blocks(at::TensorList key_caches, at::TensorList value_caches, const at::Tensor& block_mapping) {
    Backend::copy_blocks("copy_blocks", key_caches, value_caches, block_mapping);
  }

  static void swap_blocks(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& block_mapping) {
    Backend::swap_blocks("swap_blocks", src, dst, block_mapping);
  }

  static void register_all(torch::Library& m) {
    m.impl("paged_attention_v1", paged_attention_v1);
    m.impl("paged_attention_v2", paged_attention_v2);
    m.impl("prefix_attention", prefix_attention);
    m.impl("merge_attn_states", merge_attn_states);
    m.impl("reshape_and_cache", reshape_and_cache);
    m.impl("gather_blocks", gather_blocks);
    m.impl("pack_blocks", pack_blocks);
    m.impl("scatter_blocks", scatter_blocks);
    m.impl("copy_blocks", copy_blocks);
    m.impl("swap_blocks", swap_blocks);
  }
};

}  // namespace paged_attn::ops
