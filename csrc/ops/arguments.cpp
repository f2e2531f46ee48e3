#include "ops/arguments.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>

namespace paged_attn::ops {
namespace {

#define PA_CHECK_VALUE(condition, ...) TORCH_CHECK_VALUE(condition, op, ": ", __VA_ARGS__)
#define PA_CHECK_TYPE(condition, ...) TORCH_CHECK_TYPE(condition, op, ": ", __VA_ARGS__)

ElementType element_type(const char* op, const char* name, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return ElementType::kFloat32;
    case at::kHalf: return ElementType::kFloat16;
    case at::kBFloat16: return ElementType::kBFloat16;
    default: PA_CHECK_TYPE(false, name, " has dtype ", tensor.scalar_type(), ", takes float32, float16 or bfloat16");
  }
}

void check_rank(const char* op, const char* name, const at::Tensor& tensor, int64_t rank, const char* shape) {
  PA_CHECK_VALUE(tensor.dim() == rank, name, " has shape ", tensor.sizes(), ", takes ", shape);
}

void check_size(const char* op, const char* name, const at::Tensor& tensor, int64_t dim, int64_t expected,
                const char* meaning) {
  PA_CHECK_VALUE(tensor.size(dim) == expected, name, " has shape ", tensor.sizes(), ", takes ", expected, " (", meaning,
                 ") in dimension ", dim);
}

void check_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& reference) {
  PA_CHECK_VALUE(tensor.device() == reference.device(), name, " is on ", tensor.device(), ", takes ", reference.device());
}

// What is written must not share elements with itself, as an expanded tensor does.
void check_writable(const char* op, const char* name, const at::Tensor& tensor) {
  PA_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, name, " has strides ", tensor.strides(),
                 " for shape ", tensor.sizes(), ", takes a tensor whose elements do not share memory");
}

