// The kernels of this library, one source each; table.cpp exports them.
#pragma once

#include "cpu/kernel_table.h"

namespace paged_attn::cpu {

void decode(const DecodeParams&, const Parallel&);
void prefix(const PrefixParams&, const Parallel&);
void merge_partials(const MergeParams&, const Parallel&);
void store(const StoreParams&, const Parallel&);
void gather(const GatherParams&, const Parallel&);

}  // namespace paged_attn::cpu
