// How a block of threads attends for one tile of 64 rows of one KV head, with plain arithmetic: over tiles of 64 keys at
// absolute positions, from the cache and then from the chunk,
//   1. where each key and value lies is noted;
//   2. logits = q . k, both staged 32 dims at a time, a thread holding 4 rows x 4 keys;
//   3. logits -> probabilities relative to the tile's maximum, in shared memory; the tile's states merge into the rows';
//   4. o = probabilities . V, staged 64 dims at a time, joins what the rows have, in registers.
// A row's arithmetic knows nothing of its neighbours, and a tile that it does not see changes nothing, so its bits do not
// depend on where the chunk begins. (FlashAttention-2's loop, Dao 2023, with one merge of states per tile.)
#pragma once

#include "core/logits.h"
#include "core/softmax_state.h"
#include "gpu/packets.h"
#include "gpu/prefix_launch.h"
#include "gpu/report.h"
#include "gpu/rows.h"
#include "gpu/shared_layout.h"

namespace paged_attn::gpu {

struct PrefixShared {
  static constexpr int64_t kStage = int64_t(kTileKeys) * kTileStride;
  static_assert(kStage >= 2 * int64_t(kStageDims) * kTileStride, "q and k share the stage of V");

  int64_t stage, probabilities, key_at, value_at, source, query_at, flag, bytes;

  PA_HD PrefixShared() {
    SharedLayout layout;
    stage = layout.take<float>(kStage);
    probabilities = layout.take<float>(kStage);
    key_at = layout.take<int64_t>(kTileKeys);
    value_at = layout.take<int64_t>(kTileKeys);
    source = layout.take<int32_t>(kTileKeys);
    query_at = layout.take<int64_t>(kTileRows);
    flag = layout.take<int32_t>(1);
    bytes = layout.bytes();
  }
};

template <typename T, int kValueChunks>
class PrefixAgent {
  static constexpr int kThreads = kPrefixThreads;
  static constexpr int kPacket = kPacketElements<T, platform::kLoadBytes>;
  static constexpr int kRowThreads = kTileKeys / kMicroTile;  // threads that share a row
  static constexpr int64_t kNoRow = -1;

  enum Source : int32_t { kUnseen, kCached, kFresh };

 public:
  PA_DEVICE PrefixAgent(const PrefixLaunch& launch, const PrefixShared& shared)
      : launch_(launch),
        params_(launch.params),
        stage_(platform::shared_array<float>(shared.stage, PrefixShared::kStage)),
        probabilities_(platform::shared_array<float>(shared.probabilities, PrefixShared::kStage)),
        key_at_(platform::shared_array<int64_t>(shared.key_at, kTileKeys)),
        value_at_(platform::shared_array<int64_t>(shared.value_at, kTileKeys)),
        source_(platform::shared_array<int32_t>(shared.source, kTileKeys)),
        query_at_(platform::shared_array<int64_t>(shared.query_at, kTileRows)),
        flag_(platform::shared_array<int32_t>(shared.flag, 1)),
        thread_(platform::thread_index()),
        first_of_rows_(thread_ / kRowThreads * kMicroTile),
        first_of_keys_(thread_ % kRowThreads * kMicroTile) {}

