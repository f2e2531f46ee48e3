// Decode: one query per sequence over its paged cache; v1 and v2 alike.
//
// Work item: (sequence, KV head, partition of 512 tokens), all query heads of the group. K and V are read once from memory,
// where they lie; per partition
//   1. the chunks of 16 tokens that some head sees are listed, each with the place of its K and V;
//   2. logits = q . k for a block of heads, chunk by chunk;
//   3. logits -> probabilities relative to the partition's maximum m, and their sum l;
//   4. o = probabilities . V, dims outermost, so that the sums stay in registers over the whole partition.
// The states <m, l, o> of the partitions are then merged in ascending order, whoever computed them: the bits do not depend on
// threads, splits, or v1 / v2.

#include <algorithm>
#include <vector>

#include "core/logits.h"
#include "core/softmax_state.h"
#include "cpu/kernels/dot.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/rows.h"
#include "cpu/kernels/scratch.h"

namespace paged_attn::cpu {
namespace {

constexpr int kMaxChunks = int(kPartitionTokens / kChunkTokens);
constexpr uint32_t kAllTokens = (1u << kChunkTokens) - 1;

// Heads that share one pass over K or V. Four sums per head stay in registers: 6 * 4 of 32, 3 * 4 or 2 * 4 of 16.
constexpr int kMaxHeadBlock = Vec::kLanes == 16 ? 6 : Vec::kLanes == 8 ? 3 : 2;
// Dims of V per pass over the partition: what quad_sums reduces at once.
constexpr int kValueDims = 4;

// Partitions per thread between two reductions when the caller gave no room for all states: large enough that the two barriers
// vanish beside the work (32 x 512 tokens x 2 x 256 dims of 16 bits is 16 MiB), small enough to stay O(threads).
constexpr int64_t kPartitionsPerRound = 32;

template <typename T>
struct Chunk {
  const T* key;    // x dims of 16 tokens at key + group * key_group_stride
  const T* value;  // 16 tokens of dim d at value + d * value_dim_stride
  int64_t key_group_stride;
  int64_t value_dim_stride;
  int64_t position;  // of its first token
};

// What one thread works with: carved from its scratch.
template <typename Dot>
struct Workspace {
  using T = typename Dot::Key;
  typename Dot::Query* query;  // [group][padded key size]
  float* logits;               // [kMaxHeadBlock][512]
  float* row;                  // one query row
  Chunk<T>* chunks;            // [kMaxChunks]
  uint16_t* visible;           // [kMaxChunks][group], bit i: the head sees token i of the chunk
  T* packed_key;               // [kMaxChunks][padded key size / x][16][x]
  T* packed_value;             // [kMaxChunks][value size][16]
  int64_t key_size;            // padded to a multiple of x

