#include <cstdio>
#include <cstdlib>

#include "simt/planted/planted.h"

namespace planted {
namespace {

PA_KERNEL(kThreads, 1) outside_width_kernel(bool bug) { platform::shuffle<8>(1.0f, bug ? 8 : 7); }
PLANTED(lane_outside_width) {
  launch(outside_width_kernel, 1, 0, bug);
  return true;
}
PA_KERNEL(kThreads, 1) negative_lane_kernel(bool bug) { platform::shuffle<8>(1.0f, bug ? -1 : 0); }
PLANTED(negative_lane) {
  launch(negative_lane_kernel, 1, 0, bug);
  return true;
}
PA_KERNEL(kThreads, 1) mask_kernel(bool bug) { platform::shuffle_xor<8>(1.0f, bug ? 8 : 4); }
PLANTED(mask_outside_width) {
  launch(mask_kernel, 1, 0, bug);
  return true;
}
PA_KERNEL(kThreads, 1) missing_lane_kernel(bool bug) {
  if (bug && platform::thread_index() == 5) return;
  platform::shuffle_xor<8>(1.0f, 1);
}
PLANTED(missing_lane) {
  launch(missing_lane_kernel, 1, 0, bug);
  return true;
}
PA_KERNEL(kThreads, 1) two_shuffles_kernel(bool bug) {
  if (bug && platform::thread_index() % 2) {
    platform::shuffle_xor<8>(1.0f, 1);
  } else {
    platform::shuffle_xor<8>(1.0f, 1);
  }
}
PLANTED(two_shuffles) {
  launch(two_shuffles_kernel, 1, 0, bug);
  return true;
}
PA_KERNEL(kThreads, 1) barrier_for_shuffle_kernel(bool bug) {
  if (bug && platform::thread_index() == 5) platform::block_barrier();
  platform::shuffle_xor<8>(1.0f, 1);
  if (!bug || platform::thread_index() != 5) platform::block_barrier();
}
PLANTED(barrier_for_shuffle) {
  launch(barrier_for_shuffle_kernel, 1, 0, bug);
  return true;
}
// Groups of one warp are apart: each goes as many rounds as it has to.
PA_KERNEL(kThreads, 1) groups_kernel(int* out) {
  const int thread = platform::thread_index();
  int sum = 0;
  for (int round = 0; round < thread / 4; ++round) sum += platform::shuffle<4>(thread, 3);
  out[thread] = sum;
}
PLANTED(independent_groups) {
  std::vector<int> out(kThreads);
  launch(groups_kernel, 1, 0, out.data());
  for (int i = 0; i < kThreads; ++i) {
    if (out[size_t(i)] != i / 4 * (i / 4 * 4 + 3)) return false;
  }
  return true;
}

// What CUDA C++ Programming Guide, "Warp Shuffle Functions", says of each; the lane argument differs from lane to lane.
template <int Width>
PA_KERNEL(kThreads, 1)
values_kernel(int* out) {
  const int thread = platform::thread_index();
  const int lane = thread % Width;
  const int first = thread - lane;
  int wrong = 0;
  for (int i = 0; i < Width; ++i) {
    wrong += platform::shuffle_xor<Width>(thread, i) != first + (lane ^ i);
    wrong += platform::shuffle_up<Width>(thread, i) != (lane < i ? thread : thread - i);
    wrong += platform::shuffle<Width>(thread, i) != first + i;
    const int other = (3 * lane + i) % Width;
    wrong += platform::shuffle<Width>(float(thread) + 0.5f, other) != float(first + other) + 0.5f;
  }
  out[thread] = wrong;
}
template <int Width>
bool values_right() {
  std::vector<int> out(kThreads, -1);
  launch(values_kernel<Width>, 1, 0, out.data());
  for (int wrong : out) {
    if (wrong) return false;
  }
  if constexpr (Width < kWarpLanes) {
    return values_right<2 * Width>();
  } else {
    return true;
  }
}
PLANTED(shuffle_values) { return values_right<2>(); }

// The order in which threads and blocks run, which no kernel may ask for; printed, so that seeds can be compared.
PA_KERNEL(kThreads, 1) order_kernel(int* count, int* order) {
  platform::block_barrier();
  order[(*count)++] = int(platform::block_index()) * kThreads + platform::thread_index();
}
PLANTED(order) {
  std::vector<int> count(1), order(2 * kThreads);
  launch(order_kernel, 2, 0, count.data(), order.data());
  for (int i : order) std::printf("%d ", i);
  return true;
}

// A sum over a block as kernels do it, over inexact values: its bits are printed.
PA_KERNEL(kThreads, 1) sum_kernel(float* out) {
  const int thread = platform::thread_index();
  constexpr int kWarps = kThreads / kWarpLanes;
  float* shared = platform::shared_array<float>(0, kWarps);
  float sum = 1.0f / float(3 + thread + 7 * platform::block_index());
  for (int mask = 1; mask < kWarpLanes; mask *= 2) sum += platform::shuffle_xor<kWarpLanes>(sum, mask);
  if (thread % kWarpLanes == 0) shared[thread / kWarpLanes] = sum;
  platform::block_barrier();
  float total = 0.0f;
  for (int i = 0; i < kWarps; ++i) total += shared[i];
  if (thread == 0) out[platform::block_index()] = total;
}
PLANTED(sums) {
  std::vector<float> out(16);
  launch(sum_kernel, 16, 16, out.data());
  for (float sum : out) std::printf("%a ", double(sum));
  return true;
}

}  // namespace
}  // namespace planted