TokenTensor token_tensor(const char* op, const char* name, const at::Tensor& tensor, ElementType type) {
  check_rank(op, name, tensor, 3, "[tokens, heads, head size]");
  return {tensor.data_ptr(), type, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

TokenTensor token_tensor(const char* op, const char* name, const at::Tensor& tensor) {
  return token_tensor(op, name, tensor, element_type(op, name, tensor));
}

void check_same_type(const char* op, const char* name, const at::Tensor& tensor, const char* reference_name,
                     const at::Tensor& reference) {
  PA_CHECK_TYPE(tensor.scalar_type() == reference.scalar_type(), name, " has dtype ", tensor.scalar_type(), ", takes ",
                reference.scalar_type(), ", the dtype of ", reference_name);
}

void check_index_type(const char* op, const char* name, const at::Tensor& tensor) {
  PA_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, name, " has dtype ",
                tensor.scalar_type(), ", takes int32 or int64");
}

IndexArray index_vector(const char* op, const char* name, const at::Tensor& tensor, int64_t size, const char* meaning,
                        const at::Tensor& reference) {
  check_index_type(op, name, tensor);
  check_rank(op, name, tensor, 1, meaning);
  check_size(op, name, tensor, 0, size, meaning);
  check_device(op, name, tensor, reference);
  return {tensor.data_ptr(), tensor.scalar_type() == at::kLong, 0, tensor.stride(0)};
}

IndexArray block_table(const char* op, const at::Tensor& tensor, int64_t num_seqs, const at::Tensor& reference) {
  const char* name = "block_tables";
  check_index_type(op, name, tensor);
  check_rank(op, name, tensor, 2, "[sequences, blocks]");
  check_size(op, name, tensor, 0, num_seqs, "sequences");
  check_device(op, name, tensor, reference);
  return {tensor.data_ptr(), tensor.scalar_type() == at::kLong, tensor.stride(0), tensor.stride(1)};
}

// A float32 vector of one number per head, contiguous.
const float* head_vector(const char* op, const char* name, const OptionalTensor& tensor, int64_t size, const char* meaning,
                         const at::Tensor& reference, std::vector<at::Tensor>& owned) {
  if (!tensor) return nullptr;
  PA_CHECK_TYPE(tensor->scalar_type() == at::kFloat, name, " has dtype ", tensor->scalar_type(), ", takes float32");
  check_rank(op, name, *tensor, 1, meaning);
  check_size(op, name, *tensor, 0, size, meaning);
  check_device(op, name, *tensor, reference);
  owned.push_back(tensor->contiguous());
  return owned.back().const_data_ptr<float>();
}

ElementType cache_type(const char* op, const std::string& kv_cache_dtype, ElementType query_type) {
  if (kv_cache_dtype == "auto") return query_type;
  if (kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3") return ElementType::kFp8E4M3;
  if (kv_cache_dtype == "fp8_e5m2") return ElementType::kFp8E5M2;
  PA_CHECK_VALUE(false, "kv_cache_dtype is '", kv_cache_dtype, "', takes 'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'");
}

void check_cache_type(const char* op, const char* name, const at::Tensor& cache, ElementType type,
                      const std::string& kv_cache_dtype, const at::Tensor& reference) {
  const at::ScalarType expected = is_fp8(type) ? at::kByte : reference.scalar_type();
  PA_CHECK_TYPE(cache.scalar_type() == expected, name, " has dtype ", cache.scalar_type(), ", takes ", expected,
                " with kv_cache_dtype '", kv_cache_dtype, "'", is_fp8(type) ? " (view a float8 tensor as uint8)" : "");
}

CacheTensor key_cache_tensor(const char* op, const at::Tensor& cache, ElementType type, int64_t head_size) {
  check_rank(op, "key_cache", cache, 5, "[blocks, KV heads, head size / x, block size, x]");
  const int64_t x = 16 / cache.element_size();
  PA_CHECK_VALUE(head_size % x == 0, "head size ", head_size,
                 " cannot be laid out in key_cache: it takes a multiple of x = ", x, ", 16 bytes of its ", cache.element_size(),
                 "-byte elements");
  check_size(op, "key_cache", cache, 4, x, "x, elements in 16 bytes");
  check_size(op, "key_cache", cache, 2, head_size / x, "head size / x");
  PA_CHECK_VALUE(cache.stride(4) == 1, "key_cache has strides ", cache.strides(), ", takes stride 1 in its last dimension");
  return {cache.data_ptr(), type, cache.size(0), cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3), x};
}

CacheTensor value_cache_tensor(const char* op, const at::Tensor& cache, ElementType type, const at::Tensor& key_cache,
                               int64_t head_size) {
  check_rank(op, "value_cache", cache, 4, "[blocks, KV heads, head size, block size]");
  check_size(op, "value_cache", cache, 0, key_cache.size(0), "blocks of key_cache");
  check_size(op, "value_cache", cache, 1, key_cache.size(1), "KV heads of key_cache");
  check_size(op, "value_cache", cache, 2, head_size, "head size");
  check_size(op, "value_cache", cache, 3, key_cache.size(3), "block size of key_cache");
  return {cache.data_ptr(), type, cache.size(0), cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3), 1};
}

// Scales belong to fp8 codes. A cache of the query's type stores values as they are, and its scales are not looked at, as in
// vLLM.
CacheScale cache_scale(const char* op, const char* name, double value, const char* tensor_name, const OptionalTensor& tensor,
                       int64_t num_kv_heads, ElementType type, const at::Tensor& reference, std::vector<at::Tensor>& owned) {
  CacheScale scale;
  if (tensor) {
    PA_CHECK_VALUE(tensor->dim() == 1 && (tensor->size(0) == 1 || tensor->size(0) == num_kv_heads), tensor_name, " has shape ",
                   tensor->sizes(), ", takes [1] or [", num_kv_heads, "] (KV heads)");
    const float* values = head_vector(op, tensor_name, tensor, tensor->size(0), "scales", reference, owned);
    if (is_fp8(type)) scale = {1.0f, values, tensor->size(0) == 1 ? 0 : 1};
  } else {
    PA_CHECK_VALUE(std::isfinite(value) && value > 0, name, " is ", value, ", takes a positive finite number");
    if (is_fp8(type)) scale.value = float(value);
  }
  return scale;
}

