// The part of platform.h that code outside the kernels' sources may use: Stream, copy(...), synchronize(...). The registration
// is compiled by the host's compiler, which knows no kernel launches and no device functions.
#pragma once

#if defined(PAGED_ATTN_SIMT)
#include "gpu/platform/platform.h"
#else
#include "gpu/platform/runtime.h"
#endif
