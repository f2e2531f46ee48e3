// The CUDA key, which CoreX answers to as well. Values stay on the device and are checked there (docs/contract.md, rule 5);
// nothing here waits for it, except where PAGED_ATTN_CHECK=1 asks for that.

#include <ATen/ATen.h>

#include <cstdlib>
#include <string>

#include "ops/entry_points.h"
#include "ops/gpu_queue.h"

namespace paged_attn::ops {
namespace {

struct Gpu {
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

const char* name_of(gpu::Operator op) {
  switch (op) {
    case gpu::Operator::kDecode: return "paged_attention_v1 or _v2";
    case gpu::Operator::kPrefix: return "prefix_attention";
    case gpu::Operator::kStore: return "reshape_and_cache";
    case gpu::Operator::kCopyBlocks: return "copy_blocks";
    case gpu::Operator::kGatherBlocks: return "gather_blocks";
    case gpu::Operator::kPackBlocks: return "pack_blocks";
    case gpu::Operator::kScatterBlocks: return "scatter_blocks";
    case gpu::Operator::kNone: break;
  }
  return "an operator";
}

std::string describe(const gpu::DeviceError& error) {
  const std::string index = std::to_string(error.index) + (error.index == gpu::DeviceError::kMaxIndex ? " or later" : "");
  const std::string what = name_of(error.op) + std::string(": ");
  switch (error.reason) {
    case gpu::Reason::kLength:
      return what + "sequence " + index +
             " has a length that does not fit its block table, the queries of the call, or the longest length that the call "
             "names; its rows are NaN";
    case gpu::Reason::kBlock:
      if (error.op == gpu::Operator::kDecode || error.op == gpu::Operator::kPrefix) {
        return what + "sequence " + index +
               " has a block id inside its length that names no block of the cache; its rows are NaN";
      }
      return what + "entry " + index + " names no block of the cache; it was skipped";
    default: return what + "token " + index + " has a slot beyond the cache; it was not stored";
  }
}

// Raises what the current device's sticky word holds, and clears it. Waits for the stream.
void raise_and_clear(const gpu::Queue& queue) {
  int word = 0;
  const int zero = 0;
  gpu::platform::copy(&word, queue.status, sizeof word, queue.stream);
  gpu::platform::synchronize(queue.stream);
  if (word == 0) return;
  gpu::platform::copy(queue.status, &zero, sizeof zero, queue.stream);
  gpu::platform::synchronize(queue.stream);
  TORCH_CHECK_VALUE(false, describe(gpu::DeviceError::unpack(word)));
}

void check_device_errors(int64_t device_index) {
#if defined(PAGED_ATTN_SIMT)
  const c10::Device device(c10::kCPU);
  (void)device_index;
#else
  const c10::Device device(c10::kCUDA, c10::DeviceIndex(device_index));
#endif
  const DeviceScope scope(device);
  raise_and_clear(scope.queue());
}

void after_call(const gpu::Queue& queue) {
  const char* value = std::getenv("PAGED_ATTN_CHECK");
  if (value && std::string(value) == "1") raise_and_clear(queue);
}

// Room on the device for the length of the call: the caching allocator hands it on in stream order.
at::Tensor scratch(int64_t elements, at::ScalarType type, const at::Tensor& like) {
  return at::empty({elements}, like.options().dtype(type));
}

void Gpu::decode(const char* op, const DecodeArguments& arguments, const PartitionArguments* partitions) {
  Call<DecodeParams> call = decode_call(op, arguments, partitions);
  const DeviceScope scope(arguments.query.device());
  const at::Tensor room = scratch(gpu::decode_scratch_floats(call.params), at::kFloat, arguments.query);
  gpu::decode(call.params, room.data_ptr<float>(), scope.queue());
  after_call(scope.queue());
}

void Gpu::prefix(const char* op, const PrefixArguments& arguments) {
  const Call<PrefixParams> call = prefix_call(op, arguments);
  const DeviceScope scope(arguments.query.device());
  gpu::prefix(call.params, scope.queue());
  after_call(scope.queue());
}

void Gpu::merge(const char* op, const MergeArguments& arguments) {
  const Call<MergeParams> call = merge_call(op, arguments);
  const DeviceScope scope(arguments.out.device());
  gpu::merge_partials(call.params, scope.queue());
}

void Gpu::store(const char* op, const StoreArguments& arguments) {
  const Call<StoreParams> call = store_call(op, arguments);
  const DeviceScope scope(arguments.key.device());
  gpu::store(call.params, scope.queue());
  after_call(scope.queue());
}

void Gpu::gather(const char* op, const GatherArguments& arguments) {
  const Call<GatherParams> call = gather_call(op, arguments);
  const DeviceScope scope(arguments.key.device());
  gpu::gather_blocks(call.params, scope.queue());
  after_call(scope.queue());
}

void Gpu::pack(const char*, const TransferCall& call) {
  const DeviceScope scope(call.device);
  gpu::pack_blocks(call.params, scope.queue());
  after_call(scope.queue());
}

void Gpu::scatter(const char*, const TransferCall& call) {
  const DeviceScope scope(call.device);
  const at::Tensor room = at::empty({gpu::scatter_scratch_ints(call.params)}, at::dtype(at::kInt).device(call.device));
  gpu::scatter_blocks(call.params, room.data_ptr<int>(), scope.queue());
  after_call(scope.queue());
}

void Gpu::copy_blocks(const char* op, at::TensorList key_caches, at::TensorList value_caches, const at::Tensor& block_mapping) {
  const std::vector<BlockCopy> copies = copy_call(op, key_caches, value_caches, block_mapping);
  const at::Tensor pairs = block_pairs(op, block_mapping);
  if (copies.empty() || pairs.size(0) == 0) return;
  std::vector<gpu::CacheBlocks> caches;
  for (const BlockCopy& copy : copies) caches.push_back({copy.dst, copy.dst_block_stride, copy.block_bytes, copy.dst_blocks});
  const DeviceScope scope(block_mapping.device());
  const int64_t num_caches = int64_t(caches.size());
  const at::Tensor room = scratch(gpu::copy_scratch_bytes(caches.data(), num_caches, pairs.size(0)), at::kByte, block_mapping);
  gpu::copy_blocks(caches.data(), num_caches, pairs.const_data_ptr<int64_t>(), pairs.size(0),
                   static_cast<char*>(room.data_ptr()), scope.queue());
  after_call(scope.queue());
}

// One copy per run of pairs whose blocks follow each other in both tensors: a copy costs microseconds to queue, whatever its
// size.
struct BlockRuns {
  const BlockCopy& blocks;
  const int64_t* pairs;
  int64_t num_pairs;