// Everything that decode and prefix have in common: caches, tables, sizes.
void fill_attention(const char* op, AttentionParams& params, std::vector<at::Tensor>& owned, const at::Tensor& out,
                    const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                    const at::Tensor& block_tables, const at::Tensor& seq_lens, double scale,
                    const OptionalTensor& alibi_slopes, const std::string& kv_cache_dtype, double k_scale, double v_scale,
                    const OptionalTensor& k_scales, const OptionalTensor& v_scales) {
  params.query = token_tensor(op, "query", query);
  params.out = token_tensor(op, "out", out);
  check_same_type(op, "out", out, "query", query);
  PA_CHECK_VALUE(out.sizes() == query.sizes(), "out has shape ", out.sizes(), ", takes ", query.sizes(),
                 ", the shape of query");
  check_writable(op, "out", out);
  params.num_heads = query.size(1);
  params.key_size = params.value_size = query.size(2);
  PA_CHECK_VALUE(params.num_heads > 0 && params.key_size > 0, "query has shape ", query.sizes(),
                 ", takes at least one head and a head size of at least 1");

  const ElementType type = cache_type(op, kv_cache_dtype, params.query.type);
  check_cache_type(op, "key_cache", key_cache, type, kv_cache_dtype, query);
  check_cache_type(op, "value_cache", value_cache, type, kv_cache_dtype, query);
  params.key_cache = key_cache_tensor(op, key_cache, type, params.key_size);
  params.value_cache = value_cache_tensor(op, value_cache, type, key_cache, params.value_size);
  params.num_kv_heads = key_cache.size(1);
  params.block_size = key_cache.size(3);
  PA_CHECK_VALUE(params.num_kv_heads > 0 && params.num_heads % params.num_kv_heads == 0, "query has ", params.num_heads,
                 " heads, takes a multiple of the ", params.num_kv_heads, " KV heads of key_cache");
  PA_CHECK_VALUE(params.block_size > 0, "key_cache has shape ", key_cache.sizes(), ", takes a block size of at least 1");

  params.num_seqs = seq_lens.dim() == 1 ? seq_lens.size(0) : 0;
  params.seq_lens = index_vector(op, "seq_lens", seq_lens, params.num_seqs, "sequences", query);
  params.block_tables = block_table(op, block_tables, params.num_seqs, query);
  params.max_blocks = block_tables.size(1);
  check_device(op, "out", out, query);
  check_device(op, "key_cache", key_cache, query);
  check_device(op, "value_cache", value_cache, query);

  PA_CHECK_VALUE(std::isfinite(scale), "scale is ", scale, ", takes a finite number");
  params.logits.scale = float(scale);
  params.logits.alibi_slopes = head_vector(op, "alibi_slopes", alibi_slopes, params.num_heads, "query heads", query, owned);
  params.key_scale = cache_scale(op, "k_scale", k_scale, "k_scales", k_scales, params.num_kv_heads, type, query, owned);
  params.value_scale = cache_scale(op, "v_scale", v_scale, "v_scales", v_scales, params.num_kv_heads, type, query, owned);
}

BlockSparse block_sparse(const char* op, const DecodeArguments& a) {
  BlockSparse sparse;
  if (a.blocksparse_vert_stride <= 1) return sparse;  // off, as in vLLM
  PA_CHECK_VALUE(a.blocksparse_block_size > 0 && a.blocksparse_block_size % a.block_size == 0, "blocksparse_block_size is ",
                 a.blocksparse_block_size, ", takes a positive multiple of block_size ", a.block_size);
  PA_CHECK_VALUE(a.blocksparse_local_blocks >= 0, "blocksparse_local_blocks is ", a.blocksparse_local_blocks,
                 ", takes 0 or more");
  PA_CHECK_VALUE(a.tp_rank >= 0, "tp_rank is ", a.tp_rank, ", takes 0 or more");
  sparse.vert_stride = a.blocksparse_vert_stride;
  sparse.local_blocks = a.blocksparse_local_blocks;
  sparse.block_size = a.blocksparse_block_size;
  sparse.head_sliding_step = a.blocksparse_head_sliding_step;
  sparse.tp_rank = a.tp_rank;
  return sparse;
}

void check_partition_tensor(const char* op, const char* name, const at::Tensor& tensor, const DecodeArguments& a,
                            int64_t partitions) {
  const char* shape = "[sequences, query heads, partitions]";
  PA_CHECK_TYPE(tensor.scalar_type() == at::kFloat, name, " has dtype ", tensor.scalar_type(), ", takes float32");
  check_rank(op, name, tensor, 3, shape);
  check_size(op, name, tensor, 0, a.query.size(0), "sequences");
  check_size(op, name, tensor, 1, a.query.size(1), "query heads");
  check_size(op, name, tensor, 2, partitions, "partitions of max_logits");
  check_device(op, name, tensor, a.query);
  PA_CHECK_VALUE(tensor.is_contiguous(), name, " has strides ", tensor.strides(), ", takes a contiguous tensor");
}

