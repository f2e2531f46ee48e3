// copy_blocks, pack_blocks, scatter_blocks: whole cache blocks, moved as bytes.
//
// Of two that go to one block the later stays, and copy_blocks reads every source as it was before the call. Both rules are
// kept without a look at the ids on the host: a table on the device notes the last entry that writes each block. An entry that
// is not the last for its block is left out, and a source that some entry overwrites goes through scratch first.

#include <algorithm>

#include "gpu/block_bytes.h"
#include "gpu/grid.h"
#include "gpu/kernels.h"
#include "gpu/report.h"

namespace paged_attn::gpu {
namespace {

// Caches per launch, whose pointers travel as kernel parameters, of which there are 4 KiB.
constexpr int kCachesPerLaunch = 64;
// copy_blocks bounds its scratch by taking fewer caches at once.
constexpr int64_t kMaxScratchBytes = int64_t(64) << 20;

// writers[b]: 1 + the last entry that writes block b; 0: none.
PA_KERNEL(kCopyThreads, 1) clear_writers(int* writers, int64_t num_blocks) {
  for (int64_t i = platform::block_index() * kCopyThreads + platform::thread_index(); i < num_blocks;
       i += platform::num_blocks() * kCopyThreads) {
    writers[i] = 0;
  }
}

PA_KERNEL(kCopyThreads, 1) mark_writers(int* writers, int64_t num_blocks, const IndexArray ids, int64_t num_ids) {
  for (int64_t i = platform::block_index() * kCopyThreads + platform::thread_index(); i < num_ids;
       i += platform::num_blocks() * kCopyThreads) {
    const int64_t block = ids(i);
    if (block >= 0 && block < num_blocks) platform::raise_to(&writers[block], int(i + 1));
  }
}

void find_writers(const char* name, int* writers, int64_t num_blocks, const IndexArray& ids, int64_t num_ids,
                  const Queue& queue) {
  platform::launch(name, clear_writers, {grid_blocks(num_blocks, kCopyThreads), kCopyThreads, 0}, queue.stream, writers,
                   num_blocks);
  platform::launch(name, mark_writers, {grid_blocks(num_ids, kCopyThreads), kCopyThreads, 0}, queue.stream, writers, num_blocks,
                   ids, num_ids);
}

struct CopyLaunch {
  CacheBlocks caches[kCachesPerLaunch];
  int num_caches;
  IndexArray sources;
  IndexArray destinations;
  int64_t num_pairs;
  const int* writers;
  char* saved;  // [pairs][caches][saved_stride]
  int64_t saved_stride;
  int* status;
};

// `save`: sources that the call overwrites, to scratch. Otherwise: everything to its place.
PA_KERNEL(kCopyThreads, 1) copy_kernel(const CopyLaunch launch, bool save) {
  for (int64_t item = platform::block_index(); item < launch.num_pairs * launch.num_caches; item += platform::num_blocks()) {
    const int64_t pair = item / launch.num_caches;
    const CacheBlocks& cache = launch.caches[item % launch.num_caches];
    const int64_t source = launch.sources(pair), destination = launch.destinations(pair);
    if (source < 0 || source >= cache.num_blocks || destination < 0 || destination >= cache.num_blocks) {
      if (platform::thread_index() == 0) report(launch.status, Operator::kCopyBlocks, Reason::kBlock, pair);
      continue;
    }
    const bool overwritten = launch.writers[source] != 0;
    if (launch.writers[destination] != int(pair + 1) || (save && !overwritten)) continue;
    char* saved = launch.saved + item * launch.saved_stride;
    const char* in_cache = cache.data + source * cache.block_stride;
    if (save) {
      copy_bytes(saved, in_cache, cache.block_bytes);
    } else {
      copy_bytes(cache.data + destination * cache.block_stride, overwritten ? saved : in_cache, cache.block_bytes);
    }
  }
}

// How the scratch of copy_blocks is used.
struct CopyPlan {
  int64_t num_blocks;      // of the largest cache
  int64_t caches_at_once;  // per launch
  int64_t saved_stride;    // of a saved block, in bytes
  int64_t writers_bytes;   // the table comes first

