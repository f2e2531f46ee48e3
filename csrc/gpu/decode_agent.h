// How a block of threads attends to one partition of 512 tokens, for up to kHeadBlock query heads of one KV head. K and V are
// read once, from where they lie:
//   1. the ids of the partition's blocks are checked and kept;
//   2. logits = q . k: a token per lane (or per team of lanes, where loads are narrower than 16 bytes), q in shared memory,
//   read
//      by all lanes at once;
//   3. logits -> probabilities relative to the partition's maximum, a warp per head;
//   4. o = probabilities . V: a lane holds some dims of all heads in registers over the whole partition, and loads packets of
//      tokens, which lie together in V.
// No sum runs over more than 64 terms before it is added to another, which keeps the error near that of one rounding.
#pragma once

#include "core/logits.h"
#include "core/softmax_state.h"
#include "gpu/decode_launch.h"
#include "gpu/decode_policy.h"
#include "gpu/decode_walk.h"
#include "gpu/packets.h"
#include "gpu/report.h"
#include "gpu/rows.h"
#include "gpu/shared_layout.h"

namespace paged_attn::gpu {

// Offsets in the block's shared memory, the same on the host and on the device.
struct DecodeShared {
  static constexpr int kFlags = 1 + DecodeWalk::kFlags;  // a wrong block id was met; then the walk's

  int64_t query_dims;  // per head, at once
  int64_t max_blocks;  // that a partition touches
  int64_t query, logits, seen, block_ids, states, factors, flags, output, bytes;

  PA_HD DecodeShared(const DecodeLaunch& launch, bool any_size, bool output_in_shared) {
    const DecodeParams& params = launch.params;
    const int64_t heads = launch.heads_per_block;
    query_dims = any_size && params.key_size > kQueryChunk ? kQueryChunk : params.key_size;
    max_blocks = ceil_div(kPartitionTokens, params.block_size) + 1;
    SharedLayout layout;
    query = layout.take<float>(heads * query_dims);
    logits = layout.take<float>(heads * kPartitionTokens);
    seen = layout.take<uint8_t>(kPartitionTokens);
    block_ids = layout.take<int64_t>(max_blocks);
    states = layout.take<SoftmaxState<float>>(2 * heads);  // of the partition, then v1's so far
    factors = layout.take<MergeFactors<float>>(heads);
    flags = layout.take<int32_t>(kFlags);
    output = layout.take<float>(output_in_shared ? heads * params.value_size : 0);
    bytes = layout.bytes();
  }
};

template <typename T, int kHeadSize>
class DecodeAgent {
  using Policy = DecodePolicy<T, kHeadSize>;
  static constexpr int kWarpLanes = platform::kWarpLanes;
  static constexpr int kThreads = Policy::kThreads;
  static constexpr int kSlots = Policy::kSlots;
  static constexpr int kPacket = kPacketElements<T, platform::kLoadBytes>;
  static constexpr int kGroup = kPacketElements<T, 16>;    // x, dims of K that lie together
  static constexpr int kTeam = 16 / platform::kLoadBytes;  // lanes that share a token's groups
  static constexpr int kTokens = int(kPartitionTokens);

 public:
  PA_DEVICE DecodeAgent(const DecodeLaunch& launch, const DecodeShared& shared)
      : launch_(launch),
        params_(launch.params),
        query_dims_(shared.query_dims),
        query_(platform::shared_array<float>(shared.query, launch.heads_per_block * shared.query_dims)),
        logits_(platform::shared_array<float>(shared.logits, launch.heads_per_block * kTokens)),
        seen_(platform::shared_array<uint8_t>(shared.seen, kTokens)),
        block_ids_(platform::shared_array<int64_t>(shared.block_ids, shared.max_blocks)),
        states_(platform::shared_array<SoftmaxState<float>>(shared.states, 2 * launch.heads_per_block)),
        flags_(platform::shared_array<int32_t>(shared.flags, DecodeShared::kFlags)),
        thread_(platform::thread_index()) {}

