// The CPU key: value checks that need the data, then the kernels.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cpu/block_copy.h"
#include "ops/arguments.h"
#include "ops/cpu_kernels.h"

namespace paged_attn::ops {
namespace {

// Blocks that hold the first `length` tokens of a sequence must be in its table and in the cache; what lies beyond is never
// read.
void check_blocks_of_sequence(const char* op, const AttentionParams& params, const at::Tensor& block_tables, int64_t sequence,
                              int64_t length, const char* length_name) {
  const int64_t blocks = ceil_div(length, params.block_size);
  TORCH_CHECK_VALUE(blocks <= block_tables.size(1), op, ": block_tables has ", block_tables.size(1), " blocks of ",
                    params.block_size, " tokens per sequence, takes ", blocks, " for ", length_name, "[", sequence,
                    "] = ", length);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t block = params.block_tables(sequence, i);
    TORCH_CHECK_VALUE(block >= 0 && block < params.key_cache.num_blocks, op, ": block_tables[", sequence, ", ", i, "] is ",
                      block, ", takes a block of the cache, 0 to ", params.key_cache.num_blocks - 1);
  }
}

void run_decode(const char* op, const DecodeArguments& arguments, const PartitionArguments* partitions) {
  const Call<DecodeParams> call = decode_call(op, arguments, partitions);
  const DecodeParams& params = call.params;
  for (int64_t s = 0; s < params.num_seqs; ++s) {
    const int64_t length = params.seq_lens(s);
    TORCH_CHECK_VALUE(length >= 0 && length <= arguments.max_seq_len, op, ": seq_lens[", s, "] is ", length,
                      ", takes 0 to max_seq_len = ", arguments.max_seq_len);
    check_blocks_of_sequence(op, params, arguments.block_tables, s, length, "seq_lens");
  }
  cpu_kernels().decode(params, parallel());
}

void paged_attention_v1(const at::Tensor& out, const at::Tensor& query, const at::Tensor& key_cache,
                        const at::Tensor& value_cache, int64_t num_kv_heads, double scale, const at::Tensor& block_tables,
                        const at::Tensor& seq_lens, int64_t block_size, int64_t max_seq_len, const OptionalTensor& alibi_slopes,
                        const std::string& kv_cache_dtype, double k_scale, double v_scale, int64_t tp_rank,
                        int64_t blocksparse_local_blocks, int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                        int64_t blocksparse_head_sliding_step, const OptionalTensor& k_scales, const OptionalTensor& v_scales) {
  run_decode("paged_attention_v1",
             {out,
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
              v_scales},
             nullptr);
}

void paged_attention_v2(const at::Tensor& out, const at::Tensor& exp_sums, const at::Tensor& max_logits,
                        const at::Tensor& tmp_out, const at::Tensor& query, const at::Tensor& key_cache,
                        const at::Tensor& value_cache, int64_t num_kv_heads, double scale, const at::Tensor& block_tables,
                        const at::Tensor& seq_lens, int64_t block_size, int64_t max_seq_len, const OptionalTensor& alibi_slopes,
                        const std::string& kv_cache_dtype, double k_scale, double v_scale, int64_t tp_rank,
                        int64_t blocksparse_local_blocks, int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                        int64_t blocksparse_head_sliding_step, const OptionalTensor& k_scales, const OptionalTensor& v_scales) {
  const PartitionArguments partitions{exp_sums, max_logits, tmp_out};
  run_decode("paged_attention_v2",
             {out,
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
              v_scales},
             &partitions);
}

void prefix_attention(const at::Tensor& out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& block_tables,
                      const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& context_lens,
                      int64_t max_query_len, double scale, const OptionalTensor& alibi_slopes,
                      c10::optional<int64_t> sliding_window, const std::string& kv_cache_dtype, double k_scale, double v_scale,
                      c10::optional<double> logits_soft_cap, const OptionalTensor& sinks, const OptionalTensor& lse,
                      const OptionalTensor& k_scales, const OptionalTensor& v_scales, const std::string& precision) {
  const char* op = "prefix_attention";
  const Call<PrefixParams> call = prefix_call(
      op, {out,      query,           key,           value, key_cache,    value_cache,    block_tables,   query_start_loc,
           seq_lens, context_lens,    max_query_len, scale, alibi_slopes, sliding_window, kv_cache_dtype, k_scale,
           v_scale,  logits_soft_cap, sinks,         lse,   k_scales,     v_scales,       precision});
  const PrefixParams& params = call.params;
  const int64_t first = params.query_start_loc(0);
  TORCH_CHECK_VALUE(first >= 0, op, ": query_start_loc[0] is ", first, ", takes 0 or more");
  for (int64_t s = 0; s < params.num_seqs; ++s) {
    const int64_t begin = params.query_start_loc(s), end = params.query_start_loc(s + 1);
    TORCH_CHECK_VALUE(end >= begin && end <= query.size(0), op, ": query_start_loc[", s + 1, "] is ", end, ", takes ", begin,
                      " (the one before it) to ", query.size(0), " (tokens of query)");
    TORCH_CHECK_VALUE(end - begin <= max_query_len, op, ": max_query_len is ", max_query_len, ", takes at least ", end - begin,
                      ", the queries of sequence ", s);
    const int64_t context = params.context_lens(s), length = params.seq_lens(s);
    TORCH_CHECK_VALUE(context >= 0, op, ": context_lens[", s, "] is ", context, ", takes 0 or more");
    TORCH_CHECK_VALUE(length == context + end - begin, op, ": seq_lens[", s, "] is ", length,
                      ", takes context_lens + queries = ", context + end - begin);
    check_blocks_of_sequence(op, params, block_tables, s, context, "context_lens");
  }
  cpu_kernels().prefix(params, parallel());
}

void merge_attn_states(const at::Tensor& out, const OptionalTensor& out_lse, const at::Tensor& prefix_out,
                       const at::Tensor& prefix_lse, const at::Tensor& suffix_out, const at::Tensor& suffix_lse) {
  const Call<MergeParams> call =
      merge_call("merge_attn_states", {out, out_lse, prefix_out, prefix_lse, suffix_out, suffix_lse});
  cpu_kernels().merge(call.params, parallel());
}

void reshape_and_cache(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
                       const at::Tensor& value_cache, const at::Tensor& slot_mapping, const std::string& kv_cache_dtype,
                       double k_scale, double v_scale, const OptionalTensor& k_scales, const OptionalTensor& v_scales) {
  const char* op = "reshape_and_cache";
  const Call<StoreParams> call =
      store_call(op, {key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, k_scales, v_scales});
  const StoreParams& params = call.params;
  const int64_t slots = params.key_cache.num_blocks * params.block_size;
  for (int64_t i = 0; i < params.num_slots; ++i) {
    TORCH_CHECK_VALUE(params.slot_mapping[i] < slots, op, ": slot_mapping[", i, "] is ", params.slot_mapping[i],
                      ", takes up to ", slots - 1, ", the last slot of the cache, or a negative number to skip the token");
  }
  cpu_kernels().store(params, parallel());
}

void check_pairs(const char* op, const at::Tensor& pairs, int64_t column, const char* name, int64_t num_blocks) {
  const int64_t* data = pairs.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pairs.size(0); ++i) {
    const int64_t block = data[2 * i + column];
    TORCH_CHECK_VALUE(block >= 0 && block < num_blocks, op, ": block_mapping[", i, ", ", column, "] is ", block,
                      ", takes a block of ", name, ", 0 to ", num_blocks - 1);
  }
}