  Workspace(Scratch& scratch, const DecodeParams& params) : key_size(round_up(params.key_size, kDimGroup<T>)) {
    const int64_t group = params.group();
    const int64_t row_size = std::max(params.key_size, params.value_size);
    scratch.reset(Scratch::bytes_for<typename Dot::Query>(group * key_size) +
                  Scratch::bytes_for<float>(kMaxHeadBlock * kPartitionTokens) + Scratch::bytes_for<float>(row_size) +
                  Scratch::bytes_for<Chunk<T>>(kMaxChunks) + Scratch::bytes_for<uint16_t>(kMaxChunks * group) +
                  Scratch::bytes_for<T>(kPartitionTokens * key_size) +
                  Scratch::bytes_for<T>(kPartitionTokens * params.value_size));
    query = scratch.take<typename Dot::Query>(group * key_size);
    logits = scratch.take<float>(kMaxHeadBlock * kPartitionTokens);
    row = scratch.take<float>(row_size);
    chunks = scratch.take<Chunk<T>>(kMaxChunks);
    visible = scratch.take<uint16_t>(kMaxChunks * group);
    packed_key = scratch.take<T>(kPartitionTokens * key_size);
    packed_value = scratch.take<T>(kPartitionTokens * params.value_size);
  }
};

struct Item {
  int64_t sequence;
  int64_t kv_head;
  int64_t partition;
};

// Which tokens of a chunk each head of the group sees; returns the union over heads.
uint32_t find_visible(const DecodeParams& params, const Item& item, Range range, int64_t position, int64_t query_position,
                      uint16_t* visible) {
  const int64_t group = params.group();
  const int64_t first = std::max<int64_t>(range.begin - position, 0);
  const int64_t last = std::min<int64_t>(range.end - position, kChunkTokens);
  if (first >= last) return 0;
  const uint32_t in_range = (kAllTokens >> (kChunkTokens - (last - first))) << first;
  if (!is_block_sparse(params.logits)) {
    std::fill_n(visible, group, uint16_t(in_range));
    return in_range;
  }
  uint32_t seen_by_some = 0;
  for (int64_t h = 0; h < group; ++h) {
    uint32_t seen = 0;
    for (int64_t t = first; t < last;) {  // run by run: a sparse block is seen or not as a whole
      const int64_t in_block = (position + t) % params.logits.sparse.block_size;
      const int64_t run = std::min(params.logits.sparse.block_size - in_block, last - t);
      if (sparse_visible(params.logits.sparse, params.num_heads, params.num_kv_heads, item.kv_head * group + h, query_position,
                         position + t)) {
        seen |= (kAllTokens >> (kChunkTokens - run)) << t;
      }
      t += run;
    }
    visible[h] = uint16_t(seen);
    seen_by_some |= seen;
  }
  return seen_by_some;
}

// Copies the visible tokens of a chunk to packed form and zeroes the others: what nobody may see never enters the arithmetic.
template <typename T>
void pack_chunk(const DecodeParams& params, const Item& item, uint32_t seen, int64_t key_size, Chunk<T>& chunk, T* packed_key,
                T* packed_value) {
  constexpr int kX = kDimGroup<T>;
  std::fill_n(packed_key, kChunkTokens * key_size, T{});
  std::fill_n(packed_value, kChunkTokens * params.value_size, T{});
  for (int t = 0; t < kChunkTokens; ++t) {
    if (!(seen >> t & 1)) continue;
    const int64_t position = chunk.position + t;
    const int64_t block = params.block_tables(item.sequence, position / params.block_size);
    const int64_t place = position % params.block_size;
    const CacheTensor& kc = params.key_cache;
    const CacheTensor& vc = params.value_cache;
    const T* key = static_cast<const T*>(kc.data) + kc.offset(block, item.kv_head) + place * kc.token_stride;
    const T* value = static_cast<const T*>(vc.data) + vc.offset(block, item.kv_head) + place * vc.token_stride;
    for (int64_t d = 0; d < params.key_size; ++d) packed_key[(d / kX * kChunkTokens + t) * kX + d % kX] = key[kc.dim_offset(d)];
    for (int64_t d = 0; d < params.value_size; ++d) packed_value[d * kChunkTokens + t] = value[vc.dim_offset(d)];
  }
  chunk.key = packed_key;
  chunk.value = packed_value;
  chunk.key_group_stride = kChunkTokens * kX;
  chunk.value_dim_stride = kChunkTokens;
}

// Lists the chunks of a partition that some head sees. A chunk whose 16 tokens lie together and are all seen is read in place.
template <typename Dot>
int list_chunks(const DecodeParams& params, const Item& item, Range range, int64_t query_position, Workspace<Dot>& work) {
  using T = typename Dot::Key;
  constexpr int kX = kDimGroup<T>;
  const CacheTensor& kc = params.key_cache;
  const CacheTensor& vc = params.value_cache;
  const bool in_place = params.block_size % kChunkTokens == 0 && kc.dim_group == kX && kc.token_stride == kX &&
                        params.key_size % kX == 0 && vc.dim_group == 1 && vc.token_stride == 1;
  const int64_t begin = item.partition * kPartitionTokens;
  const int64_t end = std::min(begin + kPartitionTokens, range.end);
  int count = 0;
  int packed = 0;
  for (int64_t position = begin; position < end; position += kChunkTokens) {
    const uint32_t seen = find_visible(params, item, range, position, query_position, work.visible + count * params.group());
    if (seen == 0) continue;
    Chunk<T>& chunk = work.chunks[count++];
    chunk.position = position;
    if (in_place && seen == kAllTokens) {
      const int64_t block = params.block_tables(item.sequence, position / params.block_size);
      const int64_t place = position % params.block_size;
      chunk.key = static_cast<const T*>(kc.data) + kc.offset(block, item.kv_head) + place * kX;
      chunk.value = static_cast<const T*>(vc.data) + vc.offset(block, item.kv_head) + place;
      chunk.key_group_stride = kc.group_stride;
      chunk.value_dim_stride = vc.group_stride;
    } else {
      pack_chunk(params, item, seen, work.key_size, chunk, work.packed_key + packed * kChunkTokens * work.key_size,
                 work.packed_value + packed * kChunkTokens * params.value_size);
      ++packed;
    }
  }
  return count;
}

// Dot products to probabilities of one head, in place; returns <m, l>.
template <typename T>
SoftmaxState<float> softmax_row(const DecodeParams& params, int64_t head, float scale, int64_t query_position,
                                const Chunk<T>* chunks, int count, const uint16_t* visible, float* row) {
  const int64_t group = params.group();
  const float slope = alibi_slope(params.logits, head);
  Vec max_logit(kNegativeInfinity);
  for (int c = 0; c < count; ++c) {
    float* chunk_row = row + c * kChunkTokens;
    const float distance = float(chunks[c].position - query_position);
    for (int i = 0; i < kChunkTokens; i += Vec::kLanes) {
      logit(Vec::load(chunk_row + i), scale, params.logits.soft_cap, slope, iota() + Vec(distance + float(i)))
          .store(chunk_row + i);
    }
    const uint32_t seen = visible[c * group];
    if (seen != kAllTokens) {
      for (int t = 0; t < kChunkTokens; ++t)
        if (!(seen >> t & 1)) chunk_row[t] = kNegativeInfinity;
    }
    for (int i = 0; i < kChunkTokens; i += Vec::kLanes) max_logit = lane_max(max_logit, Vec::load(chunk_row + i));
  }
  SoftmaxState<float> state{max_logit.reduce_max(), 0.0f};
  Vec sum(0.0f);
  for (int i = 0; i < count * kChunkTokens; i += Vec::kLanes) {
    const Vec probability = rescale_factor(Vec::load(row + i), Vec(state.max_logit));
    probability.store(row + i);
    sum = sum + probability;
  }
  state.exp_sum = sum.reduce_sum();
  return state;
}

// out[h][d] for `kDims` dims from d on: sum over the listed tokens of probability[h][t] * value[d][t].
template <typename T, int kHeads, int kDims>
void weigh_values(const Chunk<T>* chunks, int count, const float* probabilities, int64_t d, float* out, int64_t out_stride) {
  Vec sums[kHeads][kValueDims];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kValueDims; ++i) sums[h][i] = Vec(0.0f);
  for (int c = 0; c < count; ++c) {
    const T* value = chunks[c].value + d * chunks[c].value_dim_stride;
    // The next pass over the partition reads the dims behind these.
    __builtin_prefetch(value + kDims * chunks[c].value_dim_stride);
    __builtin_prefetch(value + (kDims + kDims / 2) * chunks[c].value_dim_stride);
#pragma GCC unroll 4
    for (int part = 0; part < kChunkTokens; part += Vec::kLanes) {
      Vec probability[kHeads];
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h)
        probability[h] = Vec::load(probabilities + h * kPartitionTokens + c * kChunkTokens + part);
#pragma GCC unroll 4
      for (int i = 0; i < kDims; ++i) {
        const Vec v = Vec::load(value + i * chunks[c].value_dim_stride + part);
#pragma GCC unroll 8
        for (int h = 0; h < kHeads; ++h) sums[h][i] = fma(probability[h], v, sums[h][i]);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    float dims[kValueDims];
    store_token_sums<Vec::kLanes / 4>(quad_sums(sums[h]), dims);
    for (int i = 0; i < kDims; ++i) out[h * out_stride + d + i] = dims[i];
  }
}

// State <m, l, o> of one partition for kHeads heads of the group, from `first` on.
template <typename Dot, int kHeads>
void attend_heads(const DecodeParams& params, const Item& item, int64_t query_position, int first, int count,
                  Workspace<Dot>& work, SoftmaxState<float>* states, float* out, int64_t out_head_stride) {
  using T = typename Dot::Key;
  const float scale = params.logits.scale * params.key_scale(item.kv_head);
  for (int c = 0; c < count; ++c) {
    if (c + 1 < count) __builtin_prefetch(work.chunks[c + 1].key);
    __builtin_prefetch(work.chunks[c].value);
    __builtin_prefetch(work.chunks[c].value + 2 * work.chunks[c].value_dim_stride);
    dot_chunk<Dot, kHeads>(work.query + first * work.key_size, work.key_size, work.chunks[c].key,
                           work.chunks[c].key_group_stride, work.logits + c * kChunkTokens, kPartitionTokens);
  }
  for (int h = 0; h < kHeads; ++h) {
    states[first + h] = softmax_row(params, item.kv_head * params.group() + first + h, scale, query_position, work.chunks,
                                    count, work.visible + first + h, work.logits + h * kPartitionTokens);
  }
  float* head_out = out + first * out_head_stride;
  int64_t d = 0;
  for (; d + kValueDims <= params.value_size; d += kValueDims)
    weigh_values<T, kHeads, kValueDims>(work.chunks, count, work.logits, d, head_out, out_head_stride);
  for (; d < params.value_size; ++d) weigh_values<T, kHeads, 1>(work.chunks, count, work.logits, d, head_out, out_head_stride);
}

// States of all heads of the group: states [group], out of head h at out + h * out_head_stride, unnormalised and without the V
// cache's scale.
template <typename Dot>
void attend_partition(const DecodeParams& params, const Item& item, Workspace<Dot>& work, SoftmaxState<float>* states,
                      float* out, int64_t out_head_stride) {
  const int group = int(params.group());
  const int64_t query_position = params.seq_lens(item.sequence) - 1;
  const Range range = visible_range(params.logits, query_position);
  for (int h = 0; h < group; ++h) {
    load_row(params.query, item.sequence, item.kv_head * group + h, params.key_size, work.row);
    typename Dot::Query* query = work.query + h * work.key_size;
    for (int64_t d = 0; d < work.key_size; ++d) query[d] = Dot::to_query(d < params.key_size ? work.row[d] : 0.0f);
  }
  const int count = list_chunks(params, item, range, query_position, work);
  for (int first = 0; first < group;) {
    const int heads = std::min(kMaxHeadBlock, int(ceil_div(group - first, ceil_div(group - first, kMaxHeadBlock))));
    switch (heads) {
      case 1: attend_heads<Dot, 1>(params, item, query_position, first, count, work, states, out, out_head_stride); break;
      case 2: attend_heads<Dot, 2>(params, item, query_position, first, count, work, states, out, out_head_stride); break;
#if defined(__AVX2__)
      case 3: attend_heads<Dot, 3>(params, item, query_position, first, count, work, states, out, out_head_stride); break;
#endif
#if defined(__AVX512F__)
      case 4: attend_heads<Dot, 4>(params, item, query_position, first, count, work, states, out, out_head_stride); break;
      case 5: attend_heads<Dot, 5>(params, item, query_position, first, count, work, states, out, out_head_stride); break;
      case 6: attend_heads<Dot, 6>(params, item, query_position, first, count, work, states, out, out_head_stride); break;
#endif
    }
    first += heads;
  }
}

// All work items of a call in one row: sequence-major, then KV head, then partition, ascending.
class Plan {
 public:
  explicit Plan(const DecodeParams& params) : params_(params), first_item_(size_t(params.num_seqs) + 1, 0) {
    for (int64_t s = 0; s < params.num_seqs; ++s) first_item_[s + 1] = first_item_[s] + params.num_kv_heads * num_partitions(s);
  }

