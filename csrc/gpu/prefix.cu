// Prefix (chunked prefill) attention: a block per tile of rows.

#include <type_traits>

#include "gpu/grid.h"
#include "gpu/kernels.h"
#include "gpu/prefix_agent.h"

namespace paged_attn::gpu {
namespace {

template <typename T, int kValueChunks>
PA_KERNEL(kPrefixThreads, 1)
prefix_kernel(const PrefixLaunch launch) {
  PrefixAgent<T, kValueChunks> agent(launch, PrefixShared());
  const int64_t heads = launch.params.num_seqs * launch.params.num_kv_heads;
  for (int64_t item = platform::block_index(); item < heads * launch.tiles; item += platform::num_blocks()) {
    platform::block_barrier();  // the item before is done with shared memory
    // The last tiles have the most keys, so they come first.
    agent.attend(item % heads / launch.params.num_kv_heads, item % launch.params.num_kv_heads, launch.tiles - 1 - item / heads);
  }
}

template <typename F>
void with_value_chunks(int64_t size, F&& f) {
  if (size <= kValueDims) return f(std::integral_constant<int, 1>{});
  if (size <= 2 * kValueDims) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, kMaxValueChunks>{});
}

}  // namespace

void prefix(const PrefixParams& params, const Queue& queue) {
  const CacheTensor& k = params.key_cache;
  const CacheTensor& v = params.value_cache;
  const PrefixLaunch launch{params, ceil_div(params.max_query_len * params.group(), kTileRows), has_key_packets(k),
                            has_value_packets(v, params.block_size), queue.status};
  const int64_t tiles = params.num_seqs * params.num_kv_heads * launch.tiles;
  with_type(k.type, [&](auto tag) {
    with_value_chunks(params.value_size, [&](auto chunks) {
      platform::launch("prefix_attention", prefix_kernel<decltype(tag), decltype(chunks)::value>,
                       {grid_blocks(tiles, 1), kPrefixThreads, PrefixShared().bytes}, queue.stream, launch);
    });
  });
}

}  // namespace paged_attn::gpu
