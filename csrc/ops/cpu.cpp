// The CPU key: value checks that need the data, then the kernels.

#include "cpu/block_copy.h"
#include "ops/cpu_kernels.h"
#include "ops/entry_points.h"

namespace paged_attn::ops {
namespace {

struct Cpu {
  static void decode(const char* op, const DecodeArguments& arguments, const PartitionArguments* partitions);
  static void prefix(const char* op, const PrefixArguments& arguments);
  static void merge(const char* op, const MergeArguments& arguments);
  static void store(const char* op, const StoreArguments& arguments);
  static void gather(const char* op, const GatherArguments& arguments);
  static void pack(const char* op, const TransferCall& call);
  static void scatter(const char* op, const TransferCall& call);
  static void copy_blocks(const char* op, at::TensorList key_caches, at::TensorList value_caches,
                          const at::Tensor& block_mapping);
  static void swap_blocks(const char* op, const at::Tensor& src, const at::Tensor& dst, const at::Tensor& block_mapping);
};

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

void Cpu::decode(const char* op, const DecodeArguments& arguments, const PartitionArguments* partitions) {
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

void Cpu::prefix(const char* op, const PrefixArguments& arguments) {
  const Call<PrefixParams> call = prefix_call(op, arguments);
  const PrefixParams& params = call.params;
  const int64_t first = params.query_start_loc(0);
  TORCH_CHECK_VALUE(first >= 0, op, ": query_start_loc[0] is ", first, ", takes 0 or more");
  for (int64_t s = 0; s < params.num_seqs; ++s) {
    const int64_t begin = params.query_start_loc(s), end = params.query_start_loc(s + 1);
    TORCH_CHECK_VALUE(end >= begin && end <= arguments.query.size(0), op, ": query_start_loc[", s + 1, "] is ", end, ", takes ",
                      begin, " (the one before it) to ", arguments.query.size(0), " (tokens of query)");
    TORCH_CHECK_VALUE(end - begin <= arguments.max_query_len, op, ": max_query_len is ", arguments.max_query_len,
                      ", takes at least ", end - begin, ", the queries of sequence ", s);
    const int64_t context = params.context_lens(s), length = params.seq_lens(s);
    TORCH_CHECK_VALUE(context >= 0, op, ": context_lens[", s, "] is ", context, ", takes 0 or more");
    TORCH_CHECK_VALUE(length == context + end - begin, op, ": seq_lens[", s, "] is ", length,
                      ", takes context_lens + queries = ", context + end - begin);
    check_blocks_of_sequence(op, params, arguments.block_tables, s, context, "context_lens");
  }
  cpu_kernels().prefix(params, parallel());
}

void Cpu::merge(const char* op, const MergeArguments& arguments) {
  cpu_kernels().merge(merge_call(op, arguments).params, parallel());
}

void Cpu::store(const char* op, const StoreArguments& arguments) {
  const Call<StoreParams> call = store_call(op, arguments);
  const StoreParams& params = call.params;
  const int64_t slots = params.key_cache.num_blocks * params.block_size;
  for (int64_t i = 0; i < params.num_slots; ++i) {
    TORCH_CHECK_VALUE(params.slot_mapping[i] < slots, op, ": slot_mapping[", i, "] is ", params.slot_mapping[i],
                      ", takes up to ", slots - 1, ", the last slot of the cache, or a negative number to skip the token");
  }
  cpu_kernels().store(params, parallel());
}

void check_block_ids(const char* op, const char* name, const IndexArray& ids, int64_t count, const char* of,
                     int64_t num_blocks) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(ids(i) >= 0 && ids(i) < num_blocks, op, ": ", name, "[", i, "] is ", ids(i), ", takes a block of ", of,
                      ", 0 to ", num_blocks - 1);
  }
}

void Cpu::gather(const char* op, const GatherArguments& arguments) {
  const Call<GatherParams> call = gather_call(op, arguments);
  const GatherParams& params = call.params;
  check_block_ids(op, "block_table", params.block_table, ceil_div(params.num_tokens, params.block_size), "the cache",
                  params.key_cache.num_blocks);
  cpu_kernels().gather(params, parallel());
}

void Cpu::pack(const char* op, const TransferCall& call) {
  check_block_ids(op, "block_ids", call.params.block_ids, call.params.num_ids, "caches", call.params.num_blocks);
  cpu::pack_blocks(call.params, parallel());
}

void Cpu::scatter(const char* op, const TransferCall& call) {
  check_block_ids(op, "block_ids", call.params.block_ids, call.params.num_ids, "caches", call.params.num_blocks);
  cpu::scatter_blocks(call.params, parallel());
}

void Cpu::copy_blocks(const char* op, at::TensorList key_caches, at::TensorList value_caches, const at::Tensor& block_mapping) {
  const std::vector<BlockCopy> copies = copy_call(op, key_caches, value_caches, block_mapping);
  const at::Tensor pairs = block_pairs(op, block_mapping);
  for (size_t i = 0; i < copies.size(); ++i) {
    const char* name = i < key_caches.size() ? "key_caches" : "value_caches";
    check_pairs(op, pairs, 0, name, copies[i].src_blocks);
    check_pairs(op, pairs, 1, name, copies[i].dst_blocks);
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

void Cpu::swap_blocks(const char* op, const at::Tensor& src, const at::Tensor& dst, const at::Tensor& block_mapping) {
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

PA_LIBRARY_IMPL(CPU, m) { EntryPoints<Cpu>::register_all(m); }

}  // namespace paged_attn::ops
