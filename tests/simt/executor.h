// The host executor: runs a GPU kernel on the CPU, one block after another, every thread of a block a fiber that gives way only
// where threads meet, at barriers and shuffles. Always checked, and reported as std::runtime_error out of run():
//   - every thread of the block reaches a barrier, and the same one;
//   - the lanes of a shuffle's group meet in the same shuffle, and name lanes of the group;
//   - arrays of shared memory agree between threads, do not overlap, and fit into what the launch asked for;
//   - packets are aligned.
// Shared memory is filled with NaN (0xff) before each block. Threads and blocks run in an order permuted by a seed: results
// that depend on it show a race. Under AddressSanitizer every shared array is an allocation of its own; under ThreadSanitizer
// every GPU thread is a thread of its own that only barriers synchronise, and blocks are concurrent.
//
// To add a platform function: in platform.h, beside its twin in csrc/gpu/platform; if threads meet in it, here.
#pragma once

#include <cstdint>
#include <string>

namespace paged_attn::simt {

// Where a kernel calls a function in which threads meet.
struct Site {
  const char* file;
  int line;
};

enum class Shuffle { kXor, kUp, kIndex };

// Throws out of run().
[[noreturn]] void violation(const std::string& what);

int thread_index();
int64_t block_index();
int64_t num_blocks();

void block_barrier(Site site);

// What the named lane of the own group of `width` passed.
uint32_t shuffle(Shuffle kind, uint32_t value, int argument, int width, Site site);

void* shared_array(int64_t offset, int64_t bytes);

struct Grid {
  const char* name;
  int64_t blocks;
  int threads;
  int64_t shared_bytes;
  int warp_lanes;
};

// body(argument) in every thread of every block.
void run(const Grid& grid, void (*body)(const void*), const void* argument);

}  // namespace paged_attn::simt
