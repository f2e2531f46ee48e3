// Small kernels with and without a planted bug: what the executor claims to find, it must find here, and only there.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "gpu/platform/platform.h"

namespace planted {

namespace platform = paged_attn::gpu::platform;
using platform::kWarpLanes;

constexpr int kThreads = 128;
constexpr int64_t kFloats = kThreads * int64_t(sizeof(float));

// Runs its kernels, `bug` or not, and tells whether the results are right.
using Run = bool (*)(bool bug);

struct Case {
  const char* name;
  Run run;
};
std::vector<Case>& cases();

struct Register {
  Register(const char* name, Run run) { cases().push_back({name, run}); }
};
#define PLANTED(name)                          \
  bool name(bool bug);                         \
  const Register register_##name(#name, name); \
  bool name([[maybe_unused]] bool bug)

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), int64_t blocks, int64_t shared_bytes, const Parameters&... parameters) {
  platform::launch("planted", kernel, {blocks, kThreads, shared_bytes}, platform::Stream{}, parameters...);
}

}  // namespace planted