PartitionStates partition_states(const char* op, const DecodeArguments& a, const PartitionArguments& p) {
  check_rank(op, "max_logits", p.max_logits, 3, "[sequences, query heads, partitions]");
  const int64_t partitions = p.max_logits.size(2);
  check_partition_tensor(op, "max_logits", p.max_logits, a, partitions);
  check_partition_tensor(op, "exp_sums", p.exp_sums, a, partitions);
  const int64_t needed = ceil_div(a.max_seq_len, kPartitionTokens);
  PA_CHECK_VALUE(partitions >= needed, "max_logits has ", partitions, " partitions, takes at least ", needed, " of ",
                 kPartitionTokens, " tokens for max_seq_len ", a.max_seq_len);

  check_rank(op, "tmp_out", p.tmp_out, 4, "[sequences, query heads, partitions, head size]");
  check_size(op, "tmp_out", p.tmp_out, 0, a.query.size(0), "sequences");
  check_size(op, "tmp_out", p.tmp_out, 1, a.query.size(1), "query heads");
  check_size(op, "tmp_out", p.tmp_out, 2, partitions, "partitions of max_logits");
  check_size(op, "tmp_out", p.tmp_out, 3, a.query.size(2), "head size");
  check_device(op, "tmp_out", p.tmp_out, a.query);
  PA_CHECK_TYPE(p.tmp_out.scalar_type() == at::kFloat || p.tmp_out.scalar_type() == a.query.scalar_type(), "tmp_out has dtype ",
                p.tmp_out.scalar_type(), ", takes float32 or ", a.query.scalar_type(), ", the dtype of query");
  PA_CHECK_VALUE(p.tmp_out.is_contiguous(), "tmp_out has strides ", p.tmp_out.strides(), ", takes a contiguous tensor");

  PartitionStates states;
  states.max_logits = p.max_logits.data_ptr<float>();
  states.exp_sums = p.exp_sums.data_ptr<float>();
  states.partitions = partitions;
  // States rounded to 16 bits would not merge to v1's bits: then the operator finds room of its own.
  if (p.tmp_out.scalar_type() == at::kFloat) states.out = p.tmp_out.data_ptr<float>();
  return states;
}

float* lse_tensor(const char* op, const char* name, const at::Tensor& lse, int64_t num_heads, int64_t num_tokens,
                  const at::Tensor& reference) {
  PA_CHECK_TYPE(lse.scalar_type() == at::kFloat, name, " has dtype ", lse.scalar_type(), ", takes float32");
  PA_CHECK_VALUE(lse.dim() == 2 && lse.size(0) == num_heads && lse.size(1) == num_tokens, name, " has shape ", lse.sizes(),
                 ", takes [", num_heads, ", ", num_tokens, "] (heads, tokens)");
  check_device(op, name, lse, reference);
  return lse.data_ptr<float>();
}

// A tensor that is written shares no memory with one that is read in another order.
void check_apart(const char* op, const char* name, const at::Tensor& written, const char* read_name, const at::Tensor& read) {
  const at::MemOverlapStatus status = at::get_overlap_status(written, read);
  PA_CHECK_VALUE(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, name, " overlaps ", read_name,
                 ", takes memory of its own");
}

// A tensor that is written may be one that is read, element for element, but not overlap it otherwise.
void check_overlap(const char* op, const char* name, const at::Tensor& written, const char* read_name, const at::Tensor& read) {
  PA_CHECK_VALUE(at::get_overlap_status(written, read) != at::MemOverlapStatus::Partial, name, " overlaps ", read_name,
                 " in part, takes the same tensor or memory of its own");
}

}  // namespace

Call<DecodeParams> decode_call(const char* op, const DecodeArguments& a, const PartitionArguments* partitions) {
  Call<DecodeParams> call;
  DecodeParams& params = call.params;
  check_rank(op, "query", a.query, 3, "[sequences, query heads, head size]");
  check_rank(op, "seq_lens", a.seq_lens, 1, "[sequences]");
  check_size(op, "seq_lens", a.seq_lens, 0, a.query.size(0), "sequences of query");
  fill_attention(op, params, call.owned, a.out, a.query, a.key_cache, a.value_cache, a.block_tables, a.seq_lens, a.scale,
                 a.alibi_slopes, a.kv_cache_dtype, a.k_scale, a.v_scale, a.k_scales, a.v_scales);
  PA_CHECK_VALUE(a.num_kv_heads == params.num_kv_heads, "num_kv_heads is ", a.num_kv_heads, ", takes ", params.num_kv_heads,
                 ", the KV heads of key_cache");
  PA_CHECK_VALUE(a.block_size == params.block_size, "block_size is ", a.block_size, ", takes ", params.block_size,
                 ", the block size of key_cache");
  PA_CHECK_VALUE(a.max_seq_len >= 0, "max_seq_len is ", a.max_seq_len, ", takes 0 or more");
  params.max_seq_len = a.max_seq_len;
  params.logits.sparse = block_sparse(op, a);
  if (partitions) params.states = partition_states(op, a, *partitions);
  return call;
}

