// What differs between vendors, as functions: the only place that knows one. Everything above this folder is written once, for
// warps of kWarpLanes lanes, and uses no intrinsic and no number that belongs to a card.
//
// Each platform header defines, in namespace paged_attn::gpu::platform, on the device:
//   PA_DEVICE, PA_KERNEL(max_threads, min_blocks), PA_DEVICE_VARIABLE
//                                       qualifiers of a device function, a kernel entry point (min_blocks: how many of
//                                       them a processor has to have registers for), and a variable in device memory
//   kWarpLanes                          lanes that run together
//   kLoadBytes                          what a lane loads at once from a cache where kernels stream: 16 or 4
//   thread_index(), block_index(), num_blocks()
//   block_barrier()                     every thread of the block reaches it; orders shared memory
//   shuffle_xor<Width>(value, mask), shuffle_up<Width>(value, distance), shuffle<Width>(value, lane)
//                                       float or int32_t; Width lanes form a group, a power of two up to kWarpLanes; all lanes
//                                       of the warp take part; no warp-level barrier exists here: lanes of a warp hand data
//                                       over through shuffles, or through shared memory and block_barrier()
//   shared_array<T>(offset, count)      `count` elements of the block's dynamic shared memory, `offset` bytes into it; arrays
//   at
//                                       different offsets do not overlap (shared_layout.h makes the offsets)
//   load<Bytes>(pointer), store<Bytes>(pointer, packet)   aligned packets of 1, 2, 4, 8 or 16 bytes
//   load_shared<Bytes>(pointer)         an aligned packet of shared memory
//   half_to_float(bits), float_to_half(value)
//   set_if_zero(word, value)            atomically, on a 32-bit word of global or shared memory
//   raise_to(word, value)               word := max(word, value), likewise
// and on the host:
//   Stream, device_facts(), device_address(&variable), launch(...), max_resident_blocks(...), copy(...), synchronize(...)
#pragma once

#include "core/portability.h"

namespace paged_attn::gpu {

// Bytes moved by one load, aligned to their size.
template <int Bytes>
struct alignas(Bytes) Packet {
  static_assert(Bytes == 1 || Bytes == 2 || Bytes == 4 || Bytes == 8 || Bytes == 16, "what cards load at once");
  unsigned char bytes[Bytes];
};

// What a launch asks of the device.
struct LaunchShape {
  int64_t blocks;
  int threads;
  int64_t shared_bytes;
};

struct DeviceFacts {
  int num_processors;  // streaming multiprocessors
  int warp_lanes;
  int architecture;                // 10 * major + minor of the compute capability
  int64_t shared_bytes_per_block;  // what a kernel may ask for
};

}  // namespace paged_attn::gpu

#if defined(PAGED_ATTN_SIMT)
#include "simt/platform.h"  // the host executor, in tests/
#elif defined(__ILUVATAR__)
#include "gpu/platform/corex.h"
#else
#include "gpu/platform/cuda.h"
#endif