void copy_blocks(at::TensorList key_caches, at::TensorList value_caches, const at::Tensor& block_mapping) {
  const char* op = "copy_blocks";
  const at::Tensor pairs = block_pairs(op, block_mapping);
  TORCH_CHECK_VALUE(key_caches.size() == value_caches.size(), op, ": value_caches has ", value_caches.size(),
                    " tensors, takes ", key_caches.size(), ", one for each of key_caches");
  std::vector<BlockCopy> copies;
  for (const auto& [name, caches] : {std::pair("key_caches", key_caches), std::pair("value_caches", value_caches)}) {
    for (const at::Tensor& cache : caches) {
      TORCH_CHECK_VALUE(cache.device() == block_mapping.device(), op, ": ", name, " has a tensor on ", cache.device(),
                        ", takes ", block_mapping.device(), ", the device of block_mapping");
      copies.push_back(block_copy(op, name, cache, name, cache));
      check_pairs(op, pairs, 0, name, copies.back().src_blocks);
      check_pairs(op, pairs, 1, name, copies.back().dst_blocks);
    }
  }
  const int64_t num_pairs = pairs.size(0);
  if (copies.empty() || num_pairs == 0) return;

  struct Job {
    const std::vector<BlockCopy>& copies;
    const int64_t* pairs;
    int64_t num_pairs;
    std::vector<bool> set_aside;
  };
  // Ids are the same for every cache, and each was found to be in range of each.
  const int64_t* data = pairs.const_data_ptr<int64_t>();
  const int64_t blocks = *std::max_element(data, data + 2 * num_pairs) + 1;
  Job job{copies, data, num_pairs, cpu::overwritten_sources(data, num_pairs, blocks)};
  parallel().run(
      int64_t(copies.size()),
      [](void* argument, int64_t i) {
        const Job& job = *static_cast<Job*>(argument);
        const BlockCopy& copy = job.copies[size_t(i)];
        cpu::copy_block_pairs(copy.src, copy.src_block_stride, copy.dst, copy.dst_block_stride, copy.block_bytes, job.pairs,
                              job.num_pairs, job.set_aside);
      },
      &job);
}

