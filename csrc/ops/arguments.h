// From tensors to the kernels' parameter structs, with every check that needs no value from the device: the same for all
// backends. A wrong argument is refused before anything is written, by a message that names it, what it got, and what it takes:
// ValueError for shapes and values, TypeError for types.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Optional.h>

#include <string>
#include <vector>

#include "core/params.h"

namespace paged_attn::ops {

using OptionalTensor = c10::optional<at::Tensor>;

// A parameter struct, and the tensors made for it (contiguous copies of small arguments), which must outlive the call.
template <typename Params>
struct Call {
  Params params;
  std::vector<at::Tensor> owned;
};

// Arguments that v1 and v2 share, in the order of their schemas.
struct DecodeArguments {
  const at::Tensor& out;
  const at::Tensor& query;
  const at::Tensor& key_cache;
  const at::Tensor& value_cache;
  int64_t num_kv_heads;
  double scale;
  const at::Tensor& block_tables;
  const at::Tensor& seq_lens;
  int64_t block_size;
  int64_t max_seq_len;
  const OptionalTensor& alibi_slopes;
  const std::string& kv_cache_dtype;
  double k_scale;
  double v_scale;
  int64_t tp_rank;
  int64_t blocksparse_local_blocks;
  int64_t blocksparse_vert_stride;
  int64_t blocksparse_block_size;
  int64_t blocksparse_head_sliding_step;
  const OptionalTensor& k_scales;
  const OptionalTensor& v_scales;
};

// v2's workspace.
struct PartitionArguments {
  const at::Tensor& exp_sums;
  const at::Tensor& max_logits;
  const at::Tensor& tmp_out;
};

struct PrefixArguments {
  const at::Tensor& out;
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& key_cache;
  const at::Tensor& value_cache;
  const at::Tensor& block_tables;
  const at::Tensor& query_start_loc;
  const at::Tensor& seq_lens;
  const at::Tensor& context_lens;
  int64_t max_query_len;
  double scale;
  const OptionalTensor& alibi_slopes;
  c10::optional<int64_t> sliding_window;
  const std::string& kv_cache_dtype;
  double k_scale;
  double v_scale;
  c10::optional<double> logits_soft_cap;
  const OptionalTensor& sinks;
  const OptionalTensor& lse;
  const OptionalTensor& k_scales;
  const OptionalTensor& v_scales;
  const std::string& precision;
};

struct MergeArguments {
  const at::Tensor& out;
  const OptionalTensor& out_lse;
  const at::Tensor& prefix_out;
  const at::Tensor& prefix_lse;
  const at::Tensor& suffix_out;
  const at::Tensor& suffix_lse;
};

struct StoreArguments {
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& key_cache;
  const at::Tensor& value_cache;
  const at::Tensor& slot_mapping;
  const std::string& kv_cache_dtype;
  double k_scale;
  double v_scale;
  const OptionalTensor& k_scales;
  const OptionalTensor& v_scales;
};

struct GatherArguments {
  const at::Tensor& key;
  const at::Tensor& value;
  const at::Tensor& key_cache;
  const at::Tensor& value_cache;
  const at::Tensor& block_table;
  const std::string& kv_cache_dtype;
  double k_scale;
  double v_scale;
  const OptionalTensor& k_scales;
  const OptionalTensor& v_scales;
};

// `partitions` null: v1.
Call<DecodeParams> decode_call(const char* op, const DecodeArguments& arguments, const PartitionArguments* partitions);
Call<PrefixParams> prefix_call(const char* op, const PrefixArguments& arguments);
Call<MergeParams> merge_call(const char* op, const MergeArguments& arguments);
Call<StoreParams> store_call(const char* op, const StoreArguments& arguments);
Call<GatherParams> gather_call(const char* op, const GatherArguments& arguments);

// One copy of whole blocks: block pairs[i][0] of src to block pairs[i][1] of dst.
struct BlockCopy {
  const char* src;
  char* dst;
  int64_t src_block_stride;  // bytes
  int64_t dst_block_stride;
  int64_t block_bytes;
  int64_t src_blocks;
  int64_t dst_blocks;
};

BlockCopy block_copy(const char* op, const char* src_name, const at::Tensor& src, const char* dst_name, const at::Tensor& dst);

// copy_blocks: key caches, then value caches, each copied within itself.
std::vector<BlockCopy> copy_call(const char* op, at::TensorList key_caches, at::TensorList value_caches,
                                 const at::Tensor& block_mapping);

// [n, 2] int32 or int64 as contiguous int64.
at::Tensor block_pairs(const char* op, const at::Tensor& block_mapping);

// pack_blocks and scatter_blocks.
struct TransferCall {
  BlockTransfer params;
  std::vector<BlockArray> caches;  // params.caches
  c10::Device device;
};

enum class Direction { kPack, kScatter };
TransferCall transfer_call(const char* op, Direction direction, at::TensorList caches, const at::Tensor& buffer,
                           const at::Tensor& block_ids);

// That column 0 (sources) or 1 (destinations) of pairs on the CPU names blocks of `name`.
void check_pairs(const char* op, const at::Tensor& pairs, int64_t column, const char* name, int64_t num_blocks);

}  // namespace paged_attn::ops