  // Which row the following partitions belong to. The block is past a barrier since it last used the agent.
  PA_DEVICE void begin_row(const DecodeWalk& walk) {
    sequence_ = walk.sequence();
    kv_head_ = walk.kv_head();
    partitions_ = walk.partitions();
    if (thread_ == 0 && !partitions_.valid) report(launch_.status, Operator::kDecode, Reason::kLength, sequence_);
    const int64_t group = params_.group();
    const int64_t first = walk.head_block() * launch_.heads_per_block;
    first_head_ = kv_head_ * group + first;
    heads_ = int(group - first < launch_.heads_per_block ? group - first : launch_.heads_per_block);
    query_position_ = partitions_.length - 1;
    range_ = visible_range(params_.logits, query_position_);
    if (query_dims_ == params_.key_size) load_query(0);
  }

  // Leaves the states <m, l> of the partition in state(h) for the heads of the block, visible to all threads, and o in the
  // registers that for_each_output hands out.
  PA_DEVICE void attend(int64_t partition) {
    begin_ = partition * kPartitionTokens;
    const int64_t first = range_.begin > begin_ ? range_.begin - begin_ : 0;
    const int64_t last = range_.end - begin_;
    first_token_ = int(first < kTokens ? first : kTokens);
    end_token_ = int(last < kTokens ? last : kTokens);
    valid_ = partitions_.valid && load_block_ids();
    if (!valid_) {
      platform::block_barrier();
      if (thread_ < heads_) states_[thread_] = {__builtin_nanf(""), __builtin_nanf("")};
      platform::block_barrier();
      return;
    }
    compute_logits();
    platform::block_barrier();
    for (int h = thread_ / kWarpLanes; h < heads_; h += kThreads / kWarpLanes) to_probabilities(h);
    platform::block_barrier();
  }

  PA_DEVICE int heads() const { return heads_; }
  PA_DEVICE int64_t head(int h) const { return first_head_ + h; }
  PA_DEVICE SoftmaxState<float>& state(int h) { return states_[h]; }

  // use(h, dim, o) for every head and dim, each in one thread, the same one for every partition.
  template <typename Use>
  PA_DEVICE void for_each_output(Use use) {
    const int64_t dims_per_chunk = int64_t(kSlots) * Policy::kDimsPerPass;
    for (int64_t dim = 0; dim < params_.value_size; dim += dims_per_chunk) {
      float sums[kSlots][kHeadBlock];
      for (int slot = 0; slot < kSlots; ++slot) {
        for (int h = 0; h < kHeadBlock; ++h) sums[slot][h] = 0.0f;
      }
      if (valid_) weigh_values(dim, sums);
      const int row_lane = thread_ % kRowLanes;
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int64_t d = dim + slot * Policy::kDimsPerPass + thread_ / kRowLanes;
#pragma unroll
        for (int h = 0; h < kHeadBlock; ++h) {
          if (h >= heads_) continue;
          float sum = sums[slot][h];
          for (int mask = 1; mask < kRowLanes; mask *= 2) sum += platform::shuffle_xor<kRowLanes>(sum, mask);
          if (row_lane == h % kRowLanes && d < params_.value_size) use(h, d, sum);
        }
      }
    }
  }

 private:
  // q of dims [first, first + query_dims) of every head, as floats; zero beyond the head size.
  PA_DEVICE void load_query(int64_t first) {
    for (int64_t i = thread_; i < heads_ * query_dims_; i += kThreads) {
      const int64_t h = i / query_dims_;
      const int64_t d = first + i % query_dims_;
      query_[i] =
          d < params_.key_size ? load_element(params_.query, params_.query.offset(sequence_, first_head_ + h), d) : 0.0f;
    }
  }

  // The partition's blocks up to the sequence's end; false, in every thread, if one of them is no block of the cache.
  PA_DEVICE bool load_block_ids() {
    if (thread_ == 0) flags_[0] = 0;
    platform::block_barrier();
    const int64_t first = (begin_ + first_token_) / params_.block_size;
    const int64_t last = first_token_ < end_token_ ? (begin_ + end_token_ - 1) / params_.block_size : first - 1;
    first_block_ = begin_ / params_.block_size;
    for (int64_t i = first + thread_; i <= last; i += kThreads) {
      const int64_t block = params_.block_tables(sequence_, i);
      block_ids_[i - first_block_] = block;
      if (block < 0 || block >= params_.key_cache.num_blocks) {
        platform::set_if_zero(&flags_[0], 1);
        report(launch_.status, Operator::kDecode, Reason::kBlock, sequence_);
      }
    }
    platform::block_barrier();
    return flags_[0] == 0;
  }

