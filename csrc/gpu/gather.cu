// gather_blocks: the tokens of a cache's blocks as rows. A block of threads moves a tile of tokens x dims through shared
// memory: read in the cache's order, written in the rows'.

#include "gpu/grid.h"
#include "gpu/kernels.h"
#include "gpu/report.h"
#include "gpu/rows.h"
#include "gpu/shared_layout.h"

namespace paged_attn::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kTileTokens = 16;  // the commonest block size
constexpr int kTileDims = 64;
constexpr int kTileStride = kTileDims + 1;

struct GatherLaunch {
  GatherParams params;
  int64_t entries;  // of the block table, that hold tokens
  int64_t token_tiles;
  int64_t dim_tiles;
  int* status;
};

struct Tile {
  int64_t block;
  int64_t head;
  int64_t token;  // in the block
  int64_t dim;
};

template <typename T>
PA_DEVICE void load_tile(const CacheTensor& cache, const Tile& tile, int64_t block_size, int64_t size, T* stage) {
  const T* from = static_cast<const T*>(cache.data) + cache.offset(tile.block, tile.head);
  // Elements of a group lie together, then tokens, then groups.
  const int group = int(cache.dim_group < kTileDims ? cache.dim_group : kTileDims);
  for (int i = platform::thread_index(); i < kTileTokens * kTileDims; i += kThreads) {
    const int t = i / group % kTileTokens;
    const int d = i / (group * kTileTokens) * group + i % group;
    if (d >= kTileDims || tile.token + t >= block_size || tile.dim + d >= size) continue;
    stage[t * kTileStride + d] = from[(tile.token + t) * cache.token_stride + cache.dim_offset(tile.dim + d)];
  }
}

// `stage` null: the block id named none, and the rows become NaN.
template <typename T>
PA_DEVICE void store_tile(const TokenTensor& to, ElementType cache_type, int64_t first_token, int64_t num_tokens,
                          const Tile& tile, int64_t block_size, int64_t size, const T* stage, float scale) {
  for (int i = platform::thread_index(); i < kTileTokens * kTileDims; i += kThreads) {
    const int t = i / kTileDims, d = i % kTileDims;
    const int64_t token = first_token + tile.token + t, dim = tile.dim + d;
    if (tile.token + t >= block_size || token >= num_tokens || dim >= size) continue;
    const T element = stage ? stage[t * kTileStride + d] : from_float<T>(__builtin_nanf(""));
    const int64_t row = to.offset(token, tile.head);
    if (to.type == cache_type) {
      static_cast<T*>(to.data)[row + dim * to.dim_stride] = element;
    } else {
      store_element(to, row, dim, widen(element) * scale);
    }
  }
}

template <typename T>
PA_KERNEL(kThreads, 1)
gather_kernel(const GatherLaunch launch) {
  const GatherParams& params = launch.params;
  T* stage = platform::shared_array<T>(0, kTileTokens * kTileStride);
  const int64_t tiles = launch.entries * launch.token_tiles * params.num_kv_heads * launch.dim_tiles;
  for (int64_t item = platform::block_index(); item < 2 * tiles; item += platform::num_blocks()) {
    const bool is_key = item < tiles;
    int64_t rest = item % tiles;
    Tile tile{};
    tile.dim = rest % launch.dim_tiles * kTileDims;
    rest /= launch.dim_tiles;
    tile.token = rest % launch.token_tiles * kTileTokens;
    rest /= launch.token_tiles;
    tile.head = rest % params.num_kv_heads;
    const int64_t entry = rest / params.num_kv_heads;
    tile.block = params.block_table(entry);
    const bool valid = tile.block >= 0 && tile.block < params.key_cache.num_blocks;
    if (!valid && platform::thread_index() == 0) report(launch.status, Operator::kGatherBlocks, Reason::kBlock, entry);
    const CacheTensor& cache = is_key ? params.key_cache : params.value_cache;
    const int64_t size = is_key ? params.key_size : params.value_size;
    if (valid) load_tile(cache, tile, params.block_size, size, stage);
    platform::block_barrier();
    store_tile<T>(is_key ? params.key : params.value, cache.type, entry * params.block_size, params.num_tokens, tile,
                  params.block_size, size, valid ? stage : nullptr,
                  is_key ? params.key_scale(tile.head) : params.value_scale(tile.head));
    platform::block_barrier();
  }
}

}  // namespace

void gather_blocks(const GatherParams& params, const Queue& queue) {
  const int64_t size = params.key_size > params.value_size ? params.key_size : params.value_size;
  const GatherLaunch launch{params, ceil_div(params.num_tokens, params.block_size), ceil_div(params.block_size, kTileTokens),
                            ceil_div(size, kTileDims), queue.status};
  const int64_t tiles = launch.entries * launch.token_tiles * params.num_kv_heads * launch.dim_tiles;
  with_type(params.key_cache.type, [&](auto tag) {
    using T = decltype(tag);
    SharedLayout layout;
    layout.take<T>(kTileTokens * kTileStride);
    platform::launch("gather_blocks", gather_kernel<T>, {grid_blocks(2 * tiles, 1), kThreads, layout.bytes()}, queue.stream,
                     launch);
  });
}

}  // namespace paged_attn::gpu
