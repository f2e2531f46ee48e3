// The one algebra: the state of an online softmax over some set of keys is <m, l, o>, the running maximum of the logits, the
// sum of exponentials relative to m, and the exponential-weighted sum of values. States over disjoint keys form a monoid under
// merge, with identity <-inf, 0, 0>. Partitions, key tiles, sinks, partial results and ranks are all combined by the functions
// below. (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, FlashAttention.)
//
// o is long and lives where its owner keeps it: merge returns the factors that its two addends have to be multiplied by.
#pragma once

#include "core/portability.h"

namespace paged_attn {

// Lane: float, or a SIMD vector with +, *, and the three functions below found by argument-dependent lookup.
PA_HD float lane_max(float a, float b) { return a > b ? a : b; }
PA_HD float lane_exp(float x) { return expf(x); }
PA_HD float zero_where_empty(float max_logit, float value) { return max_logit == kNegativeInfinity ? 0.0f : value; }

template <typename Lane>
struct SoftmaxState {
  Lane max_logit;
  Lane exp_sum;
};

template <typename Lane>
struct MergeFactors {
  Lane first;
  Lane second;
};

// exp(from - to) for from <= to; 0 for an empty state, also where both are empty and the difference would be NaN.
template <typename Lane>
PA_HD Lane rescale_factor(Lane from, Lane to) {
  return zero_where_empty(from, lane_exp(from - to));
}

// state := state merged with other; o := first * o + second * o_other.
template <typename Lane>
PA_HD MergeFactors<Lane> merge(SoftmaxState<Lane>& state, const SoftmaxState<Lane>& other) {
  const Lane max_logit = lane_max(state.max_logit, other.max_logit);
  const MergeFactors<Lane> factors{rescale_factor(state.max_logit, max_logit), rescale_factor(other.max_logit, max_logit)};
  state.exp_sum = state.exp_sum * factors.first + other.exp_sum * factors.second;
  state.max_logit = max_logit;
  return factors;
}

// A sink is a key with this logit and value zero.
template <typename Lane>
PA_HD SoftmaxState<Lane> sink_state(Lane logit) {
  return {logit, Lane(1.0f)};
}

// An output with its logsumexp is a state of which o is already divided by l: <lse, 1, out>. +inf marks an empty part in
// FlashAttention-2's convention, -inf in everyone else's.
PA_HD SoftmaxState<float> partial_state(float lse) {
  const bool empty = lse == kNegativeInfinity || lse == -kNegativeInfinity;
  return {empty ? kNegativeInfinity : lse, empty ? 0.0f : 1.0f};
}

// What o has to be multiplied by to be the attention output: 0 for an empty row, never NaN.
PA_HD float normalizer(const SoftmaxState<float>& state) { return state.exp_sum == 0.0f ? 0.0f : 1.0f / state.exp_sum; }

PA_HD float logsumexp(const SoftmaxState<float>& state) {
  return state.exp_sum == 0.0f ? kNegativeInfinity : state.max_logit + logf(state.exp_sum);
}

}  // namespace paged_attn
