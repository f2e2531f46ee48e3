// How kernels set the device's error word (status.h).
#pragma once

#include "gpu/platform/platform.h"
#include "gpu/status.h"

namespace paged_attn::gpu {

PA_DEVICE void report(int* status, Operator op, Reason reason, int64_t index) {
  platform::set_if_zero(status, DeviceError{op, reason, index}.pack());
}

}  // namespace paged_attn::gpu