  bool joins(int64_t i) const {
    return pairs[2 * i] == pairs[2 * i - 2] + 1 && pairs[2 * i + 1] == pairs[2 * i - 1] + 1 &&
           blocks.src_block_stride == blocks.block_bytes && blocks.dst_block_stride == blocks.block_bytes;
  }
  template <typename Copy>
  void for_each(Copy copy) const {
    for (int64_t begin = 0, end = 1; begin < num_pairs; begin = end++) {
      while (end < num_pairs && joins(end)) ++end;
      copy(begin, end - begin);
    }
  }
};

// [n, 2] on the CPU. Device to host, host to device, or within a device; host memory may be pinned or pageable (then the
// runtime stages it, and may wait).
void Gpu::swap_blocks(const char* op, const at::Tensor& src, const at::Tensor& dst, const at::Tensor& block_mapping) {
  const at::Tensor pairs = block_pairs(op, block_mapping);
  TORCH_CHECK_VALUE(block_mapping.device().is_cpu(), op, ": block_mapping is on ", block_mapping.device(), ", takes the CPU");
  TORCH_CHECK_VALUE(src.device().is_cpu() || dst.device().is_cpu() || src.device() == dst.device(), op, ": src is on ",
                    src.device(), ", dst on ", dst.device(), ", takes one device, with or without the CPU");
  const BlockCopy copy = block_copy(op, "src", src, "dst", dst);
  check_pairs(op, pairs, 0, "src", copy.src_blocks);
  check_pairs(op, pairs, 1, "dst", copy.dst_blocks);
  const BlockRuns runs{copy, pairs.const_data_ptr<int64_t>(), pairs.size(0)};
  if (runs.num_pairs == 0) return;
  const DeviceScope scope(src.device().is_cpu() ? dst.device() : src.device());
  const gpu::Queue queue = scope.queue();
  // Copies run in stream order, so only a source that an earlier copy overwrites needs saving; blocks of one storage may
  // overlap in ways that ids do not tell, so then all sources are saved.
  const bool aliased = src.is_alias_of(dst);
  const at::Tensor saved = scratch(aliased ? runs.num_pairs * copy.block_bytes : 0, at::kByte, src);
  const char* saved_data = static_cast<const char*>(saved.data_ptr());
  if (aliased) {
    runs.for_each([&](int64_t i, int64_t count) {
      gpu::platform::copy(static_cast<char*>(saved.data_ptr()) + i * copy.block_bytes,
                          copy.src + runs.pairs[2 * i] * copy.src_block_stride, count * copy.block_bytes, queue.stream);
    });
  }
  runs.for_each([&](int64_t i, int64_t count) {
    const char* from = aliased ? saved_data + i * copy.block_bytes : copy.src + runs.pairs[2 * i] * copy.src_block_stride;
    gpu::platform::copy(copy.dst + runs.pairs[2 * i + 1] * copy.dst_block_stride, from, count * copy.block_bytes, queue.stream);
  });
}

}  // namespace

PA_LIBRARY_IMPL(PA_DEVICE_KEY, m) { EntryPoints<Gpu>::register_all(m); }

// Has no tensor to be dispatched by, so it belongs to this library alone.
PA_LIBRARY_FRAGMENT(m) { m.def("check_device_errors(int device_index) -> ()", check_device_errors); }

}  // namespace paged_attn::ops