  CopyPlan(const CacheBlocks* caches, int64_t num_caches, int64_t num_pairs) : num_blocks(0), saved_stride(16) {
    for (int64_t i = 0; i < num_caches; ++i) {
      num_blocks = std::max(num_blocks, caches[i].num_blocks);
      saved_stride = std::max(saved_stride, round_up(caches[i].block_bytes, 16));
    }
    const int64_t fit = std::max<int64_t>(kMaxScratchBytes / (saved_stride * std::max<int64_t>(num_pairs, 1)), 1);
    caches_at_once = std::min({fit, num_caches, int64_t(kCachesPerLaunch)});
    writers_bytes = round_up(num_blocks * int64_t(sizeof(int)), 16);
  }
};

struct TransferLaunch {
  BlockArray caches[kCachesPerLaunch];
  int num_caches;
  int first_cache;
  BlockTransfer transfer;
  const int* writers;  // scatter alone
  int* status;
};

template <bool kScatter>
PA_KERNEL(kCopyThreads, 1)
transfer_kernel(const TransferLaunch launch) {
  const BlockTransfer& transfer = launch.transfer;
  for (int64_t item = platform::block_index(); item < transfer.num_ids * launch.num_caches; item += platform::num_blocks()) {
    const int64_t i = item / launch.num_caches;
    const BlockArray& cache = launch.caches[item % launch.num_caches];
    const int64_t block = transfer.block_ids(i);
    char* entry =
        transfer.buffer + (i * transfer.num_caches + launch.first_cache + item % launch.num_caches) * transfer.block_bytes;
    if (block < 0 || block >= transfer.num_blocks) {
      const Operator op = kScatter ? Operator::kScatterBlocks : Operator::kPackBlocks;
      if (platform::thread_index() == 0) report(launch.status, op, Reason::kBlock, i);
      continue;
    }
    if constexpr (kScatter) {
      if (launch.writers[block] == int(i + 1)) copy_bytes(cache.data + block * cache.block_stride, entry, transfer.block_bytes);
    } else {
      copy_bytes(entry, cache.data + block * cache.block_stride, transfer.block_bytes);
    }
  }
}

template <bool kScatter>
void launch_transfer(const char* name, const BlockTransfer& transfer, const int* writers, const Queue& queue) {
  for (int64_t first = 0; first < transfer.num_caches; first += kCachesPerLaunch) {
    TransferLaunch launch{};
    launch.num_caches = int(std::min<int64_t>(kCachesPerLaunch, transfer.num_caches - first));
    std::copy_n(transfer.caches + first, launch.num_caches, launch.caches);
    launch.first_cache = int(first);
    launch.transfer = transfer;
    launch.transfer.caches = nullptr;  // the host's; what the launch serves is in `caches`
    launch.writers = writers;
    launch.status = queue.status;
    platform::launch(name, transfer_kernel<kScatter>, {grid_blocks(transfer.num_ids * launch.num_caches, 1), kCopyThreads, 0},
                     queue.stream, launch);
  }
}

}  // namespace

int64_t copy_scratch_bytes(const CacheBlocks* caches, int64_t num_caches, int64_t num_pairs) {
  const CopyPlan plan(caches, num_caches, num_pairs);
  return plan.writers_bytes + plan.caches_at_once * num_pairs * plan.saved_stride;
}

void copy_blocks(const CacheBlocks* caches, int64_t num_caches, const int64_t* pairs, int64_t num_pairs, char* scratch,
                 const Queue& queue) {
  const CopyPlan plan(caches, num_caches, num_pairs);
  int* writers = reinterpret_cast<int*>(scratch);
  const IndexArray sources{pairs, true, 0, 2}, destinations{pairs + 1, true, 0, 2};
  find_writers("copy_blocks, writers", writers, plan.num_blocks, destinations, num_pairs, queue);
  for (int64_t first = 0; first < num_caches; first += plan.caches_at_once) {
    CopyLaunch launch{};
    launch.num_caches = int(std::min(plan.caches_at_once, num_caches - first));
    std::copy_n(caches + first, launch.num_caches, launch.caches);
    launch.sources = sources;
    launch.destinations = destinations;
    launch.num_pairs = num_pairs;
    launch.writers = writers;
    launch.saved = scratch + plan.writers_bytes;
    launch.saved_stride = plan.saved_stride;
    launch.status = queue.status;
    for (const bool save : {true, false}) {
      platform::launch("copy_blocks", copy_kernel, {grid_blocks(num_pairs * launch.num_caches, 1), kCopyThreads, 0},
                       queue.stream, launch, save);
    }
  }
}

void pack_blocks(const BlockTransfer& transfer, const Queue& queue) {
  launch_transfer<false>("pack_blocks", transfer, nullptr, queue);
}

int64_t scatter_scratch_ints(const BlockTransfer& transfer) { return transfer.num_blocks; }

void scatter_blocks(const BlockTransfer& transfer, int* scratch, const Queue& queue) {
  find_writers("scatter_blocks, writers", scratch, transfer.num_blocks, transfer.block_ids, transfer.num_ids, queue);
  launch_transfer<true>("scatter_blocks", transfer, scratch, queue);
}

}  // namespace paged_attn::gpu
