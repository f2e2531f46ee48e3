// Prefix attention (chunked prefill): the last tokens of each sequence attend to the paged context before them and, causally,
// to each other.
//
// Work item: (sequence, KV head, tile of queries), all heads of the group: its rows. Against tiles of 128 keys at absolute
// positions, in ascending order:
//   1. K and V of the tile are packed for the tile product, whether they come from the cache or from this call's tensors; what
//   no row of
//      the item sees is zero and never read;
//   2. logits = Q . K^T;
//   3. online softmax: the row's state <m, l> absorbs the tile, its o is rescaled where m rose;
//   4. o += probabilities . V.
// A row's arithmetic depends on the position of the tile's keys alone, so its bits do not depend on where the chunk begins, on
// the rows beside it, or on which keys are cached already. (Dao 2023, FlashAttention-2, over a paged cache.)

#include <algorithm>
#include <vector>

#include "core/logits.h"
#include "core/softmax_state.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/rows.h"
#include "cpu/kernels/scratch.h"
#include "cpu/kernels/tile_product.h"

namespace paged_attn::cpu {
namespace {

// Part of the result's definition (see above), hence one constant for every instruction set and size.
constexpr int64_t kTileKeys = 128;
static_assert(kTileKeys % kPanel == 0 && kTileKeys % kDepthBlock == 0, "a tile is a whole number of panels and depth blocks");

// Rows of an item. Each packed key is used once per row, so many rows hide the packing; their Q, logits and o (256 dims of
// float: 2.5 KiB a row) should stay in a second-level cache of 1 MiB beside the packed tile.
constexpr int64_t kTileRows = 192;

struct Item {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_token;  // of the chunk, in [0, query length)
  int64_t num_tokens;
};

template <typename Product>
class PrefixItem {
  using Element = typename Product::Element;

 public:
  PrefixItem(const PrefixParams& params, const Item& item, Scratch& scratch)
      : params_(params),
        item_(item),
        group_(params.group()),
        rows_(item.num_tokens * group_),
        context_(params.context_lens(item.sequence)),
        query_begin_(params.query_start_loc(item.sequence)),
        depths_(round_up(params.key_size, Product::kDepthPerStep)),
        columns_(round_up(params.value_size, kPanel)) {
    scratch.reset(Scratch::bytes_for<Element>(rows_ * depths_) + Scratch::bytes_for<Element>(kTileKeys * depths_) +
                  Scratch::bytes_for<Element>(kTileKeys * columns_) + Scratch::bytes_for<Element>(rows_ * kTileKeys) +
                  Scratch::bytes_for<float>(rows_ * kTileKeys) + Scratch::bytes_for<float>(rows_ * columns_) +
                  Scratch::bytes_for<SoftmaxState<float>>(rows_) +
                  Scratch::bytes_for<float>(std::max(params.key_size, params.value_size)));
    query_ = scratch.take<Element>(rows_ * depths_);
    packed_key_ = scratch.take<Element>(kTileKeys * depths_);
    packed_value_ = scratch.take<Element>(kTileKeys * columns_);
    probabilities_ = scratch.take<Element>(rows_ * kTileKeys);
    logits_ = scratch.take<float>(rows_ * kTileKeys);
    out_ = scratch.take<float>(rows_ * columns_);
    states_ = scratch.take<SoftmaxState<float>>(rows_);
    row_ = scratch.take<float>(std::max(params.key_size, params.value_size));
  }

  void run() {
    load_query();
    std::fill_n(out_, rows_ * columns_, 0.0f);
    std::fill_n(states_, rows_, SoftmaxState<float>{kNegativeInfinity, 0.0f});
    const Range seen = keys_seen(params_, item_);
    for (int64_t tile = seen.begin / kTileKeys * kTileKeys; tile < seen.end; tile += kTileKeys) {
      const Range keys{std::max(seen.begin, tile), std::min(seen.end, tile + kTileKeys)};
      const int64_t columns = round_up(keys.end - tile, kPanel);
      pack(tile, keys, columns);
      std::fill_n(logits_, rows_ * kTileKeys, 0.0f);
      tile_product<Product>(query_, depths_, packed_key_, depths_, logits_, kTileKeys, rows_, columns, depths_);
      for (int64_t row = 0; row < rows_; ++row) absorb_tile(row, tile, columns);
      tile_product<Product>(probabilities_, kTileKeys, packed_value_, kTileKeys, out_, columns_, rows_, columns_, columns);
    }
    for (int64_t row = 0; row < rows_; ++row) write_row(row);
  }

  // Keys that some row of an item sees.
  static Range keys_seen(const PrefixParams& params, const Item& item) {
    const int64_t first = params.context_lens(item.sequence) + item.first_token;
    return {visible_range(params.logits, first).begin, visible_range(params.logits, first + item.num_tokens - 1).end};
  }