Call<PrefixParams> prefix_call(const char* op, const PrefixArguments& a) {
  Call<PrefixParams> call;
  PrefixParams& params = call.params;
  fill_attention(op, params, call.owned, a.out, a.query, a.key_cache, a.value_cache, a.block_tables, a.seq_lens, a.scale,
                 a.alibi_slopes, a.kv_cache_dtype, a.k_scale, a.v_scale, a.k_scales, a.v_scales);
  const std::pair<const char*, const at::Tensor&> fresh[] = {{"key", a.key}, {"value", a.value}};
  for (const auto& [name, tensor] : fresh) {
    check_rank(op, name, tensor, 3, "[tokens, KV heads, head size]");
    check_same_type(op, name, tensor, "query", a.query);
    check_size(op, name, tensor, 0, a.query.size(0), "tokens of query");
    check_size(op, name, tensor, 1, params.num_kv_heads, "KV heads of key_cache");
    check_size(op, name, tensor, 2, params.key_size, "head size of query");
    check_device(op, name, tensor, a.query);
  }
  params.key = token_tensor(op, "key", a.key);
  params.value = token_tensor(op, "value", a.value);
  params.context_lens = index_vector(op, "context_lens", a.context_lens, params.num_seqs, "sequences of seq_lens", a.query);
  params.query_start_loc =
      index_vector(op, "query_start_loc", a.query_start_loc, params.num_seqs + 1, "sequences of seq_lens, plus 1", a.query);
  PA_CHECK_VALUE(a.max_query_len >= 0, "max_query_len is ", a.max_query_len, ", takes 0 or more");
  params.num_tokens = a.query.size(0);
  params.max_query_len = a.max_query_len;
  params.logits.window = a.sliding_window.value_or(0);
  const double soft_cap = a.logits_soft_cap.value_or(0.0);
  PA_CHECK_VALUE(std::isfinite(soft_cap) && soft_cap >= 0, "logits_soft_cap is ", soft_cap,
                 ", takes a finite number, positive, or 0 or None for no cap");
  params.logits.soft_cap = float(soft_cap);
  params.logits.sinks = head_vector(op, "sinks", a.sinks, params.num_heads, "query heads", a.query, call.owned);
  if (a.lse) {
    params.lse = lse_tensor(op, "lse", *a.lse, params.num_heads, a.query.size(0), a.query);
    check_writable(op, "lse", *a.lse);
    params.lse_head_stride = a.lse->stride(0);
    params.lse_token_stride = a.lse->stride(1);
  }
  PA_CHECK_VALUE(a.precision == "default" || a.precision == "float32", "precision is '", a.precision,
                 "', takes 'default' or 'float32'");
  params.precision = a.precision == "float32" ? Precision::kFloat32 : Precision::kDefault;
  return call;
}

