// merge_attn_states: two partial results over disjoint keys become one.

#include "core/even_share.h"
#include "core/softmax_state.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/rows.h"
#include "cpu/kernels/scratch.h"

namespace paged_attn::cpu {
namespace {

struct Merge {
  const MergeParams& params;
  const Parallel& parallel;

  void share(int64_t worker) const {
    const Range rows = even_share(params.num_tokens * params.num_heads, parallel.num_threads, worker);
    if (rows.begin == rows.end) return;
    static thread_local Scratch scratch;
    scratch.reset(2 * Scratch::bytes_for<float>(params.head_size));
    float* prefix = scratch.take<float>(params.head_size);
    float* suffix = scratch.take<float>(params.head_size);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int64_t token = row / params.num_heads;
      const int64_t head = row % params.num_heads;
      SoftmaxState<float> state =
          partial_state(params.prefix_lse[head * params.prefix_lse_head_stride + token * params.prefix_lse_token_stride]);
      const SoftmaxState<float> other =
          partial_state(params.suffix_lse[head * params.suffix_lse_head_stride + token * params.suffix_lse_token_stride]);
      load_row(params.prefix_out, token, head, params.head_size, prefix);
      load_row(params.suffix_out, token, head, params.head_size, suffix);
      const bool prefix_only = other.exp_sum == 0.0f;
      const bool suffix_only = state.exp_sum == 0.0f;
      const MergeFactors<float> factors = merge(state, other);
      // One part alone is passed on as it is: the other's rows may hold anything, NaN included.
      if (suffix_only) {
        store_row(params.out, token, head, params.head_size, suffix, factors.second);
      } else if (prefix_only) {
        store_row(params.out, token, head, params.head_size, prefix, factors.first);
      } else {
        scale_add(prefix, factors.first, suffix, factors.second, params.head_size);
        store_row(params.out, token, head, params.head_size, prefix, normalizer(state));
      }
      if (params.out_lse) {
        params.out_lse[head * params.out_lse_head_stride + token * params.out_lse_token_stride] = logsumexp(state);
      }
    }
  }
};

}  // namespace

void merge_partials(const MergeParams& params, const Parallel& parallel) {
  Merge merge{params, parallel};
  parallel.run(parallel.num_threads, [](void* self, int64_t i) { static_cast<Merge*>(self)->share(i); }, &merge);
}

}  // namespace paged_attn::cpu
