// The boundary between csrc/ops, which knows torch, and the kernel libraries, which do not: one library per instruction set,
// each exporting one function that returns this table.
#pragma once

#include "core/params.h"

namespace paged_attn::cpu {

// How kernels run in parallel. `run` calls task(argument, i) for every i in [0, num_tasks), on up to num_threads threads, and
// returns when all are done.
struct Parallel {
  int64_t num_threads;
  void (*run)(int64_t num_tasks, void (*task)(void* argument, int64_t index), void* argument);
};

struct KernelTable {
  const char* isa;
  void (*decode)(const DecodeParams&, const Parallel&);
  void (*prefix)(const PrefixParams&, const Parallel&);
  void (*merge)(const MergeParams&, const Parallel&);
  void (*store)(const StoreParams&, const Parallel&);
  void (*gather)(const GatherParams&, const Parallel&);
};

}  // namespace paged_attn::cpu

// The one symbol that a kernel library exports.
#define PAGED_ATTN_CPU_ENTRY "paged_attn_cpu_kernels"