  // Where token t of the partition lies.
  struct Place {
    int64_t block;
    int64_t token;
  };
  PA_DEVICE Place place(int t) const {
    // 32 bits: a block of more than 2^31 tokens is larger than any cache.
    const unsigned offset = unsigned(begin_ - first_block_ * params_.block_size) + unsigned(t);
    const unsigned block_size = unsigned(params_.block_size);
    return {block_ids_[offset / block_size], offset % block_size};
  }

  PA_DEVICE bool is_seen(int h, int t) const {
    return t >= first_token_ && t < end_token_ &&
           (!is_block_sparse(params_.logits) || sparse_visible(params_.logits.sparse, params_.num_heads, params_.num_kv_heads,
                                                               first_head_ + h, query_position_, begin_ + t));
  }

  PA_DEVICE bool is_seen_by_some(int t) const {
    for (int h = 0; h < heads_; ++h) {
      if (is_seen(h, t)) return true;
    }
    return false;
  }

  // Tokens whose probabilities phase 4 reads: whole packets.
  PA_DEVICE int padded_tokens() const {
    constexpr int kStep = kPacketElements<T, 16>;
    return (end_token_ + kStep - 1) / kStep * kStep;
  }

  PA_DEVICE void compute_logits() {
    const int tokens = padded_tokens();
    const float scale = params_.logits.scale * params_.key_scale(kv_head_);
    for (int64_t chunk = 0; chunk < params_.key_size; chunk += query_dims_) {
      if (query_dims_ < params_.key_size) {
        platform::block_barrier();
        load_query(chunk);
      }
      platform::block_barrier();
      const int64_t dims = params_.key_size - chunk < query_dims_ ? params_.key_size - chunk : query_dims_;
      // Every lane makes every turn: shuffles need the whole team.
      for (int first = 0; first < tokens; first += kThreads / kTeam) {
        const int t = first + thread_ / kTeam;
        const bool seen = t < tokens && is_seen_by_some(t);
        float sums[kHeadBlock];
        for (int h = 0; h < kHeadBlock; ++h) sums[h] = 0.0f;
        if (seen) dot(chunk, dims, t, sums);
#pragma unroll
        for (int h = 0; h < kHeadBlock; ++h) {
          if (h >= heads_) continue;
          float sum = sums[h];
          for (int mask = 1; mask < kTeam; mask *= 2) sum += platform::shuffle_xor<kTeam>(sum, mask);
          if (thread_ % kTeam != 0 || t >= tokens) continue;
          if (chunk > 0) sum += logits_[h * kTokens + t];
          if (chunk + dims == params_.key_size) {
            sum = is_seen(h, t) ? logit(sum, scale, params_.logits.soft_cap, alibi_slope(params_.logits, first_head_ + h),
                                        float(begin_ + t - query_position_))
                                : kNegativeInfinity;
          }
          logits_[h * kTokens + t] = sum;
        }
        if (thread_ % kTeam == 0 && t < tokens) seen_[t] = seen;
      }
    }
  }

  // This lane's part of q . k of token t, added to sums, over dims [chunk, chunk + dims) of the head.
  PA_DEVICE void dot(int64_t chunk, int64_t dims, int t, float (&sums)[kHeadBlock]) {
    const CacheTensor& cache = params_.key_cache;
    const Place at = place(t);
    const T* key = static_cast<const T*>(cache.data) + cache.offset(at.block, kv_head_) + at.token * cache.token_stride;
    const int lane = thread_ % kTeam * kPacket;
    const int groups = kHeadSize ? kHeadSize / kGroup : int(dims / kGroup);
#pragma unroll Policy::kUnrolledGroups
    for (int g = 0; g < groups; ++g) {
      float k[kPacket];
      if (kHeadSize || launch_.key_packets) {
        load_elements<T, platform::kLoadBytes>(key + (chunk / kGroup + g) * cache.group_stride + lane, k);
      } else {
        for (int i = 0; i < kPacket; ++i) k[i] = widen(key[cache.dim_offset(chunk + g * kGroup + lane + i)]);
      }
#pragma unroll
      for (int h = 0; h < kHeadBlock; ++h) {
        if (h >= heads_) continue;
        float q[kPacket];
        read_floats<kPacket>(query_ + h * query_dims_ + g * kGroup + lane, q);
        float sum = 0.0f;
        for (int i = 0; i < kPacket; ++i) sum = fmaf(q[i], k[i], sum);
        sums[h] += sum;
      }
    }
  }