  // Every thread of the block calls, past a barrier since it last used the agent.
  PA_DEVICE void attend(int64_t sequence, int64_t kv_head, int64_t tile) {
    sequence_ = sequence;
    kv_head_ = kv_head;
    chunk_ = chunk_of(params_, sequence);
    const int64_t group = params_.group();
    if (!chunk_.valid) {
      if (tile == 0) {
        if (thread_ == 0) report(launch_.status, Operator::kPrefix, Reason::kLength, sequence);
        const int64_t begin = chunk_.begin > 0 ? chunk_.begin : 0;
        const int64_t end = chunk_.end < params_.num_tokens ? chunk_.end : params_.num_tokens;
        store_nan(begin, 0, (end - begin) * group);
      }
      return;
    }
    const int64_t rows = chunk_.queries() * group;
    first_row_ = tile * kTileRows;
    if (first_row_ >= rows) return;
    num_rows_ = int(rows - first_row_ < kTileRows ? rows - first_row_ : kTileRows);
    if (!blocks_are_valid()) return store_nan(chunk_.begin, first_row_, first_row_ + num_rows_);

    for (int r = thread_; r < kTileRows; r += kThreads) {
      query_at_[r] = r < num_rows_ ? params_.query.offset(token_of(r), head_of(r)) : kNoRow;
    }
    seen_.begin = visible_range(params_.logits, position_of(0)).begin;
    seen_.end = position_of(num_rows_ - 1) + 1;
    for (int64_t dim = 0; dim < params_.value_size; dim += kValueChunks * kValueDims) attend_dims(dim);
  }

 private:
  struct Row {
    bool exists;
    int64_t position;
    float slope;
    Range seen;
    SoftmaxState<float> state;
    MergeFactors<float> factors;  // of the tile at hand
  };

  PA_DEVICE int64_t token_of(int r) const { return chunk_.begin + (first_row_ + r) / params_.group(); }
  PA_DEVICE int64_t head_of(int r) const { return kv_head_ * params_.group() + (first_row_ + r) % params_.group(); }
  PA_DEVICE int64_t position_of(int r) const { return chunk_.context + (first_row_ + r) / params_.group(); }

  // Rows [first, end) of the sequence, whose first token is `token`.
  PA_DEVICE void store_nan(int64_t token, int64_t first, int64_t end) {
    const int64_t group = params_.group();
    const float nan = __builtin_nanf("");
    for (int64_t i = first * params_.value_size + thread_; i < end * params_.value_size; i += kThreads) {
      const int64_t row = i / params_.value_size;
      const int64_t dim = i % params_.value_size;
      store_row_element(token + row / group, kv_head_ * group + row % group, dim, nan);
      if (dim == 0) store_lse(token + row / group, kv_head_ * group + row % group, nan);
    }
  }
  PA_DEVICE void store_row_element(int64_t token, int64_t head, int64_t dim, float value) {
    store_element(params_.out, params_.out.offset(token, head), dim, value);
  }
  PA_DEVICE void store_lse(int64_t token, int64_t head, float value) {
    if (params_.lse) params_.lse[head * params_.lse_head_stride + token * params_.lse_token_stride] = value;
  }

  // All blocks of the context, whether this tile sees them or not: a sequence is right or wrong as a whole.
  PA_DEVICE bool blocks_are_valid() {
    if (thread_ == 0) *flag_ = 0;
    platform::block_barrier();
    const int64_t blocks = ceil_div(chunk_.context, params_.block_size);
    for (int64_t i = thread_; i < blocks; i += kThreads) {
      const int64_t block = params_.block_tables(sequence_, i);
      if (block >= 0 && block < params_.key_cache.num_blocks) continue;
      platform::set_if_zero(flag_, 1);
      report(launch_.status, Operator::kPrefix, Reason::kBlock, sequence_);
    }
    platform::block_barrier();
    return *flag_ == 0;
  }