Call<MergeParams> merge_call(const char* op, const MergeArguments& a) {
  Call<MergeParams> call;
  MergeParams& params = call.params;
  params.out = token_tensor(op, "out", a.out);
  params.prefix_out = token_tensor(op, "prefix_out", a.prefix_out);
  params.suffix_out = token_tensor(op, "suffix_out", a.suffix_out);
  params.num_tokens = a.out.size(0);
  params.num_heads = a.out.size(1);
  params.head_size = a.out.size(2);
  const std::pair<const char*, const at::Tensor&> parts[] = {{"prefix_out", a.prefix_out}, {"suffix_out", a.suffix_out}};
  for (const auto& [name, part] : parts) {
    check_same_type(op, name, part, "out", a.out);
    PA_CHECK_VALUE(part.sizes() == a.out.sizes(), name, " has shape ", part.sizes(), ", takes ", a.out.sizes(),
                   ", the shape of out");
    check_device(op, name, part, a.out);
    check_overlap(op, "out", a.out, name, part);
  }
  check_writable(op, "out", a.out);
  params.prefix_lse = lse_tensor(op, "prefix_lse", a.prefix_lse, params.num_heads, params.num_tokens, a.out);
  params.suffix_lse = lse_tensor(op, "suffix_lse", a.suffix_lse, params.num_heads, params.num_tokens, a.out);
  params.prefix_lse_head_stride = a.prefix_lse.stride(0);
  params.prefix_lse_token_stride = a.prefix_lse.stride(1);
  params.suffix_lse_head_stride = a.suffix_lse.stride(0);
  params.suffix_lse_token_stride = a.suffix_lse.stride(1);
  if (a.out_lse) {
    params.out_lse = lse_tensor(op, "out_lse", *a.out_lse, params.num_heads, params.num_tokens, a.out);
    check_writable(op, "out_lse", *a.out_lse);
    check_overlap(op, "out_lse", *a.out_lse, "prefix_lse", a.prefix_lse);
    check_overlap(op, "out_lse", *a.out_lse, "suffix_lse", a.suffix_lse);
    params.out_lse_head_stride = a.out_lse->stride(0);
    params.out_lse_token_stride = a.out_lse->stride(1);
  }
  return call;
}

namespace {

// What StoreParams and GatherParams have in common: caches of `type`, sizes, scales. `key` and `value` are filled before.
template <typename Params, typename Arguments>
void fill_token_cache(const char* op, Params& params, std::vector<at::Tensor>& owned, const Arguments& a, ElementType type,
                      const at::Tensor& auto_reference) {
  check_same_type(op, "value", a.value, "key", a.key);
  params.key_size = params.value_size = a.key.size(2);
  PA_CHECK_VALUE(params.key_size > 0, "key has shape ", a.key.sizes(), ", takes a head size of at least 1");
  check_cache_type(op, "key_cache", a.key_cache, type, a.kv_cache_dtype, auto_reference);
  check_cache_type(op, "value_cache", a.value_cache, type, a.kv_cache_dtype, auto_reference);
  params.key_cache = key_cache_tensor(op, a.key_cache, type, params.key_size);
  params.value_cache = value_cache_tensor(op, a.value_cache, type, a.key_cache, params.value_size);
  params.num_kv_heads = a.key_cache.size(1);
  params.block_size = a.key_cache.size(3);
  PA_CHECK_VALUE(params.block_size > 0, "key_cache has shape ", a.key_cache.sizes(), ", takes a block size of at least 1");
  check_size(op, "key", a.key, 1, params.num_kv_heads, "KV heads of key_cache");
  check_size(op, "value", a.value, 1, params.num_kv_heads, "KV heads of key_cache");
  check_size(op, "value", a.value, 2, params.value_size, "head size of key");
  check_device(op, "value", a.value, a.key);
  check_device(op, "key_cache", a.key_cache, a.key);
  check_device(op, "value_cache", a.value_cache, a.key);
  params.key_scale = cache_scale(op, "k_scale", a.k_scale, "k_scales", a.k_scales, params.num_kv_heads, type, a.key, owned);
  params.value_scale = cache_scale(op, "v_scale", a.v_scale, "v_scales", a.v_scales, params.num_kv_heads, type, a.key, owned);
}

}  // namespace

Call<StoreParams> store_call(const char* op, const StoreArguments& a) {
  Call<StoreParams> call;
  StoreParams& params = call.params;
  params.key = token_tensor(op, "key", a.key);
  params.value = token_tensor(op, "value", a.value);
  fill_token_cache(op, params, call.owned, a, cache_type(op, a.kv_cache_dtype, params.key.type), a.key);
  check_writable(op, "key_cache", a.key_cache);
  check_writable(op, "value_cache", a.value_cache);

  check_index_type(op, "slot_mapping", a.slot_mapping);
  params.num_slots = a.slot_mapping.numel();
  PA_CHECK_VALUE(a.key.size(0) >= params.num_slots, "key has ", a.key.size(0), " tokens, takes at least the ", params.num_slots,
                 " of slot_mapping");
  PA_CHECK_VALUE(a.value.size(0) >= params.num_slots, "value has ", a.value.size(0), " tokens, takes at least the ",
                 params.num_slots, " of slot_mapping");
  check_device(op, "slot_mapping", a.slot_mapping, a.key);
  call.owned.push_back(a.slot_mapping.reshape({-1}).to(at::kLong).contiguous());
  params.slot_mapping = call.owned.back().const_data_ptr<int64_t>();
  return call;
}

