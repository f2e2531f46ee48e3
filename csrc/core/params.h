// What a kernel is told: pointers, named int64 strides, and the rules of one call. Plain data, no torch: filled by csrc/ops,
// read by the CPU and GPU kernels alike. Another cache layout, or another operator, is another way to fill these structs.
#pragma once

#include "core/codec.h"
#include "core/portability.h"

namespace paged_attn {

// Partitions of this many tokens, at absolute positions, are the unit that v1 and v2 reduce over, in ascending order: this is
// what makes their results equal bit for bit (vLLM's `_PARTITION_SIZE`).
constexpr int64_t kPartitionTokens = 512;

// int32 or int64 values with up to two strides, in elements.
struct IndexArray {
  const void* data = nullptr;
  bool is_64bit = false;
  int64_t row_stride = 0;
  int64_t stride = 1;

  PA_HD int64_t at(int64_t i) const {
    return is_64bit ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  PA_HD int64_t operator()(int64_t i) const { return at(i * stride); }
  PA_HD int64_t operator()(int64_t row, int64_t i) const { return at(row * row_stride + i * stride); }
};

// [token, head, dim] of the query, the new keys and values, or the output.
struct TokenTensor {
  void* data = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int64_t dim_stride = 1;

  PA_HD int64_t offset(int64_t token, int64_t head) const { return token * token_stride + head * head_stride; }
};

// The K or the V half of a paged cache. Element (block, head, token, dim) lies at
//   block * block_stride + head * head_stride + (dim / dim_group) * group_stride + token * token_stride + dim % dim_group.
// Layout "x": K has dim_group x = 16 bytes and token_stride x; V has dim_group 1 and token_stride 1.
struct CacheTensor {
  void* data = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t num_blocks = 0;
  int64_t block_stride = 0;
  int64_t head_stride = 0;
  int64_t group_stride = 0;
  int64_t token_stride = 0;
  int64_t dim_group = 1;

  PA_HD int64_t offset(int64_t block, int64_t head) const { return block * block_stride + head * head_stride; }
  PA_HD int64_t dim_offset(int64_t dim) const { return dim / dim_group * group_stride + dim % dim_group; }
};

// The factor between a stored code and its value: one number, or one per KV head read on the device.
struct CacheScale {
  float value = 1.0f;
  const float* values = nullptr;
  int64_t stride = 0;  // 0: values[0] serves every KV head

  PA_HD float operator()(int64_t kv_head) const { return values ? values[kv_head * stride] : value; }
};

// Which keys a query sees beside the causal rule, as in vLLM 0.6.3's block-sparse v1/v2: key block b (of `block_size` tokens)
// is seen when it is one of the last `local_blocks` up to the query's own, or when (b + offset(head)) % vert_stride == 0.
struct BlockSparse {
  int64_t vert_stride = 0;  // <= 1: off
  int64_t local_blocks = 0;
  int64_t block_size = 64;
  int64_t head_sliding_step = 0;  // >= 0: slides with the query head; < 0: with the KV head
  int64_t tp_rank = 0;
};

struct LogitParams {
  float scale = 1.0f;
  float soft_cap = 0.0f;                // 0: off
  const float* alibi_slopes = nullptr;  // [num_heads]
  const float* sinks = nullptr;         // [num_heads]
  int64_t window = 0;                   // <= 0: off; keeps q_pos - k_pos < window
  BlockSparse sparse;
  // Reserved for speculative trees: bit k of row i says whether draft token i sees draft token k.
  const uint64_t* tree_mask = nullptr;
};

struct AttentionParams {
  int64_t num_seqs = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t key_size = 0;    // head size of query and K
  int64_t value_size = 0;  // head size of V and the output
  int64_t block_size = 0;

  TokenTensor out;    // [tokens, num_heads, value_size]
  TokenTensor query;  // [tokens, num_heads, key_size]
  CacheTensor key_cache;
  CacheTensor value_cache;
  CacheScale key_scale;
  CacheScale value_scale;
  IndexArray block_tables;  // [num_seqs, max_blocks]
  int64_t max_blocks = 0;
  IndexArray seq_lens;  // [num_seqs]
  LogitParams logits;