  // Output dims from `dim` on, as many as the registers hold.
  PA_DEVICE void attend_dims(int64_t dim) {
    Row rows[kMicroTile];
    float output[kValueChunks][kMicroTile][kMicroTile];
#pragma unroll
    for (int i = 0; i < kMicroTile; ++i) {
      const int r = first_of_rows_ + i;
      rows[i].exists = r < num_rows_;
      rows[i].position = position_of(r);
      rows[i].slope = rows[i].exists ? alibi_slope(params_.logits, head_of(r)) : 0.0f;
      rows[i].seen = visible_range(params_.logits, rows[i].position);
      rows[i].state = {kNegativeInfinity, 0.0f};
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        for (int j = 0; j < kMicroTile; ++j) output[c][i][j] = 0.0f;
      }
    }
    for (int64_t first = seen_.begin / kTileKeys * kTileKeys; first < seen_.end; first += kTileKeys) {
      platform::block_barrier();
      locate_keys(first);
      platform::block_barrier();
      float logits[kMicroTile][kMicroTile];
      compute_logits(logits);
      absorb(first, rows, logits);
      platform::block_barrier();
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) weigh_values(dim + c * kValueDims, rows, output[c]);
    }
#pragma unroll
    for (int i = 0; i < kMicroTile; ++i) {
      if (!rows[i].exists) continue;
      const int r = first_of_rows_ + i;
      SoftmaxState<float> state = rows[i].state;
      float factor = 1.0f;
      if (params_.logits.sinks) factor = merge(state, sink_state(params_.logits.sinks[head_of(r)])).first;
      factor *= normalizer(state);
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        for (int j = 0; j < kMicroTile; ++j) {
          const int64_t d = dim + c * kValueDims + first_of_keys_ + j;
          if (d < params_.value_size) store_row_element(token_of(r), head_of(r), d, output[c][i][j] * factor);
        }
      }
      if (dim == 0 && first_of_keys_ == 0) store_lse(token_of(r), head_of(r), logsumexp(state));
    }
  }

  PA_DEVICE void locate_keys(int64_t first) {
    any_cached_ = first < chunk_.context;
    any_fresh_ = first + kTileKeys > chunk_.context;
    for (int k = thread_; k < kTileKeys; k += kThreads) {
      const int64_t position = first + k;
      source_[k] = kUnseen;
      if (position < seen_.begin || position >= seen_.end) continue;
      if (position < chunk_.context) {
        const int64_t block = params_.block_tables(sequence_, position / params_.block_size);
        const int64_t token = position % params_.block_size;
        key_at_[k] = params_.key_cache.offset(block, kv_head_) + token * params_.key_cache.token_stride;
        value_at_[k] = params_.value_cache.offset(block, kv_head_) + token * params_.value_cache.token_stride;
        source_[k] = kCached;
      } else {
        const int64_t token = chunk_.begin + position - chunk_.context;
        key_at_[k] = params_.key.offset(token, kv_head_);
        value_at_[k] = params_.value.offset(token, kv_head_);
        source_[k] = kFresh;
      }
    }
  }

  // What nobody sees is zero on the stage, whatever lies there: NaN times a probability of 0 would be NaN. The pass over the
  // cache writes those zeros where there is one, else the pass over the chunk does.
  PA_DEVICE bool is_zeroed_by_cached(int k) const { return any_cached_ && source_[k] == kUnseen; }
  PA_DEVICE bool is_zeroed_by_fresh(int k) const { return !any_cached_ && source_[k] == kUnseen; }

  // q and k of dims [dim, dim + kStageDims), as [dim][row] and [dim][key].
  PA_DEVICE void stage_dims(int64_t dim, float* queries, float* keys) {
#pragma unroll 1
    for (int i = thread_; i < kTileRows * kStageDims; i += kThreads) {
      const int r = i / kStageDims, d = i % kStageDims;
      const bool exists = query_at_[r] != kNoRow && dim + d < params_.key_size;
      queries[d * kTileStride + r] = exists ? load_element(params_.query, query_at_[r], dim + d) : 0.0f;
    }
    if (any_cached_) {
      const T* cache = static_cast<const T*>(params_.key_cache.data);
#pragma unroll 1
      for (int i = thread_; i < kTileKeys * (kStageDims / kPacket); i += kThreads) {
        const int k = i % kTileKeys, d = i / kTileKeys * kPacket;
        if (source_[k] == kFresh) continue;
        float values[kPacket];
        for (int e = 0; e < kPacket; ++e) values[e] = 0.0f;
        if (source_[k] == kCached && dim + d < params_.key_size) {
          if (launch_.key_packets) {
            load_elements<T, platform::kLoadBytes>(cache + key_at_[k] + params_.key_cache.dim_offset(dim + d), values);
          } else {
            for (int e = 0; e < kPacket; ++e) {
              if (dim + d + e < params_.key_size) {
                values[e] = widen(cache[key_at_[k] + params_.key_cache.dim_offset(dim + d + e)]);
              }
            }
          }
        }
        for (int e = 0; e < kPacket; ++e) keys[(d + e) * kTileStride + k] = values[e];
      }
    }
    if (any_fresh_) {
#pragma unroll 1
      for (int i = thread_; i < kTileKeys * kStageDims; i += kThreads) {
        const int k = i / kStageDims, d = i % kStageDims;
        const bool exists = source_[k] == kFresh && dim + d < params_.key_size;
        if (source_[k] == kFresh || is_zeroed_by_fresh(k)) {
          keys[d * kTileStride + k] = exists ? load_element(params_.key, key_at_[k], dim + d) : 0.0f;
        }
      }
    }
  }

  PA_DEVICE void compute_logits(float (&logits)[kMicroTile][kMicroTile]) {
    float* queries = stage_;
    float* keys = stage_ + kStageDims * kTileStride;
    for (int i = 0; i < kMicroTile; ++i) {
      for (int j = 0; j < kMicroTile; ++j) logits[i][j] = 0.0f;
    }
    for (int64_t dim = 0; dim < params_.key_size; dim += kStageDims) {
      stage_dims(dim, queries, keys);
      platform::block_barrier();
      multiply<kStageDims>(queries + first_of_rows_, keys + first_of_keys_, logits,
                           [](float so_far, int, float sum) { return so_far + sum; });
      platform::block_barrier();
    }
  }

  // result[i][j] := join(result[i][j], i, sum over n of a[n][i] * b[n][j]).
  template <int kTerms, typename Join>
  PA_DEVICE static void multiply(const float* a, const float* b, float (&result)[kMicroTile][kMicroTile], Join join) {
    float sums[kMicroTile][kMicroTile];
    for (int i = 0; i < kMicroTile; ++i) {
      for (int j = 0; j < kMicroTile; ++j) sums[i][j] = 0.0f;
    }
#pragma unroll 4
    for (int n = 0; n < kTerms; ++n) {
      float left[kMicroTile], right[kMicroTile];
      read_floats<kMicroTile>(a + n * kTileStride, left);
      read_floats<kMicroTile>(b + n * kTileStride, right);
#pragma unroll
      for (int i = 0; i < kMicroTile; ++i) {
        for (int j = 0; j < kMicroTile; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kMicroTile; ++i) {
      for (int j = 0; j < kMicroTile; ++j) result[i][j] = join(result[i][j], i, sums[i][j]);
    }
  }

  // Dot products to probabilities, in shared memory as [key][row]; the tile's states join the rows'.
  PA_DEVICE void absorb(int64_t first, Row (&rows)[kMicroTile], float (&logits)[kMicroTile][kMicroTile]) {
    const float cached_scale = params_.logits.scale * params_.key_scale(kv_head_);
#pragma unroll
    for (int i = 0; i < kMicroTile; ++i) {
      float max_logit = kNegativeInfinity;
#pragma unroll
      for (int j = 0; j < kMicroTile; ++j) {
        const int64_t position = first + first_of_keys_ + j;
        const float scale = position < chunk_.context ? cached_scale : params_.logits.scale;
        const bool seen = rows[i].exists && position >= rows[i].seen.begin && position < rows[i].seen.end;
        logits[i][j] =
            seen ? logit(logits[i][j], scale, params_.logits.soft_cap, rows[i].slope, float(position - rows[i].position))
                 : kNegativeInfinity;
        max_logit = lane_max(max_logit, logits[i][j]);
      }
      for (int mask = 1; mask < kRowThreads; mask *= 2) {
        max_logit = lane_max(max_logit, platform::shuffle_xor<kRowThreads>(max_logit, mask));
      }
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kMicroTile; ++j) {
        logits[i][j] = rescale_factor(logits[i][j], max_logit);
        sum += logits[i][j];
      }
      for (int mask = 1; mask < kRowThreads; mask *= 2) sum += platform::shuffle_xor<kRowThreads>(sum, mask);
      rows[i].factors = merge(rows[i].state, SoftmaxState<float>{max_logit, sum});
    }
#pragma unroll
    for (int j = 0; j < kMicroTile; ++j) {
      float* to = probabilities_ + (first_of_keys_ + j) * kTileStride + first_of_rows_;
      for (int i = 0; i < kMicroTile; ++i) to[i] = logits[i][j];
    }
  }

  // V of dims [dim, dim + kValueDims), as [key][dim], in the query's scale.
  PA_DEVICE void stage_values(int64_t dim) {
    if (any_cached_) {
      const T* cache = static_cast<const T*>(params_.value_cache.data);
      const float scale = params_.value_scale(kv_head_);
      constexpr int kPackets = kTileKeys / kPacket;
#pragma unroll 1
      for (int i = thread_; i < kValueDims * kPackets; i += kThreads) {
        const int k = i % kPackets * kPacket, d = i / kPackets;
        const int64_t at = params_.value_cache.dim_offset(dim + d);
        float values[kPacket];
        for (int e = 0; e < kPacket; ++e) values[e] = 0.0f;
        if (dim + d < params_.value_size) {
          if (launch_.value_packets) {  // whole packets lie in one block; any token seen in it says where
            const T* packet = nullptr;
            for (int e = 0; e < kPacket; ++e) {
              if (source_[k + e] == kCached) packet = cache + value_at_[k + e] - e;
            }
            if (packet) load_elements<T, platform::kLoadBytes>(packet + at, values);
          } else {
            for (int e = 0; e < kPacket; ++e) {
              if (source_[k + e] == kCached) values[e] = widen(cache[value_at_[k + e] + at]);
            }
          }
        }
        for (int e = 0; e < kPacket; ++e) {
          if (source_[k + e] == kCached) stage_[(k + e) * kTileStride + d] = values[e] * scale;
          if (is_zeroed_by_cached(k + e)) stage_[(k + e) * kTileStride + d] = 0.0f;
        }
      }
    }
    if (any_fresh_) {
#pragma unroll 1
      for (int i = thread_; i < kTileKeys * kValueDims; i += kThreads) {
        const int k = i / kValueDims, d = i % kValueDims;
        const bool exists = source_[k] == kFresh && dim + d < params_.value_size;
        if (source_[k] == kFresh || is_zeroed_by_fresh(k)) {
          stage_[k * kTileStride + d] = exists ? load_element(params_.value, value_at_[k], dim + d) : 0.0f;
        }
      }
    }
  }

  PA_DEVICE void weigh_values(int64_t dim, const Row (&rows)[kMicroTile], float (&output)[kMicroTile][kMicroTile]) {
    if (dim >= params_.value_size) return;
    stage_values(dim);
    platform::block_barrier();
    multiply<kTileKeys>(probabilities_ + first_of_rows_, stage_ + first_of_keys_, output, [&](float so_far, int i, float sum) {
      return so_far * rows[i].factors.first + sum * rows[i].factors.second;
    });
    platform::block_barrier();
  }

  const PrefixLaunch& launch_;
  const PrefixParams& params_;
  float* const stage_;
  float* const probabilities_;
  int64_t* const key_at_;  // of the tile's keys: offset in the cache or in the chunk
  int64_t* const value_at_;
  int32_t* const source_;
  int64_t* const query_at_;  // of the tile's rows
  int32_t* const flag_;
  const int thread_;
  const int first_of_rows_;  // of the thread's 4
  const int first_of_keys_;  // likewise; and of its dims of V
  int64_t sequence_ = 0, kv_head_ = 0;
  Chunk chunk_{};
  int64_t first_row_ = 0;
  int num_rows_ = 0;
  Range seen_{};  // keys that some row of the tile sees
  bool any_cached_ = false, any_fresh_ = false;
};

}  // namespace paged_attn::gpu