namespace {

// What tokens are gathered into: numbers, or the codes of an fp8 cache, which then have the cache's type.
TokenTensor gathered_tensor(const char* op, const char* name, const at::Tensor& tensor, ElementType cache_type) {
  if (!is_fp8(cache_type)) return token_tensor(op, name, tensor);
  const bool codes = tensor.scalar_type() == at::kByte;
  PA_CHECK_TYPE(codes || tensor.is_floating_point(), name, " has dtype ", tensor.scalar_type(),
                ", takes float32, float16 or bfloat16, or uint8 for the codes as they are");
  return codes ? token_tensor(op, name, tensor, cache_type) : token_tensor(op, name, tensor);
}

}  // namespace

Call<GatherParams> gather_call(const char* op, const GatherArguments& a) {
  Call<GatherParams> call;
  GatherParams& params = call.params;
  // No query says what "auto" stands for: the cache's own type.
  const bool is_auto = a.kv_cache_dtype == "auto";
  const ElementType type =
      cache_type(op, a.kv_cache_dtype, is_auto ? element_type(op, "key_cache", a.key_cache) : ElementType::kFloat32);
  params.key = gathered_tensor(op, "key", a.key, type);
  params.value = gathered_tensor(op, "value", a.value, type);
  fill_token_cache(op, params, call.owned, a, type, a.key_cache);
  params.num_tokens = a.key.size(0);
  check_size(op, "value", a.value, 0, params.num_tokens, "tokens of key");

  params.block_table =
      index_vector(op, "block_table", a.block_table, a.block_table.dim() == 1 ? a.block_table.size(0) : 0, "[blocks]", a.key);
  const int64_t blocks = ceil_div(params.num_tokens, params.block_size);
  PA_CHECK_VALUE(a.block_table.size(0) >= blocks, "block_table has ", a.block_table.size(0), " blocks of ", params.block_size,
                 " tokens, takes at least ", blocks, " for the ", params.num_tokens, " tokens of key");
  const std::pair<const char*, const at::Tensor&> written[] = {{"key", a.key}, {"value", a.value}};
  for (const auto& [name, tensor] : written) {
    check_writable(op, name, tensor);
    check_apart(op, name, tensor, "key_cache", a.key_cache);
    check_apart(op, name, tensor, "value_cache", a.value_cache);
  }
  check_apart(op, "value", a.value, "key", a.key);
  return call;
}

namespace {

// Whole blocks are copied as bytes, so each must lie in one piece; blocks may lie apart.
void check_blocks(const char* op, const char* name, const at::Tensor& cache) {
  PA_CHECK_VALUE(cache.dim() >= 1, name, " has shape ", cache.sizes(), ", takes blocks in its first dimension");
  int64_t dense = 1;
  for (int64_t d = cache.dim() - 1; d >= 1; --d) {
    PA_CHECK_VALUE(cache.size(d) == 1 || cache.stride(d) == dense, name, " has strides ", cache.strides(), " for shape ",
                   cache.sizes(), ", takes blocks that are contiguous");
    dense *= cache.size(d);
  }
}

// Blocks, in one tensor or in two, that a copy of blocks may fill.
void check_equal_blocks(const char* op, const char* name, const at::Tensor& cache, const char* reference_name,
                        const at::Tensor& reference) {
  check_same_type(op, name, cache, reference_name, reference);
  PA_CHECK_VALUE(reference.sizes().slice(1) == cache.sizes().slice(1), name, " has shape ", cache.sizes(),
                 ", takes blocks of shape ", reference.sizes().slice(1), ", as in ", reference_name);
}

void check_writable_blocks(const char* op, const char* name, const at::Tensor& cache) {
  PA_CHECK_VALUE(cache.size(0) <= 1 || cache.stride(0) != 0, name, " has strides ", cache.strides(),
                 ", takes a tensor whose elements do not share memory");
}

// Also where there is no block to count them in.
int64_t elements_of_block(const at::Tensor& cache) { return c10::multiply_integers(cache.sizes().slice(1)); }

}  // namespace

