// Sums and searches over the sequences of a batch by one warp, so that lengths need not leave the device.
#pragma once

#include "gpu/platform/platform.h"

namespace paged_attn::gpu {

template <int kWidth>
PA_DEVICE int32_t warp_sum(int32_t value) {
  for (int mask = 1; mask < kWidth; mask *= 2) value += platform::shuffle_xor<kWidth>(value, mask);
  return value;
}

// Of lanes 0 to the own.
template <int kWidth>
PA_DEVICE int32_t warp_inclusive_sum(int32_t value, int lane) {
  for (int distance = 1; distance < kWidth; distance *= 2) {
    const int32_t below = platform::shuffle_up<kWidth>(value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// count(i) summed over i in [0, n); the whole warp calls.
template <typename Count>
PA_DEVICE int32_t warp_total(int64_t n, int lane, Count count) {
  int32_t sum = 0;
  for (int64_t i = lane; i < n; i += platform::kWarpLanes) sum += count(i);
  return warp_sum<platform::kWarpLanes>(sum);
}

// The i with before(i) <= item < before(i) + count(i), where before(i) sums the counts below i; the whole warp calls, and every
// lane gets {i, before(i)}. `item` is below the total.
struct Found {
  int32_t index;
  int32_t before;
};
template <typename Count>
PA_DEVICE Found warp_find(int64_t n, int32_t item, int lane, Count count) {
  constexpr int kLanes = platform::kWarpLanes;
  int32_t before = 0;
  for (int64_t first = 0;; first += kLanes) {
    const int32_t own = first + lane < n ? count(first + lane) : 0;
    const int32_t through = before + warp_inclusive_sum<kLanes>(own, lane);
    const int32_t last = platform::shuffle<kLanes>(through, kLanes - 1);
    if (item < last) {  // the same in every lane
      const int32_t lanes_below = warp_sum<kLanes>(through <= item ? 1 : 0);
      const int32_t found_through = platform::shuffle<kLanes>(through, lanes_below);
      const int32_t found_own = platform::shuffle<kLanes>(own, lanes_below);
      return {int32_t(first) + lanes_below, found_through - found_own};
    }
    before = last;
  }
}

}  // namespace paged_attn::gpu
