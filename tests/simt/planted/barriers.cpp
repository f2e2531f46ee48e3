#include "simt/planted/planted.h"

namespace planted {
namespace {

bool all_equal(const std::vector<float>& values, float expected) {
  for (float value : values) {
    if (value != expected) return false;
  }
  return true;
}

PA_KERNEL(kThreads, 1) missing_barrier_kernel(float* out, bool bug) {
  const int thread = platform::thread_index();
  float* shared = platform::shared_array<float>(0, kThreads);
  shared[thread] = 1.0f;
  if (!bug) platform::block_barrier();
  out[thread] = shared[kThreads - 1 - thread];
}
PLANTED(missing_barrier) {
  std::vector<float> out(kThreads);
  launch(missing_barrier_kernel, 1, kFloats, out.data(), bug);
  return all_equal(out, 1.0f);
}

// What a kernel does that sums twice over one buffer: the second round may overwrite what slow threads have yet to read.
PA_KERNEL(kThreads, 1) reused_buffer_kernel(float* out, bool bug) {
  const int thread = platform::thread_index();
  const int warp = thread / kWarpLanes;
  constexpr int kWarps = kThreads / kWarpLanes;
  float* shared = platform::shared_array<float>(0, kWarps);
  float total = 0.0f;
  for (int round = 0; round < 2; ++round) {
    float sum = float(1 + round);
    for (int mask = 1; mask < kWarpLanes; mask *= 2) sum += platform::shuffle_xor<kWarpLanes>(sum, mask);
    if (thread % kWarpLanes == 0) shared[warp] = sum;
    platform::block_barrier();
    for (int i = 0; i < kWarps; ++i) total += shared[i];
    if (!bug) platform::block_barrier();
  }
  out[thread] = total;
}
PLANTED(reused_buffer) {
  std::vector<float> out(kThreads);
  launch(reused_buffer_kernel, 1, 4 * int64_t(sizeof(float)), out.data(), bug);
  return bug || all_equal(out, 3.0f * kThreads);
}

// Without a meeting between the read and the write, a thread is at the next barrier before another has left the last one.
PA_KERNEL(kThreads, 1) missing_second_barrier_kernel(float* out, bool bug) {
  const int thread = platform::thread_index();
  float* shared = platform::shared_array<float>(0, kThreads);
  shared[thread] = 1.0f;
  platform::block_barrier();
  const float first = shared[kThreads - 1 - thread];
  if (!bug) platform::block_barrier();
  shared[thread] = 2.0f;
  platform::block_barrier();
  out[thread] = first + shared[kThreads - 1 - thread];
}
PLANTED(missing_second_barrier) {
  std::vector<float> out(kThreads);
  launch(missing_second_barrier_kernel, 1, kFloats, out.data(), bug);
  return bug || all_equal(out, 3.0f);
}

PA_KERNEL(kThreads, 1) divergent_barrier_kernel(bool bug) {
  if (!bug || platform::thread_index() < kThreads / 2) platform::block_barrier();
  platform::shuffle_xor<2>(0, 1);
}
PLANTED(divergent_barrier) {
  launch(divergent_barrier_kernel, 1, 0, bug);
  return true;
}

PA_KERNEL(kThreads, 1) early_return_kernel(bool bug) {
  if (bug && platform::thread_index() == 5) return;
  platform::block_barrier();
}
PLANTED(early_return) {
  launch(early_return_kernel, 3, 0, bug);
  return true;
}

PA_KERNEL(kThreads, 1) different_barriers_kernel(bool bug) {
  if (bug && platform::thread_index() < kThreads / 2) {
    platform::block_barrier();
  } else {
    platform::block_barrier();
  }
}
PLANTED(different_barriers) {
  launch(different_barriers_kernel, 1, 0, bug);
  return true;
}

}  // namespace
}  // namespace planted
