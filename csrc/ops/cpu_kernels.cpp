#include "ops/cpu_kernels.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace paged_attn::ops {
namespace {

struct InstructionSet {
  const char* name;
  bool (*runs_here)();
};

#if defined(__x86_64__)
// What the operating system saves on a context switch: without it, wide registers must not be used. (Intel SDM, XCR0.)
bool registers_saved(uint32_t mask) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

struct Leaf7 {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  explicit Leaf7(uint32_t subleaf) { __get_cpuid_count(7, subleaf, &a, &b, &c, &d); }
};

// Asked of the processor rather than of __builtin_cpu_supports, which knows avx512bf16 only in newer compilers.
bool has_avx2() {
  uint32_t a, b, c, d;
  constexpr uint32_t kFma = 1u << 12, kF16c = 1u << 29, kAvx2 = 1u << 5, kYmm = 0x6;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & kFma) && (c & kF16c) && (Leaf7(0).b & kAvx2) && registers_saved(kYmm);
}
bool has_avx512() {
  constexpr uint32_t kFoundation = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31, kZmm = 0xe6;
  constexpr uint32_t kAll = kFoundation | kDq | kBw | kVl;
  return has_avx2() && (Leaf7(0).b & kAll) == kAll && registers_saved(kZmm);
}
bool has_avx512bf16() {
  constexpr uint32_t kBf16 = 1u << 5;
  return has_avx512() && Leaf7(0).a >= 1 && (Leaf7(1).a & kBf16);
}
#endif

// Best first; PAGED_ATTN_CPU_ISA names the best that may be used.
const InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512bf16", has_avx512bf16},
    {"avx512", has_avx512},
    {"avx2", has_avx2},
#endif
    {"portable", [] { return true; }},
};

std::string library_directory() {
  Dl_info info;
  TORCH_CHECK(dladdr(reinterpret_cast<const void*>(&cpu_kernels), &info) && info.dli_fname,
              "paged_attn: the loader does not say where the operator library lies");
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// Null where the library was not built.
const cpu::KernelTable* open_library(const std::string& isa) {
  const std::string path = library_directory() + "/libpaged_attn_cpu_" + isa + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return nullptr;
  using Entry = const cpu::KernelTable* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, PAGED_ATTN_CPU_ENTRY));
  TORCH_CHECK(entry, "paged_attn: ", path, " exports no ", PAGED_ATTN_CPU_ENTRY);
  return entry();
}

// All libraries that were built and run here, best first.
const std::vector<const cpu::KernelTable*>& libraries() {
  static const std::vector<const cpu::KernelTable*> tables = [] {
    std::vector<const cpu::KernelTable*> result;
    for (const InstructionSet& set : kInstructionSets) {
      if (!set.runs_here()) continue;
      if (const cpu::KernelTable* table = open_library(set.name)) result.push_back(table);
    }
    TORCH_CHECK(!result.empty(), "paged_attn: no CPU kernel library (libpaged_attn_cpu_*.so) in ", library_directory());
    return result;
  }();
  return tables;
}

std::string join_names() {
  std::string names;
  for (const InstructionSet& set : kInstructionSets) names += (names.empty() ? "" : ", ") + std::string(set.name);
  return names;
}

const cpu::KernelTable* pick() {
  const char* cap = std::getenv("PAGED_ATTN_CPU_ISA");
  if (!cap || !*cap) return libraries().front();
  const auto place = [](const std::string& name) {
    return std::find_if(std::begin(kInstructionSets), std::end(kInstructionSets),
                        [&](const InstructionSet& set) { return name == set.name; });
  };
  TORCH_CHECK_VALUE(place(cap) != std::end(kInstructionSets), "PAGED_ATTN_CPU_ISA is '", cap, "', takes one of ", join_names());
  for (const cpu::KernelTable* table : libraries()) {
    if (place(table->isa) >= place(cap)) return table;
  }
  TORCH_CHECK(false, "paged_attn: no CPU kernel library at or below PAGED_ATTN_CPU_ISA='", cap, "' in ", library_directory());
}

std::atomic<const cpu::KernelTable*> in_use{nullptr};

}  // namespace

const cpu::KernelTable& cpu_kernels() {
  const cpu::KernelTable* table = in_use.load(std::memory_order_acquire);
  if (!table) {
    table = pick();
    in_use.store(table, std::memory_order_release);
  }
  return *table;
}

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::KernelTable* table : libraries()) names.push_back(table->isa);
  return names;
}

void set_cpu_isa(const std::string& name) {
  for (const cpu::KernelTable* table : libraries()) {
    if (name == table->isa) return in_use.store(table, std::memory_order_release);
  }
  std::string names;
  for (const std::string& isa : cpu_isas()) names += (names.empty() ? "" : ", ") + isa;
  TORCH_CHECK_VALUE(false, "set_cpu_isa: name is '", name, "', takes one of ", names);
}

cpu::Parallel parallel() {
  return {at::get_num_threads(), [](int64_t num_tasks, void (*task)(void*, int64_t), void* argument) {
            at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) task(argument, i);
            });
          }};
}

}  // namespace paged_attn::ops