  // A warp turns the logits of one head into probabilities, in place, and leaves its state.
  PA_DEVICE void to_probabilities(int h) {
    const int lane = thread_ % kWarpLanes;
    const int tokens = padded_tokens();
    float* row = logits_ + h * kTokens;
    float max_logit = kNegativeInfinity;
    for (int t = lane; t < tokens; t += kWarpLanes) max_logit = lane_max(max_logit, row[t]);
    for (int mask = 1; mask < kWarpLanes; mask *= 2) {
      max_logit = lane_max(max_logit, platform::shuffle_xor<kWarpLanes>(max_logit, mask));
    }
    float sum = 0.0f;
    for (int t = lane; t < tokens; t += kWarpLanes) {
      const float probability = rescale_factor(row[t], max_logit);
      row[t] = probability;
      sum += probability;
    }
    for (int mask = 1; mask < kWarpLanes; mask *= 2) sum += platform::shuffle_xor<kWarpLanes>(sum, mask);
    if (lane == 0) states_[h] = {max_logit, sum};
  }

  // sums[slot][h] = this lane's share of the probabilities of head h times V, for its dims from `dim` on.
  PA_DEVICE void weigh_values(int64_t dim, float (&sums)[kSlots][kHeadBlock]) {
    const CacheTensor& cache = params_.value_cache;
    const T* values = static_cast<const T*>(cache.data);
    const bool all_seen = first_token_ == 0 && end_token_ == kTokens && !is_block_sparse(params_.logits);
    const int tokens = padded_tokens();
    for (int t = thread_ % kRowLanes * kPacket; t < tokens; t += kRowLanes * kPacket) {
      bool seen[kPacket];
      bool some = all_seen;
      for (int i = 0; i < kPacket; ++i) {
        seen[i] = all_seen || seen_[t + i];
        some = some || seen[i];
      }
      if (!some) continue;
      float v[kSlots][kPacket];
      if (kHeadSize || launch_.value_packets) {  // whole packets lie in one block
        const Place at = place(t);
        const T* packet = values + cache.offset(at.block, kv_head_) + at.token;
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          const int64_t d = dim + slot * Policy::kDimsPerPass + thread_ / kRowLanes;
          if (d < params_.value_size) load_elements<T, platform::kLoadBytes>(packet + d * cache.group_stride, v[slot]);
          // What nobody sees may be NaN, which a probability of 0 does not silence.
          for (int i = 0; i < kPacket; ++i) v[slot][i] = d < params_.value_size && seen[i] ? v[slot][i] : 0.0f;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kPacket; ++i) {
          const Place at = seen[i] ? place(t + i) : Place{0, 0};
          const T* token = values + cache.offset(at.block, kv_head_) + at.token * cache.token_stride;
#pragma unroll
          for (int slot = 0; slot < kSlots; ++slot) {
            const int64_t d = dim + slot * Policy::kDimsPerPass + thread_ / kRowLanes;
            v[slot][i] = d < params_.value_size && seen[i] ? widen(token[cache.dim_offset(d)]) : 0.0f;
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kHeadBlock; ++h) {
        if (h >= heads_) continue;
        float probabilities[kPacket];
        read_floats<kPacket>(logits_ + h * kTokens + t, probabilities);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
          float sum = 0.0f;
          for (int i = 0; i < kPacket; ++i) sum = fmaf(probabilities[i], v[slot][i], sum);
          sums[slot][h] += sum;
        }
      }
    }
  }

  const DecodeLaunch& launch_;
  const DecodeParams& params_;
  const int64_t query_dims_;
  float* const query_;        // [heads][query_dims]
  float* const logits_;       // [heads][512], then probabilities
  uint8_t* const seen_;       // [512]: by some head of the block
  int64_t* const block_ids_;  // from first_block_ on
  SoftmaxState<float>* const states_;
  int32_t* const flags_;
  const int thread_;
  int64_t sequence_ = 0, kv_head_ = 0, first_head_ = 0;
  int heads_ = 0;
  Partitions partitions_{};
  int64_t query_position_ = 0;
  Range range_{};
  int64_t begin_ = 0;  // position of token 0 of the partition
  int64_t first_block_ = 0;
  int first_token_ = 0, end_token_ = 0;  // of the partition, that the query sees by the causal rule and the window
  bool valid_ = false;
};

}  // namespace paged_attn::gpu
