// merge_attn_states: two partial results over disjoint keys become one.

#include "core/softmax_state.h"
#include "gpu/grid.h"
#include "gpu/kernels.h"
#include "gpu/rows.h"

namespace paged_attn::gpu {
namespace {

constexpr int kThreads = 128;

// A warp per (token, head), its lanes over the dims; grid-stride, so any number of rows.
PA_KERNEL(kThreads, 1) merge_kernel(const MergeParams params) {
  constexpr int kRowsPerBlock = kThreads / platform::kWarpLanes;
  const int lane = platform::thread_index() % platform::kWarpLanes;
  const int warp = platform::thread_index() / platform::kWarpLanes;
  const int64_t rows = params.num_tokens * params.num_heads;
  for (int64_t row = platform::block_index() * kRowsPerBlock + warp; row < rows;
       row += platform::num_blocks() * kRowsPerBlock) {
    const int64_t token = row / params.num_heads;
    const int64_t head = row % params.num_heads;
    // Read by one lane and handed round: out_lse may be one of the two, and no lane may read what lane 0 has written.
    float lses[2] = {0.0f, 0.0f};
    if (lane == 0) {
      lses[0] = params.prefix_lse[head * params.prefix_lse_head_stride + token * params.prefix_lse_token_stride];
      lses[1] = params.suffix_lse[head * params.suffix_lse_head_stride + token * params.suffix_lse_token_stride];
    }
    SoftmaxState<float> state = partial_state(platform::shuffle<platform::kWarpLanes>(lses[0], 0));
    const SoftmaxState<float> suffix = partial_state(platform::shuffle<platform::kWarpLanes>(lses[1], 0));
    const bool has_prefix = state.exp_sum != 0.0f;
    const bool has_suffix = suffix.exp_sum != 0.0f;
    const MergeFactors<float> factors = merge(state, suffix);
    const float normalize = normalizer(state);
    for (int64_t d = lane; d < params.head_size; d += platform::kWarpLanes) {
      // One part alone is passed on as it is: the other's rows may hold anything, NaN included.
      const float a = has_prefix ? load_element(params.prefix_out, params.prefix_out.offset(token, head), d) : 0.0f;
      const float b = has_suffix ? load_element(params.suffix_out, params.suffix_out.offset(token, head), d) : 0.0f;
      const float value = has_prefix && has_suffix ? (a * factors.first + b * factors.second) * normalize : a + b;
      store_element(params.out, params.out.offset(token, head), d, value);
    }
    if (params.out_lse && lane == 0) {
      params.out_lse[head * params.out_lse_head_stride + token * params.out_lse_token_stride] = logsumexp(state);
    }
  }
}

}  // namespace

void merge_partials(const MergeParams& params, const Queue& queue) {
  const int64_t rows = params.num_tokens * params.num_heads;
  platform::launch("merge_attn_states", merge_kernel, {grid_blocks(rows, kThreads / platform::kWarpLanes), kThreads, 0},
                   queue.stream, params);
}

}  // namespace paged_attn::gpu
