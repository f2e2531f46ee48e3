// The one exported symbol of the library.

#include "cpu/kernels/kernels.h"

#define PA_STRING_(x) #x
#define PA_STRING(x) PA_STRING_(x)

extern "C" __attribute__((visibility("default"))) const paged_attn::cpu::KernelTable* paged_attn_cpu_kernels() {
  using namespace paged_attn::cpu;
  static const KernelTable table{PA_STRING(PAGED_ATTN_CPU_ISA), decode, prefix, merge_partials, store, gather};
  return &table;
}