  // Natural logarithm of the softmax denominator, [num_heads, tokens]; null: not wanted.
  float* lse = nullptr;
  int64_t lse_head_stride = 0;
  int64_t lse_token_stride = 1;

  // Reserved for caches that hold a subset of the partitions: where local partition i lies in the sequence.
  const int64_t* position_map = nullptr;

  PA_HD int64_t group() const { return num_heads / num_kv_heads; }
};

// States <m, l, o> of the partitions, o unnormalised, each pointer null where the caller wants none of it.
struct PartitionStates {
  float* max_logits = nullptr;  // m [num_seqs, num_heads, partitions]
  float* exp_sums = nullptr;    // l, likewise
  float* out = nullptr;         // o [num_seqs, num_heads, partitions, value_size]
  int64_t partitions = 0;       // per sequence and head, as allocated
};

// One query per sequence, which is its last token. `out` and `query` have one token per sequence.
struct DecodeParams : AttentionParams {
  int64_t max_seq_len = 0;  // bounds seq_lens
  PartitionStates states;   // contiguous
};

enum class Precision : int32_t {
  kDefault,  // probabilities may be rounded to the 16-bit operand type of the matrix product
  kFloat32,
};

// The last query_start_loc[s + 1] - query_start_loc[s] tokens of each sequence are queries; the keys before them come from the
// cache, theirs from `key` and `value`, which are stored unscaled and in the query's type.
struct PrefixParams : AttentionParams {
  TokenTensor key;             // [tokens, num_kv_heads, key_size]
  TokenTensor value;           // [tokens, num_kv_heads, value_size]
  IndexArray query_start_loc;  // [num_seqs + 1]
  IndexArray context_lens;     // [num_seqs]
  int64_t num_tokens = 0;      // of query
  int64_t max_query_len = 0;   // bounds the queries of one sequence
  Precision precision = Precision::kDefault;
};

// out = softmax-weighted mean of two partial results over disjoint keys.
struct MergeParams {
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t head_size = 0;
  TokenTensor out;
  TokenTensor prefix_out;
  TokenTensor suffix_out;
  const float* prefix_lse = nullptr;  // [num_heads, num_tokens]
  const float* suffix_lse = nullptr;
  float* out_lse = nullptr;  // null: not wanted
  int64_t prefix_lse_head_stride = 0, prefix_lse_token_stride = 1;
  int64_t suffix_lse_head_stride = 0, suffix_lse_token_stride = 1;
  int64_t out_lse_head_stride = 0, out_lse_token_stride = 1;
};

// Store token i of `key` and `value` at slot_mapping[i] = block * block_size + place in the block; negative: skip.
struct StoreParams {
  int64_t num_slots = 0;
  int64_t num_kv_heads = 0;
  int64_t key_size = 0;
  int64_t value_size = 0;
  int64_t block_size = 0;
  TokenTensor key;
  TokenTensor value;
  CacheTensor key_cache;
  CacheTensor value_cache;
  CacheScale key_scale;
  CacheScale value_scale;
  const int64_t* slot_mapping = nullptr;
};

// Token i of `key` and `value` := place i % block_size of block block_table(i / block_size). Where their type is the cache's,
// an fp8 type included, elements are copied as they are stored; otherwise they are decoded and rounded.
struct GatherParams {
  int64_t num_tokens = 0;
  int64_t num_kv_heads = 0;
  int64_t key_size = 0;
  int64_t value_size = 0;
  int64_t block_size = 0;
  TokenTensor key;
  TokenTensor value;
  CacheTensor key_cache;
  CacheTensor value_cache;
  CacheScale key_scale;
  CacheScale value_scale;
  IndexArray block_table;
};

// Where the blocks of a cache lie, each in one piece.
struct BlockArray {
  char* data = nullptr;
  int64_t block_stride = 0;  // bytes
};

// Blocks as bytes, between caches and a buffer without gaps: block block_ids(i) of caches[c] and entry (i, c) of the buffer.
struct BlockTransfer {
  const BlockArray* caches = nullptr;
  int64_t num_caches = 0;
  int64_t num_blocks = 0;  // of the smallest cache: an id is one for all
  char* buffer = nullptr;  // [num_ids, num_caches, block_bytes]
  int64_t block_bytes = 0;
  IndexArray block_ids;
  int64_t num_ids = 0;
};

}  // namespace paged_attn
