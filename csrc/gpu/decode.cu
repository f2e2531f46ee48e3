// Decode: one query per sequence over its paged cache. v1: a block per (sequence, KV head) walks the partitions and merges as
// it goes. v2: blocks share all partitions of the call evenly, leave their states, and a second kernel merges them in the same
// order by the same operations: the same bits.

#include <algorithm>
#include <type_traits>

#include "gpu/decode_agent.h"
#include "gpu/grid.h"
#include "gpu/kernels.h"

namespace paged_attn::gpu {
namespace {

constexpr int kWarpLanes = platform::kWarpLanes;

// What a row's o is multiplied by to be its output; `state` takes the sink in.
PA_DEVICE float output_factor(const DecodeParams& params, int64_t head, SoftmaxState<float>& state) {
  float factor = params.value_scale(head / params.group());
  if (params.logits.sinks) factor *= merge(state, sink_state(params.logits.sinks[head])).first;
  return factor * normalizer(state);
}

PA_DEVICE void store_lse(const DecodeParams& params, int64_t sequence, int64_t head, const SoftmaxState<float>& state) {
  if (params.lse) params.lse[head * params.lse_head_stride + sequence * params.lse_token_stride] = logsumexp(state);
}

// o of one more partition; written out here and in the reduction alike, so that both round alike.
PA_DEVICE float merge_output(float so_far, const MergeFactors<float>& factors, float next) {
  return so_far * factors.first + next * factors.second;
}

template <typename T, int kHeadSize>
PA_KERNEL((DecodePolicy<T, kHeadSize>::kThreads), (DecodePolicy<T, kHeadSize>::kBlocks))
decode_kernel(const DecodeLaunch launch) {
  const DecodeParams& params = launch.params;
  const bool output_in_shared = !launch.split && !launch.running;
  const DecodeShared shared(launch, kHeadSize == 0, output_in_shared);
  const int heads_per_block = launch.heads_per_block;
  // v1: the row's state so far.
  SoftmaxState<float>* so_far =
      platform::shared_array<SoftmaxState<float>>(shared.states, 2 * heads_per_block) + heads_per_block;
  MergeFactors<float>* factors = platform::shared_array<MergeFactors<float>>(shared.factors, heads_per_block);
  float* output = output_in_shared ? platform::shared_array<float>(shared.output, heads_per_block * params.value_size)
                                   : launch.running + platform::block_index() * heads_per_block * params.value_size;
  const int thread = platform::thread_index();
  DecodeAgent<T, kHeadSize> agent(launch, shared);
  DecodeWalk walk(launch, platform::shared_array<int32_t>(shared.flags, DecodeShared::kFlags) + 1);

  while (walk.next()) {
    if (walk.begins_row()) {
      platform::block_barrier();  // the row before is done with shared memory
      agent.begin_row(walk);
      if (thread < agent.heads()) so_far[thread] = {kNegativeInfinity, 0.0f};
    }
    if (!walk.is_empty()) agent.attend(walk.partition());
    if (launch.split) {
      const auto place = [&](int h) {
        return (walk.sequence() * params.num_heads + agent.head(h)) * params.states.partitions + walk.partition();
      };
      if (thread < agent.heads()) {
        params.states.max_logits[place(thread)] = agent.state(thread).max_logit;
        params.states.exp_sums[place(thread)] = agent.state(thread).exp_sum;
      }
      agent.for_each_output(
          [&](int h, int64_t dim, float value) { params.states.out[place(h) * params.value_size + dim] = value; });
      platform::block_barrier();
      continue;
    }
    if (!walk.is_empty()) {
      if (thread < agent.heads()) factors[thread] = merge(so_far[thread], agent.state(thread));
      platform::block_barrier();
      const bool first = walk.partition() == walk.partitions().first;
      agent.for_each_output([&](int h, int64_t dim, float value) {
        float& place = output[h * params.value_size + dim];
        place = merge_output(first ? 0.0f : place, factors[h], value);
      });
    }
    platform::block_barrier();
    if (!walk.ends_row()) continue;
    for (int64_t i = thread; i < agent.heads() * params.value_size; i += DecodePolicy<T, kHeadSize>::kThreads) {
      const int h = int(i / params.value_size);
      const int64_t dim = i % params.value_size;
      SoftmaxState<float> state = so_far[h];
      const float factor = output_factor(params, agent.head(h), state);
      store_element(params.out, params.out.offset(walk.sequence(), agent.head(h)), dim,
                    walk.is_empty() ? 0.0f : output[i] * factor);
      if (dim == 0) store_lse(params, walk.sequence(), agent.head(h), state);
    }
  }
}

constexpr int kReduceThreads = 128;

// v2's states, merged in ascending order: a warp per row and per kWarpLanes dims of it. The factors of kWarpLanes partitions
// are found at once, by a running maximum over the lanes, and handed round by shuffles while o is summed in order.
PA_KERNEL(kReduceThreads, 1) decode_reduce(const DecodeLaunch launch) {
  const DecodeParams& params = launch.params;
  const PartitionStates& states = params.states;
  const int lane = platform::thread_index() % kWarpLanes;
  constexpr int kWarps = kReduceThreads / kWarpLanes;
  const int64_t chunks = ceil_div(params.value_size, kWarpLanes);
  const int64_t rows = params.num_seqs * params.num_heads;
  for (int64_t item = platform::block_index() * kWarps + platform::thread_index() / kWarpLanes; item < rows * chunks;
       item += platform::num_blocks() * kWarps) {
    const int64_t row = item / chunks;
    const int64_t dim = item % chunks * kWarpLanes + lane;
    const int64_t sequence = row / params.num_heads;
    const int64_t head = row % params.num_heads;
    const Partitions partitions = partitions_of(params, sequence);
    const int64_t first_state = row * states.partitions;
    SoftmaxState<float> state{kNegativeInfinity, 0.0f};
    float output = 0.0f;
    for (int64_t first = partitions.first; first < partitions.end; first += kWarpLanes) {
      const int64_t left = partitions.end - first;
      const int count = int(left < kWarpLanes ? left : kWarpLanes);
      const SoftmaxState<float> own = lane < count ? SoftmaxState<float>{states.max_logits[first_state + first + lane],
                                                                         states.exp_sums[first_state + first + lane]}
                                                   : SoftmaxState<float>{kNegativeInfinity, 0.0f};
      float max_logit = lane_max(state.max_logit, own.max_logit);
      for (int distance = 1; distance < kWarpLanes; distance *= 2) {
        const float below = platform::shuffle_up<kWarpLanes>(max_logit, distance);
        if (lane >= distance) max_logit = lane_max(below, max_logit);
      }
      const float below = platform::shuffle_up<kWarpLanes>(max_logit, 1);
      const float max_before = lane == 0 ? state.max_logit : below;
      const MergeFactors<float> own_factors{rescale_factor(max_before, max_logit), rescale_factor(own.max_logit, max_logit)};
      for (int i = 0; i < count; ++i) {
        const MergeFactors<float> factors{platform::shuffle<kWarpLanes>(own_factors.first, i),
                                          platform::shuffle<kWarpLanes>(own_factors.second, i)};
        const float exp_sum = platform::shuffle<kWarpLanes>(own.exp_sum, i);
        const float next = dim < params.value_size ? states.out[(first_state + first + i) * params.value_size + dim] : 0.0f;
        state.exp_sum = state.exp_sum * factors.first + exp_sum * factors.second;
        output = merge_output(output, factors, next);
      }
      state.max_logit = platform::shuffle<kWarpLanes>(max_logit, count - 1);
    }
    const float factor = output_factor(params, head, state);
    if (dim < params.value_size) {
      store_element(params.out, params.out.offset(sequence, head), dim, partitions.count() > 0 ? output * factor : 0.0f);
    }
    if (item % chunks != 0) continue;
    if (lane == 0) store_lse(params, sequence, head, state);
    for (int64_t i = lane; i < states.partitions; i += kWarpLanes) {
      if (i >= partitions.first && i < partitions.end) continue;
      states.max_logits[first_state + i] = kNegativeInfinity;
      states.exp_sums[first_state + i] = 0.0f;
    }
  }
}

// Head sizes compiled in, so that loops unroll; every other size takes the run-time kernel (0). With fp8 caches the conversion
// dominates, so only the commonest. PAGED_ATTN_FEWER_SIZES: for builds that are checked rather than run.
template <typename T, typename F>
void with_head_size(int64_t size, F&& f) {
  switch (size) {
    case 64: return f(std::integral_constant<int, 64>{});
    case 128: return f(std::integral_constant<int, 128>{});
    case 256: return f(std::integral_constant<int, 256>{});
    default: break;
  }
#if !defined(PAGED_ATTN_FEWER_SIZES)
  if constexpr (sizeof(T) > 1) {
    switch (size) {
      case 80: return f(std::integral_constant<int, 80>{});
      case 96: return f(std::integral_constant<int, 96>{});
      case 112: return f(std::integral_constant<int, 112>{});
      case 120: return f(std::integral_constant<int, 120>{});
      case 192: return f(std::integral_constant<int, 192>{});
      default: break;
    }
  }
#endif
  f(std::integral_constant<int, 0>{});
}

// Everything about a launch that the host decides, from sizes alone: lengths stay on the device.
DecodeLaunch make_launch(const DecodeParams& params, const Queue& queue) {
  const int64_t group = params.group();
  const int64_t head_blocks = ceil_div(group, kHeadBlock);
  // The compiled-in sizes count on K's groups being 16 bytes.
  const CacheTensor& k = params.key_cache;
  const bool key_packets = has_key_packets(k) && k.dim_group == (k.type == ElementType::kFloat32 ? 4 : is_fp8(k.type) ? 16 : 8);
  const bool value_packets = has_value_packets(params.value_cache, params.block_size);
  return {params,           int(ceil_div(group, head_blocks)),
          int(head_blocks), params.states.partitions > 0,
          key_packets,      value_packets,
          nullptr,          queue.status};
}

// v1's blocks: one per (sequence, KV head, head block), fewer where each needs global memory for its output.
int64_t v1_blocks(const DecodeLaunch& launch) {
  const int64_t items = launch.params.num_seqs * launch.num_rows();
  if (launch.params.value_size <= kMaxSharedOutput) return grid_blocks(items, 1);
  return std::min(items, int64_t(platform::device_facts().num_processors) * kSubscription);
}

int64_t running_floats(const DecodeLaunch& launch) {
  if (launch.split || launch.params.value_size <= kMaxSharedOutput) return 0;
  return v1_blocks(launch) * launch.heads_per_block * launch.params.value_size;
}

int64_t state_floats(const DecodeLaunch& launch) {
  const DecodeParams& params = launch.params;
  if (!launch.split || params.states.out) return 0;
  return params.num_seqs * params.num_heads * params.states.partitions * params.value_size;
}

// Enough blocks to fill the card a few times over, and no more than there can be partitions.
template <typename Kernel>
int64_t v2_blocks(const DecodeLaunch& launch, Kernel kernel, const LaunchShape& shape) {
  const int64_t most = launch.params.num_seqs * launch.num_rows() * ceil_div(launch.params.max_seq_len, kPartitionTokens);
  const int64_t resident = platform::max_resident_blocks(kernel, shape, "paged_attention_v2");
  const int64_t places = platform::device_facts().num_processors * resident;
  return std::max<int64_t>(std::min(most, places * kSubscription), 1);
}

template <typename T, int kHeadSize>
void launch_decode(const DecodeLaunch& launch, const Queue& queue) {
  const DecodeShared shared(launch, kHeadSize == 0, !launch.split && !launch.running);
  const auto kernel = decode_kernel<T, kHeadSize>;
  LaunchShape shape{0, DecodePolicy<T, kHeadSize>::kThreads, shared.bytes};
  shape.blocks = launch.split ? v2_blocks(launch, kernel, shape) : v1_blocks(launch);
  platform::launch(launch.split ? "paged_attention_v2" : "paged_attention_v1", kernel, shape, queue.stream, launch);
}

void launch_reduce(const DecodeLaunch& launch, const Queue& queue) {
  const DecodeParams& params = launch.params;
  const int64_t warps = params.num_seqs * params.num_heads * ceil_div(params.value_size, kWarpLanes);
  platform::launch("paged_attention_v2, reduction", decode_reduce,
                   {grid_blocks(warps, kReduceThreads / kWarpLanes), kReduceThreads, 0}, queue.stream, launch);
}

}  // namespace

int64_t decode_scratch_floats(const DecodeParams& params) {
  const DecodeLaunch launch = make_launch(params, {});
  return running_floats(launch) + state_floats(launch);
}

void decode(const DecodeParams& params, float* scratch, const Queue& queue) {
  if (params.num_seqs == 0) return;
  DecodeLaunch launch = make_launch(params, queue);
  if (running_floats(launch) > 0) launch.running = scratch;
  if (state_floats(launch) > 0) launch.params.states.out = scratch;
  const bool fixed_size = params.key_size == params.value_size && launch.key_packets && launch.value_packets;
  with_type(params.key_cache.type, [&](auto tag) {
    using T = decltype(tag);
    with_head_size<T>(fixed_size ? params.key_size : 0,
                      [&](auto size) { launch_decode<T, decltype(size)::value>(launch, queue); });
  });
  if (launch.split) launch_reduce(launch, queue);
}

}  // namespace paged_attn::gpu