 private:
  int64_t token_of(int64_t row) const { return item_.first_token + row / group_; }
  int64_t head_of(int64_t row) const { return item_.kv_head * group_ + row % group_; }

  void load_query() {
    for (int64_t row = 0; row < rows_; ++row) {
      load_row(params_.query, query_begin_ + token_of(row), head_of(row), params_.key_size, row_);
      for (int64_t d = 0; d < depths_; ++d) {
        query_[row * depths_ + d] = Product::to_element(d < params_.key_size ? row_[d] : 0.0f);
      }
    }
  }

  // K as B of [dims][keys], V as B of [keys][dims]; `columns` keys, zero outside `keys`.
  void pack(int64_t tile, Range keys, int64_t columns) {
    std::fill_n(packed_key_, columns * depths_, Element{});
    std::fill_n(packed_value_, kTileKeys * columns_, Element{});
    with_type(params_.key_cache.type, [&](auto cached) {
      with_type(params_.key.type, [&](auto fresh) {
        for (int64_t position = keys.begin; position < keys.end; ++position) {
          const int64_t key = position - tile;
          if (position < context_) {
            const int64_t block = params_.block_tables(item_.sequence, position / params_.block_size);
            pack_cached<decltype(cached)>(block, position % params_.block_size, key);
          } else {
            pack_fresh<decltype(fresh)>(query_begin_ + position - context_, key);
          }
        }
      });
    });
  }

  void set_key(int64_t dim, int64_t key, float value) {
    packed_key_[packed_offset<Product>(dim, key, depths_)] = Product::to_element(value);
  }
  void set_value(int64_t dim, int64_t key, float value) {
    packed_value_[packed_offset<Product>(key, dim, kTileKeys)] = Product::to_element(value);
  }

  template <typename T>
  void pack_cached(int64_t block, int64_t place, int64_t key) {
    const CacheTensor& kc = params_.key_cache;
    const CacheTensor& vc = params_.value_cache;
    const T* k = static_cast<const T*>(kc.data) + kc.offset(block, item_.kv_head) + place * kc.token_stride;
    const T* v = static_cast<const T*>(vc.data) + vc.offset(block, item_.kv_head) + place * vc.token_stride;
    const float key_scale = params_.key_scale(item_.kv_head);
    const float value_scale = params_.value_scale(item_.kv_head);
    for (int64_t first = 0; first < params_.key_size; first += kc.dim_group, k += kc.group_stride) {
      const int64_t count = std::min(kc.dim_group, params_.key_size - first);
      for (int64_t i = 0; i < count; ++i) set_key(first + i, key, widen(k[i]) * key_scale);
    }
    for (int64_t first = 0; first < params_.value_size; first += vc.dim_group, v += vc.group_stride) {
      const int64_t count = std::min(vc.dim_group, params_.value_size - first);
      for (int64_t i = 0; i < count; ++i) set_value(first + i, key, widen(v[i]) * value_scale);
    }
  }

  template <typename T>
  void pack_fresh(int64_t token, int64_t key) {
    const T* k = static_cast<const T*>(params_.key.data) + params_.key.offset(token, item_.kv_head);
    const T* v = static_cast<const T*>(params_.value.data) + params_.value.offset(token, item_.kv_head);
    for (int64_t d = 0; d < params_.key_size; ++d) set_key(d, key, widen(k[d * params_.key.dim_stride]));
    for (int64_t d = 0; d < params_.value_size; ++d) set_value(d, key, widen(v[d * params_.value.dim_stride]));
  }

  // Dot products of one row to probabilities, its state and o brought up to date.
  void absorb_tile(int64_t row, int64_t tile, int64_t columns) {
    float* logits = logits_ + row * kTileKeys;
    Element* probabilities = probabilities_ + row * kTileKeys;
    const int64_t query_position = context_ + token_of(row);
    const Range range = visible_range(params_.logits, query_position);
    const int64_t begin = std::max<int64_t>(range.begin - tile, 0);
    const int64_t end = std::min<int64_t>(range.end - tile, columns);
    if (begin >= end) {
      std::fill_n(probabilities, columns, Element{});
      return;
    }
    const float slope = alibi_slope(params_.logits, head_of(row));
    const float distance = float(tile - query_position);
    for (int64_t i = 0; i < columns; i += Vec::kLanes) {
      logit(Vec::load(logits + i), params_.logits.scale, params_.logits.soft_cap, slope, iota() + Vec(distance + float(i)))
          .store(logits + i);
    }
    std::fill(logits, logits + begin, kNegativeInfinity);
    std::fill(logits + end, logits + columns, kNegativeInfinity);

    Vec tile_max(kNegativeInfinity);
    for (int64_t i = 0; i < columns; i += Vec::kLanes) tile_max = lane_max(tile_max, Vec::load(logits + i));
    // The tile's state relative to the common maximum: merging then scales nothing but the old o.
    SoftmaxState<float>& state = states_[row];
    const float max_logit = lane_max(state.max_logit, tile_max.reduce_max());
    Vec sum(0.0f);
    for (int64_t i = 0; i < columns; i += Vec::kLanes) {
      const Vec probability = rescale_factor(Vec::load(logits + i), Vec(max_logit));
      store_as(probability, probabilities + i);
      sum = sum + probability;
    }
    const float rescale = merge(state, {max_logit, sum.reduce_sum()}).first;
    if (rescale != 1.0f) {
      float* out = out_ + row * columns_;
      for (int64_t d = 0; d < columns_; d += Vec::kLanes) (Vec::load(out + d) * Vec(rescale)).store(out + d);
    }
  }