BlockCopy block_copy(const char* op, const char* src_name, const at::Tensor& src, const char* dst_name, const at::Tensor& dst) {
  check_blocks(op, src_name, src);
  check_blocks(op, dst_name, dst);
  check_equal_blocks(op, dst_name, dst, src_name, src);
  check_writable_blocks(op, dst_name, dst);
  const int64_t bytes = src.element_size();
  return {static_cast<const char*>(src.data_ptr()),
          static_cast<char*>(dst.data_ptr()),
          src.stride(0) * bytes,
          dst.stride(0) * bytes,
          elements_of_block(src) * bytes,
          src.size(0),
          dst.size(0)};
}

std::vector<BlockCopy> copy_call(const char* op, at::TensorList key_caches, at::TensorList value_caches,
                                 const at::Tensor& block_mapping) {
  PA_CHECK_VALUE(key_caches.size() == value_caches.size(), "value_caches has ", value_caches.size(), " tensors, takes ",
                 key_caches.size(), ", one for each of key_caches");
  std::vector<BlockCopy> copies;
  for (const auto& [name, caches] : {std::pair("key_caches", key_caches), std::pair("value_caches", value_caches)}) {
    for (const at::Tensor& cache : caches) {
      PA_CHECK_VALUE(cache.device() == block_mapping.device(), name, " has a tensor on ", cache.device(), ", takes ",
                     block_mapping.device(), ", the device of block_mapping");
      copies.push_back(block_copy(op, name, cache, name, cache));
    }
  }
  return copies;
}

at::Tensor block_pairs(const char* op, const at::Tensor& block_mapping) {
  check_index_type(op, "block_mapping", block_mapping);
  PA_CHECK_VALUE(block_mapping.dim() == 2 && block_mapping.size(1) == 2, "block_mapping has shape ", block_mapping.sizes(),
                 ", takes [pairs, 2]");
  return block_mapping.to(at::kLong).contiguous();
}

TransferCall transfer_call(const char* op, Direction direction, at::TensorList caches, const at::Tensor& buffer,
                           const at::Tensor& block_ids) {
  PA_CHECK_VALUE(!caches.empty(), "caches has no tensor, takes at least one");
  TransferCall call{{}, {}, buffer.device()};
  BlockTransfer& transfer = call.params;
  const at::Tensor& first = caches[0];
  const int64_t bytes = first.element_size();
  transfer.num_blocks = first.dim() > 0 ? first.size(0) : 0;
  for (const at::Tensor& cache : caches) {
    check_blocks(op, "caches", cache);
    check_equal_blocks(op, "caches", cache, "its first tensor", first);
    if (direction == Direction::kScatter) check_writable_blocks(op, "caches", cache);
    check_device(op, "caches", cache, buffer);
    call.caches.push_back({static_cast<char*>(cache.data_ptr()), cache.stride(0) * bytes});
    transfer.num_blocks = std::min(transfer.num_blocks, cache.size(0));
  }
  transfer.caches = call.caches.data();
  transfer.num_caches = int64_t(call.caches.size());
  transfer.num_ids = block_ids.dim() == 1 ? block_ids.size(0) : 0;
  transfer.block_ids = index_vector(op, "block_ids", block_ids, transfer.num_ids, "[blocks]", buffer);

  const int64_t elements = elements_of_block(first);
  check_same_type(op, "buffer", buffer, "caches", first);
  check_rank(op, "buffer", buffer, 3, "[block ids, caches, elements of a block]");
  check_size(op, "buffer", buffer, 0, transfer.num_ids, "block ids");
  check_size(op, "buffer", buffer, 1, transfer.num_caches, "caches");
  check_size(op, "buffer", buffer, 2, elements, "elements of a block");
  PA_CHECK_VALUE(buffer.is_contiguous(), "buffer has strides ", buffer.strides(), ", takes a contiguous tensor");
  for (const at::Tensor& cache : caches) check_apart(op, "buffer", buffer, "caches", cache);
  transfer.buffer = static_cast<char*>(buffer.data_ptr());
  transfer.block_bytes = elements * bytes;
  return call;
}

void check_pairs(const char* op, const at::Tensor& pairs, int64_t column, const char* name, int64_t num_blocks) {
  const int64_t* data = pairs.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pairs.size(0); ++i) {
    const int64_t block = data[2 * i + column];
    PA_CHECK_VALUE(block >= 0 && block < num_blocks, "block_mapping[", i, ", ", column, "] is ", block, ", takes a block of ",
                   name, ", 0 to ", num_blocks - 1);
  }
}

}  // namespace paged_attn::ops
