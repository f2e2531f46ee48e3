// Every operator schema, in one place. Names, order and defaults of v1 and v2 are vLLM 0.6.3's; what it does not have comes
// after, as keywords. Everything returns (): an operator that returned its mutated argument could not be functionalised by
// torch.compile.

#include "ops/namespace.h"

PA_LIBRARY(m) {
  m.def(
      "paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, "
      "Tensor block_tables, Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes=None, "
      "str kv_cache_dtype=\"auto\", float k_scale=1.0, float v_scale=1.0, int tp_rank=0, int blocksparse_local_blocks=0, "
      "int blocksparse_vert_stride=0, int blocksparse_block_size=64, int blocksparse_head_sliding_step=0, *, "
      "Tensor? k_scales=None, Tensor? v_scales=None) -> ()");
  m.def(
      "paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, Tensor query, "
      "Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, "
      "int block_size, int max_seq_len, Tensor? alibi_slopes=None, str kv_cache_dtype=\"auto\", float k_scale=1.0, "
      "float v_scale=1.0, int tp_rank=0, int blocksparse_local_blocks=0, int blocksparse_vert_stride=0, "
      "int blocksparse_block_size=64, int blocksparse_head_sliding_step=0, *, Tensor? k_scales=None, "
      "Tensor? v_scales=None) -> ()");
  m.def(
      "prefix_attention(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
      "Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, Tensor context_lens, int max_query_len, float scale, "
      "Tensor? alibi_slopes=None, int? sliding_window=None, str kv_cache_dtype=\"auto\", float k_scale=1.0, "
      "float v_scale=1.0, float? logits_soft_cap=None, Tensor? sinks=None, Tensor(b!)? lse=None, *, Tensor? k_scales=None, "
      "Tensor? v_scales=None, str precision=\"default\") -> ()");
  m.def(
      "merge_attn_states(Tensor(a!) out, Tensor(b!)? out_lse, Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, "
      "Tensor suffix_lse) -> ()");
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "str kv_cache_dtype=\"auto\", float k_scale=1.0, float v_scale=1.0, *, Tensor? k_scales=None, "
      "Tensor? v_scales=None) -> ()");
  m.def(
      "gather_blocks(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "str kv_cache_dtype=\"auto\", float k_scale=1.0, float v_scale=1.0, *, Tensor? k_scales=None, "
      "Tensor? v_scales=None) -> ()");
  m.def("pack_blocks(Tensor(a!) buffer, Tensor[] caches, Tensor block_ids) -> ()");
  m.def("scatter_blocks(Tensor(a!)[] caches, Tensor buffer, Tensor block_ids) -> ()");
  m.def("copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()");
}