  void write_row(int64_t row) {
    SoftmaxState<float> state = states_[row];
    const int64_t head = head_of(row);
    const int64_t token = query_begin_ + token_of(row);
    float factor = 1.0f;
    if (params_.logits.sinks) factor = merge(state, sink_state(params_.logits.sinks[head])).first;
    store_row(params_.out, token, head, params_.value_size, out_ + row * columns_, factor * normalizer(state));
    if (params_.lse) params_.lse[head * params_.lse_head_stride + token * params_.lse_token_stride] = logsumexp(state);
  }

  const PrefixParams& params_;
  const Item item_;
  const int64_t group_;
  const int64_t rows_;
  const int64_t context_;
  const int64_t query_begin_;
  const int64_t depths_;   // key size, padded to whole steps
  const int64_t columns_;  // value size, padded to whole panels
  Element* query_;         // [rows][depths]
  Element* packed_key_;
  Element* packed_value_;
  Element* probabilities_;  // [rows][kTileKeys]
  float* logits_;           // [rows][kTileKeys]
  float* out_;              // [rows][columns], unnormalised
  SoftmaxState<float>* states_;
  float* row_;
};

// All items of a call and their cost in key tiles: causal items at the end of a chunk see more keys than those at its
// beginning.
template <typename Product>
class Prefix {
 public:
  Prefix(const PrefixParams& params, const Parallel& parallel) : params_(params), parallel_(parallel) {
    const int64_t tile_tokens = std::max<int64_t>(kTileRows / params.group(), 1);
    for (int64_t s = 0; s < params.num_seqs; ++s) {
      const int64_t length = params.query_start_loc(s + 1) - params.query_start_loc(s);
      for (int64_t g = 0; g < params.num_kv_heads; ++g) {
        for (int64_t token = 0; token < length; token += tile_tokens) {
          const Item item{s, g, token, std::min(tile_tokens, length - token)};
          const Range seen = PrefixItem<Product>::keys_seen(params, item);
          items_.push_back(item);
          cost_ += ceil_div(seen.end - seen.begin, kTileKeys);
          cost_up_to_.push_back(cost_);
        }
      }
    }
  }

  void run() {
    parallel_.run(parallel_.num_threads, [](void* self, int64_t i) { static_cast<Prefix*>(self)->share(i); }, this);
  }

 private:
  // Even share of the cost: an item belongs to the worker whose range its last key tile falls into.
  void share(int64_t worker) {
    const Range range = even_share(cost_, parallel_.num_threads, worker);
    static thread_local Scratch scratch;
    const auto first = std::upper_bound(cost_up_to_.begin(), cost_up_to_.end(), range.begin) - cost_up_to_.begin();
    for (size_t i = size_t(first); i < items_.size() && cost_up_to_[i] <= range.end; ++i) {
      PrefixItem<Product>(params_, items_[i], scratch).run();
    }
  }

  const PrefixParams& params_;
  const Parallel& parallel_;
  std::vector<Item> items_;
  std::vector<int64_t> cost_up_to_;
  int64_t cost_ = 0;
};

}  // namespace

void prefix(const PrefixParams& params, const Parallel& parallel) {
#if defined(__AVX512BF16__)
  // Bfloat16 operands are multiplied exactly; only the probabilities are rounded, which the default precision allows.
  const bool bfloat16 = params.key_cache.type == ElementType::kBFloat16 && params.key.type == ElementType::kBFloat16 &&
                        params.query.type == ElementType::kBFloat16;
  if (bfloat16 && params.precision == Precision::kDefault) return Prefix<BFloat16Product>(params, parallel).run();
#endif
  Prefix<FloatProduct>(params, parallel).run();
}

}  // namespace paged_attn::cpu