  int64_t num_items() const { return first_item_.back(); }

  // The window leaves out whole partitions.
  int64_t first_partition(int64_t sequence) const {
    return visible_range(params_.logits, params_.seq_lens(sequence) - 1).begin / kPartitionTokens;
  }
  int64_t num_partitions(int64_t sequence) const {
    const int64_t length = params_.seq_lens(sequence);
    return length > 0 ? ceil_div(length, kPartitionTokens) - first_partition(sequence) : 0;
  }
  int64_t first_item(int64_t sequence, int64_t kv_head) const {
    return first_item_[sequence] + kv_head * num_partitions(sequence);
  }
  int64_t sequence_of(int64_t item) const {
    return std::upper_bound(first_item_.begin(), first_item_.end(), item) - first_item_.begin() - 1;
  }
  Item operator[](int64_t item) const {
    const int64_t sequence = sequence_of(item);
    const int64_t within = item - first_item_[sequence];
    const int64_t partitions = num_partitions(sequence);
    return {sequence, within / partitions, first_partition(sequence) + within % partitions};
  }

 private:
  const DecodeParams& params_;
  std::vector<int64_t> first_item_;
};

// The call as a whole: rounds of partitions computed in parallel, then merged in ascending order, in parallel over rows.
template <typename Dot>
class Decode {
 public:
  Decode(const DecodeParams& params, const Parallel& parallel)
      : params_(params), parallel_(parallel), plan_(params), group_(params.group()) {
    // The caller's workspace holds every partition; without one a round is bounded, and so is the memory.
    const int64_t limit = params.states.out ? plan_.num_items() : parallel.num_threads * kPartitionsPerRound;
    round_items_ = std::min(limit, plan_.num_items());
    states_.resize(size_t(round_items_ * group_));
    if (!params.states.out) out_.resize(size_t(round_items_ * group_ * params.value_size));
    for (Open& open : open_) {
      open.states.resize(size_t(group_));
      open.out.resize(size_t(group_ * params.value_size));
    }
  }

