// The kernel library in use: one of those beside this one, by instruction set.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernel_table.h"

namespace paged_attn::ops {

// The table of the library in use. The first call picks the best that this machine runs and PAGED_ATTN_CPU_ISA allows.
const cpu::KernelTable& cpu_kernels();

// Instruction sets that were built and that this machine runs, best first; PAGED_ATTN_CPU_ISA does not shorten the list.
std::vector<std::string> cpu_isas();

// Switches to one of cpu_isas(); for tests and measurements. Not to be called while an operator runs.
void set_cpu_isa(const std::string& name);

// at::parallel_for, for kernels that know no torch.
cpu::Parallel parallel();

}  // namespace paged_attn::ops
