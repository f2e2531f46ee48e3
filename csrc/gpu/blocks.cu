// copy_blocks: pairs of blocks within each cache, all sources as they were before the call, a later pair for a block before an
// earlier one. Both rules are kept without a look at the pairs on the host: sources that the call overwrites go through scratch
// first, and a pair that a later one overwrites is left out. A block of threads finds either by reading the pairs, which are
// few.

#include <algorithm>

#include "gpu/block_bytes.h"
#include "gpu/grid.h"
#include "gpu/kernels.h"
#include "gpu/shared_layout.h"
#include "gpu/status.h"

namespace paged_attn::gpu {
namespace {

// Caches per launch, whose pointers travel as kernel parameters: 64 of 32 bytes, of the 4 KiB that there are.
constexpr int kCachesPerLaunch = 64;
// Scratch is bounded by taking fewer caches at once.
constexpr int64_t kMaxScratchBytes = int64_t(64) << 20;

struct CopyLaunch {
  CacheBlocks caches[kCachesPerLaunch];
  int num_caches;
  const int64_t* pairs;
  int64_t num_pairs;
  char* scratch;  // [caches][pairs][block_bytes of the largest]
  int64_t scratch_stride;
  int* status;
};

// Whether some pair from `first` on has `block` in its column; the same in every thread. `flag` is shared.
PA_DEVICE bool named(const CopyLaunch& launch, int64_t first, int column, int64_t block, int32_t* flag) {
  platform::block_barrier();
  if (platform::thread_index() == 0) *flag = 0;
  platform::block_barrier();
  for (int64_t i = first + platform::thread_index(); i < launch.num_pairs; i += kCopyThreads) {
    if (launch.pairs[2 * i + column] == block) platform::set_if_zero(flag, 1);
  }
  platform::block_barrier();
  return *flag != 0;
}

// `save`: sources that the call overwrites, to scratch. Otherwise: everything to its place.
PA_KERNEL(kCopyThreads) copy_kernel(const CopyLaunch launch, bool save) {
  int32_t* flag = platform::shared_array<int32_t>(0, 1);
  for (int64_t item = platform::block_index(); item < launch.num_pairs * launch.num_caches; item += platform::num_blocks()) {
    const int64_t pair = item / launch.num_caches;
    const CacheBlocks& cache = launch.caches[item % launch.num_caches];
    const int64_t source = launch.pairs[2 * pair], destination = launch.pairs[2 * pair + 1];
    if (source < 0 || source >= cache.num_blocks || destination < 0 || destination >= cache.num_blocks) {
      if (platform::thread_index() == 0) report(launch.status, Operator::kCopyBlocks, Reason::kBlock, pair);
      continue;
    }
    if (named(launch, pair + 1, 1, destination, flag)) continue;
    const bool overwritten = named(launch, 0, 1, source, flag);
    if (save && !overwritten) continue;
    char* saved = launch.scratch + item * launch.scratch_stride;
    const char* in_cache = cache.data + source * cache.block_stride;
    if (save) {
      copy_bytes(saved, in_cache, cache.block_bytes);
    } else {
      copy_bytes(cache.data + destination * cache.block_stride, overwritten ? saved : in_cache, cache.block_bytes);
    }
  }
}

struct Batch {
  int64_t caches;  // per launch
  int64_t stride;  // of a saved block, in bytes
};

Batch batch_of(const CacheBlocks* caches, int64_t num_caches, int64_t num_pairs) {
  int64_t largest = 1;
  for (int64_t i = 0; i < num_caches; ++i) largest = std::max(largest, caches[i].block_bytes);
  const int64_t stride = round_up(largest, 16);
  const int64_t fit = std::max<int64_t>(kMaxScratchBytes / (stride * std::max<int64_t>(num_pairs, 1)), 1);
  return {std::min({fit, num_caches, int64_t(kCachesPerLaunch)}), stride};
}

}  // namespace

int64_t copy_scratch_bytes(const CacheBlocks* caches, int64_t num_caches, int64_t num_pairs) {
  const Batch batch = batch_of(caches, num_caches, num_pairs);
  return batch.caches * num_pairs * batch.stride;
}

void copy_blocks(const CacheBlocks* caches, int64_t num_caches, const int64_t* pairs, int64_t num_pairs, char* scratch,
                 const Queue& queue) {
  const Batch batch = batch_of(caches, num_caches, num_pairs);
  SharedLayout layout;
  layout.take<int32_t>(1);
  for (int64_t first = 0; first < num_caches; first += batch.caches) {
    CopyLaunch launch{};
    launch.num_caches = int(std::min(batch.caches, num_caches - first));
    std::copy_n(caches + first, launch.num_caches, launch.caches);
    launch.pairs = pairs;
    launch.num_pairs = num_pairs;
    launch.scratch = scratch;
    launch.scratch_stride = batch.stride;
    launch.status = queue.status;
    const LaunchShape shape{grid_blocks(num_pairs * launch.num_caches, 1), kCopyThreads, layout.bytes()};
    for (const bool save : {true, false}) { platform::launch("copy_blocks", copy_kernel, shape, queue.stream, launch, save); }
  }
}

}  // namespace paged_attn::gpu