  void run() {
    clear_partition_sums();
    while (round_begin_ < plan_.num_items()) {
      round_end_ = std::min(round_begin_ + round_items_, plan_.num_items());
      parallel_.run(parallel_.num_threads, [](void* self, int64_t i) { static_cast<Decode*>(self)->compute_share(i); }, this);
      parallel_.run(parallel_.num_threads, [](void* self, int64_t i) { static_cast<Decode*>(self)->merge_share(i); }, this);
      round_begin_ = round_end_;
      std::swap(open_[0], open_[1]);
    }
    for (int64_t s = 0; s < params_.num_seqs; ++s) {
      if (plan_.num_partitions(s) > 0) continue;
      for (int64_t h = 0; h < params_.num_heads; ++h) write_row(s, h, {kNegativeInfinity, 0.0f}, nullptr);
    }
  }

 private:
  // Rows whose partitions go on in the next round: at most those of one (sequence, KV head). One is read in a round, the other
  // written.
  struct Open {
    std::vector<SoftmaxState<float>> states;  // [group]
    std::vector<float> out;                   // [group][value_size]
  };

  SoftmaxState<float>* states_of(int64_t item) { return &states_[size_t((item - round_begin_) * group_)]; }

  // o of the first head of the group, and how far the next head's lies from it.
  float* out_of(int64_t index, const Item& item) {
    if (!params_.states.out) return &out_[size_t((index - round_begin_) * group_ * params_.value_size)];
    const int64_t row = item.sequence * params_.num_heads + item.kv_head * group_;
    return params_.states.out + (row * params_.states.partitions + item.partition) * params_.value_size;
  }
  int64_t out_head_stride() const { return params_.value_size * (params_.states.out ? params_.states.partitions : 1); }