void swap_blocks(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& block_mapping) {
  const char* op = "swap_blocks";
  const at::Tensor pairs = block_pairs(op, block_mapping);
  TORCH_CHECK_VALUE(src.device().is_cpu() && dst.device().is_cpu() && block_mapping.device().is_cpu(), op, ": src is on ",
                    src.device(), ", dst on ", dst.device(), ", block_mapping on ", block_mapping.device(),
                    ", takes all on the CPU");
  const BlockCopy copy = block_copy(op, "src", src, "dst", dst);
  check_pairs(op, pairs, 0, "src", copy.src_blocks);
  check_pairs(op, pairs, 1, "dst", copy.dst_blocks);
  const int64_t num_pairs = pairs.size(0);
  if (num_pairs == 0) return;
  // Views of one storage may overlap in ways that block ids do not tell: then every source is set aside.
  const int64_t* data = pairs.const_data_ptr<int64_t>();
  const bool same = copy.src == copy.dst && copy.src_block_stride == copy.dst_block_stride;
  const bool apart = !src.is_alias_of(dst);
  const std::vector<bool> set_aside =
      same ? cpu::overwritten_sources(data, num_pairs, std::max(copy.src_blocks, copy.dst_blocks))
           : std::vector<bool>(size_t(num_pairs), !apart);
  cpu::copy_block_pairs(copy.src, copy.src_block_stride, copy.dst, copy.dst_block_stride, copy.block_bytes, data, num_pairs,
                        set_aside);
}

}  // namespace

TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  m.impl("paged_attention_v1", paged_attention_v1);
  m.impl("paged_attention_v2", paged_attention_v2);
  m.impl("prefix_attention", prefix_attention);
  m.impl("merge_attn_states", merge_attn_states);
  m.impl("reshape_and_cache", reshape_and_cache);
  m.impl("copy_blocks", copy_blocks);
  m.impl("swap_blocks", swap_blocks);
}

}  // namespace paged_attn::ops
