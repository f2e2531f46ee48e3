#include "gpu/status.h"

#include "gpu/platform/platform.h"

namespace paged_attn::gpu {

// A variable of the module rather than an allocation: it exists on every device as soon as the module does, zeroed.
PA_DEVICE_VARIABLE int paged_attn_status_word = 0;

int* status_word() { return platform::device_address(&paged_attn_status_word); }

}  // namespace paged_attn::gpu