  void clear_partition_sums() {
    const int64_t size = params_.num_seqs * params_.num_heads * params_.states.partitions;
    if (params_.states.max_logits) std::fill_n(params_.states.max_logits, size, kNegativeInfinity);
    if (params_.states.exp_sums) std::fill_n(params_.states.exp_sums, size, 0.0f);
  }

  void compute_share(int64_t worker) {
    const Range share = even_share(round_end_ - round_begin_, parallel_.num_threads, worker);
    if (share.begin == share.end) return;
    static thread_local Scratch scratch;
    Workspace<Dot> work(scratch, params_);
    for (int64_t index = round_begin_ + share.begin; index < round_begin_ + share.end; ++index) {
      const Item item = plan_[index];
      SoftmaxState<float>* states = states_of(index);
      attend_partition(params_, item, work, states, out_of(index, item), out_head_stride());
      for (int64_t h = 0; h < group_; ++h) {
        const int64_t row = item.sequence * params_.num_heads + item.kv_head * group_ + h;
        const int64_t place = row * params_.states.partitions + item.partition;
        if (params_.states.max_logits) params_.states.max_logits[place] = states[h].max_logit;
        if (params_.states.exp_sums) params_.states.exp_sums[place] = states[h].exp_sum;
      }
    }
  }

  // Rows of the round: (sequence, KV head) pairs with an item in it, times the heads of the group.
  void merge_share(int64_t worker) {
    const Item first = plan_[round_begin_];
    const Item last = plan_[round_end_ - 1];
    const int64_t first_pair = first.sequence * params_.num_kv_heads + first.kv_head;
    const int64_t last_pair = last.sequence * params_.num_kv_heads + last.kv_head;
    const Range share = even_share((last_pair - first_pair + 1) * group_, parallel_.num_threads, worker);
    std::vector<float> out(static_cast<size_t>(params_.value_size));
    for (int64_t row = share.begin; row < share.end; ++row) {
      const int64_t pair = first_pair + row / group_;
      if (plan_.num_partitions(pair / params_.num_kv_heads) > 0) {
        merge_row(pair / params_.num_kv_heads, pair % params_.num_kv_heads, row % group_, out.data());
      }
    }
  }

