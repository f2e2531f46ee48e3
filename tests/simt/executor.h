// The host executor: runs a GPU kernel on the CPU, every thread of a block a fiber that gives way only where threads meet, at
// barriers and shuffles. Always checked, and reported as std::runtime_error out of run():
//   - every thread of the block reaches a barrier, and the same one;
//   - the lanes of a shuffle's group meet in the same shuffle, and name lanes of the group;
//   - arrays of shared memory agree between threads, do not overlap, fit into what the launch asked for, and are not written
//     just beyond their end;
//   - packets are aligned; the launch's shape is one that every card takes.
// Every array of shared memory lies apart from the others and is filled with NaN (0xff) in every block. Threads and blocks run
// in an order permuted by PAGED_ATTN_SIMT_SEED or paged_attn_simt_set_seed(): results that depend on it show a race. An
// overflow of a stack stops the program. Blocks are dealt to PAGED_ATTN_SIMT_THREADS OS threads (2); with 1, what happens
// depends on the seed alone.
//
// Under AddressSanitizer shared memory outside its arrays is poisoned. Under ThreadSanitizer every GPU thread is a thread of
// its own that only barriers of its block and the launch's begin and end synchronise; stacks and shared memory are fresh in
// every block. Therefore, in what runs on a fiber here: no allocation that another fiber frees, and no libc call on shared
// memory.
//
// What it does not check: that groups narrower than a warp shuffle at the same time, which a card may ask for.
//
// To add a platform function: in platform.h, beside its twin in csrc/gpu/platform; if threads meet in it, here. planted/ has
// the kernels that show that each of these checks works.
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
