// Blocks per second, of 128 threads, each through about a hundred shuffles and a barrier in every round, as a decode kernel.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "simt/planted/planted.h"

namespace planted {
namespace {

constexpr int kRounds = 16;

PA_KERNEL(kThreads, 1) decode_like_kernel(float* out) {
  const int thread = platform::thread_index();
  float* shared = platform::shared_array<float>(0, kThreads);
  float sum = 0.0f;
  for (int round = 0; round < kRounds; ++round) {
    float value = float(thread + round);
    for (int mask = 1; mask < 32; mask *= 2) value += platform::shuffle_xor<32>(value, mask);
    shared[thread] = value;
    platform::block_barrier();
    sum += shared[kThreads - 1 - thread];
    platform::block_barrier();
  }
  out[platform::block_index() * kThreads + thread] = sum;
}
PLANTED(speed) {
  const char* asked = std::getenv("PLANTED_BLOCKS");
  const int64_t blocks = asked ? std::atoll(asked) : 20;
  std::vector<float> out(size_t(blocks) * kThreads);
  const auto begin = std::chrono::steady_clock::now();
  launch(decode_like_kernel, blocks, kFloats, out.data());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%.0f blocks/s\n", double(blocks) / took.count());
  return true;
}

}  // namespace
}  // namespace planted
