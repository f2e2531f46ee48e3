#include "simt/planted/planted.h"

namespace planted {
namespace {

PA_KERNEL(kThreads, 1) shared_out_of_range_kernel(float* out, bool bug) {
  const int thread = platform::thread_index();
  float* first = platform::shared_array<float>(0, kThreads);
  float* second = platform::shared_array<float>(kFloats, kThreads);
  first[thread + (bug ? 1 : 0)] = 1.0f;  // the last thread's element would be the second array's
  second[thread] = 2.0f;
  out[thread] = first[thread + (bug ? 1 : 0)] + second[thread];
}
PLANTED(shared_out_of_range) {
  std::vector<float> out(kThreads);
  launch(shared_out_of_range_kernel, 1, 2 * kFloats, out.data(), bug);
  return true;
}

PA_KERNEL(kThreads, 1) global_out_of_range_kernel(float* out, bool bug) {
  out[platform::thread_index() + (bug ? 1 : 0)] = 1.0f;
}
PLANTED(global_out_of_range) {
  std::vector<float> out(kThreads);
  launch(global_out_of_range_kernel, 1, 0, out.data(), bug);
  return true;
}

PA_KERNEL(kThreads, 1) local_out_of_range_kernel(float* out, int end) {
  float values[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  for (int i = 0; i < 4; ++i) values[i] = platform::shuffle_xor<2>(values[i], 1);  // other threads run in between
  float sum = 0.0f;
  for (int i = 0; i < end; ++i) sum += values[i];
  out[platform::thread_index()] = sum;
}
PLANTED(local_out_of_range) {
  std::vector<float> out(kThreads);
  launch(local_out_of_range_kernel, 1, 0, out.data(), bug ? 5 : 4);
  return bug || out[0] == 10.0f;
}

PA_KERNEL(kThreads, 1) overlapping_arrays_kernel(bool bug) {
  platform::shared_array<float>(0, kThreads)[platform::thread_index()] = 1.0f;
  platform::shared_array<float>(bug ? kFloats - 16 : kFloats, kThreads)[platform::thread_index()] = 1.0f;
}
PLANTED(overlapping_arrays) {
  launch(overlapping_arrays_kernel, 1, 2 * kFloats, bug);
  return true;
}

PA_KERNEL(kThreads, 1) disagreeing_counts_kernel(bool bug) {
  platform::shared_array<float>(0, bug && platform::thread_index() == 7 ? kThreads - 1 : kThreads);
}
PLANTED(disagreeing_counts) {
  launch(disagreeing_counts_kernel, 1, kFloats, bug);
  return true;
}

PA_KERNEL(kThreads, 1) array_beyond_launch_kernel(bool bug) { platform::shared_array<float>(0, kThreads + (bug ? 1 : 0)); }
PLANTED(array_beyond_launch) {
  launch(array_beyond_launch_kernel, 1, kFloats, bug);
  return true;
}

// In the second block too: nothing is left there of the first.
PA_KERNEL(kThreads, 1) unwritten_shared_kernel(float* out, bool bug) {
  float* shared = platform::shared_array<float>(0, kThreads);
  if (!bug || platform::thread_index() != 9 || platform::block_index() == 0) shared[platform::thread_index()] = 1.0f;
  platform::block_barrier();
  float sum = 0.0f;
  for (int i = 0; i < kThreads; ++i) sum += shared[i];
  if (platform::thread_index() == 0) out[platform::block_index()] = sum;
}
PLANTED(unwritten_shared) {
  std::vector<float> out(8);
  launch(unwritten_shared_kernel, 8, kFloats, out.data(), bug);
  int wrong = 0;
  for (float sum : out) wrong += sum != float(kThreads);
  return wrong == 0;
}

PA_KERNEL(kThreads, 1) one_address_kernel(int* out, bool bug, bool barriers) {
  for (int i = 0; barriers && i < 2; ++i) platform::block_barrier();
  if (platform::thread_index() == 0) out[bug ? 0 : platform::block_index()] = 1;
  if (barriers) platform::block_barrier();
}
bool one_address(bool bug, bool barriers) {
  std::vector<int> out(3);
  launch(one_address_kernel, 3, 0, out.data(), bug, barriers);
  return bug || out == std::vector<int>{1, 1, 1};
}
PLANTED(blocks_write_one_address) { return one_address(bug, false); }
// Barriers order the threads of their own block only.
PLANTED(blocks_write_one_address_between_barriers) { return one_address(bug, true); }

// Atomic operations are no race, and order nothing else.
PA_KERNEL(kThreads, 1) atomics_kernel(int* word, int* data, bool bug) {
  if (platform::thread_index() != 0) return;
  if (bug) data[0] = 1;
  platform::set_if_zero(word, 7);
}
PLANTED(atomics) {
  std::vector<int> word(1), data(1);
  launch(atomics_kernel, 4, 0, word.data(), data.data(), bug);
  return word[0] == 7;
}

// Launches are ordered: each reads what the one before wrote, by other threads, and the host reads it in the end.
PA_KERNEL(kThreads, 1) next_kernel(const float* from, float* to) {
  const int64_t i = platform::block_index() * kThreads + platform::thread_index();
  to[i] = from[platform::num_blocks() * kThreads - 1 - i] + 1.0f;
}
PLANTED(launches_in_order) {
  std::vector<float> a(2 * kThreads), b(2 * kThreads);
  for (int i = 0; i < 3; ++i) {
    launch(next_kernel, 2, 0, static_cast<const float*>(a.data()), b.data());
    launch(next_kernel, 2, 0, static_cast<const float*>(b.data()), a.data());
  }
  return a[3] == 6.0f;
}

PA_KERNEL(kThreads, 1) misaligned_load_kernel(const char* data, int64_t offset) { platform::load<16>(data + offset); }
PA_KERNEL(kThreads, 1) misaligned_store_kernel(char* data, int64_t offset) {
  if (platform::thread_index() == 0) platform::store<8>(data + offset, paged_attn::gpu::Packet<8>{});
}
alignas(16) char bytes[32];
PLANTED(misaligned_load) {
  launch(misaligned_load_kernel, 1, 0, static_cast<const char*>(bytes), int64_t(bug ? 8 : 16));
  return true;
}
PLANTED(misaligned_store) {
  launch(misaligned_store_kernel, 1, 0, static_cast<char*>(bytes), int64_t(bug ? 4 : 8));
  return true;
}

int depth_of(int depth) {
  volatile char frame[1024];
  frame[0] = char(depth);
  return depth == 0 ? 0 : depth_of(depth - 1) + 1 + (frame[0] - char(depth));
}
PA_KERNEL(kThreads, 1) stack_overflow_kernel(int* out, int depth) { out[platform::thread_index()] = depth_of(depth); }
PLANTED(stack_overflow) {
  std::vector<int> out(kThreads);
  launch(stack_overflow_kernel, 1, 0, out.data(), bug ? 1 << 20 : 8);
  return bug || out[0] == 8;
}

PA_KERNEL(kThreads, 1) nothing_kernel() {}
bool launch_nothing(int threads, int64_t shared_bytes) {
  platform::launch("nothing", nothing_kernel, {1, threads, shared_bytes}, platform::Stream{});
  return true;
}
PLANTED(too_many_threads) { return launch_nothing(bug ? 1024 + kWarpLanes : 1024, 0); }
PLANTED(half_a_warp) { return launch_nothing(bug ? kWarpLanes + kWarpLanes / 2 : kWarpLanes, 0); }
PLANTED(too_much_shared) { return launch_nothing(kThreads, 48 * 1024 + (bug ? 1 : 0)); }

// A launch that failed leaves nothing behind.
PLANTED(recovery) {
  std::vector<float> out(8);
  for (int i = 0; i < 3; ++i) {
    try {
      launch(array_beyond_launch_kernel, 4, kFloats, true);
      return false;
    } catch (const std::exception&) {}
    launch(unwritten_shared_kernel, 8, kFloats, out.data(), false);
    for (float sum : out) {
      if (sum != float(kThreads)) return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace planted