  void merge_row(int64_t sequence, int64_t kv_head, int64_t head_in_group, float* out) {
    const int64_t first_item = plan_.first_item(sequence, kv_head);
    const int64_t end_item = first_item + plan_.num_partitions(sequence);
    SoftmaxState<float> state{kNegativeInfinity, 0.0f};
    if (first_item < round_begin_) {
      state = open_[0].states[size_t(head_in_group)];
      std::copy_n(&open_[0].out[size_t(head_in_group * params_.value_size)], params_.value_size, out);
    } else {
      std::fill_n(out, params_.value_size, 0.0f);
    }
    for (int64_t index = std::max(first_item, round_begin_); index < std::min(end_item, round_end_); ++index) {
      const MergeFactors<float> factors = merge(state, states_of(index)[head_in_group]);
      const float* partition_out = out_of(index, plan_[index]) + head_in_group * out_head_stride();
      scale_add(out, factors.first, partition_out, factors.second, params_.value_size);
    }
    if (end_item > round_end_) {
      open_[1].states[size_t(head_in_group)] = state;
      std::copy_n(out, params_.value_size, &open_[1].out[size_t(head_in_group * params_.value_size)]);
    } else {
      write_row(sequence, kv_head * group_ + head_in_group, state, out);
    }
  }

  void write_row(int64_t sequence, int64_t head, SoftmaxState<float> state, const float* out) {
    float factor = params_.value_scale(head / group_);
    if (params_.logits.sinks) factor *= merge(state, sink_state(params_.logits.sinks[head])).first;
    store_row(params_.out, sequence, head, params_.value_size, out, factor * normalizer(state));
    if (params_.lse) { params_.lse[head * params_.lse_head_stride + sequence * params_.lse_token_stride] = logsumexp(state); }
  }

  const DecodeParams& params_;
  const Parallel& parallel_;
  const Plan plan_;
  const int64_t group_;
  int64_t round_items_ = 0;
  int64_t round_begin_ = 0;
  int64_t round_end_ = 0;
  std::vector<SoftmaxState<float>> states_;  // [items of the round][group]
  std::vector<float> out_;                   // [items of the round][group][value_size], unless the caller gave room
  Open open_[2];
};

}  // namespace

void decode(const DecodeParams& params, const Parallel& parallel) {
#if defined(__AVX512BF16__)
  if (params.key_cache.type == ElementType::kBFloat16 && params.query.type == ElementType::kBFloat16) {
    return Decode<BFloat16Dot>(params, parallel).run();
  }
#endif
  with_type(params.key_cache.type, [&](auto tag) { Decode<FloatDot<decltype(tag)>>(params, parallel).run(); });
}

}  // namespace paged_attn::cpu
