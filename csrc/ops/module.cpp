// The few functions that are no operators, for paged_attn_ext._C.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include "core/even_share.h"
#include "ops/cpu_kernels.h"

namespace paged_attn::ops {
namespace {

#define PA_STRING_(x) #x
#define PA_STRING(x) PA_STRING_(x)

// What the compiler saw, which is the truth about this library whatever a record beside it says.
pybind11::dict build_info() {
  pybind11::dict info;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  info["cxx_standard"] = PA_STRING(__cplusplus);
  info["torch_version"] = TORCH_VERSION;
  info["cxx11_abi"] = PA_STRING(_GLIBCXX_USE_CXX11_ABI);
#if defined(_OPENMP)
  info["openmp"] = PA_STRING(_OPENMP);
#else
  info["openmp"] = "none";
#endif
  return info;
}

std::vector<std::pair<int64_t, int64_t>> even_share_plan(int64_t num_items, int64_t num_workers) {
  if (num_items < 0) throw pybind11::value_error("even_share: num_items is " + std::to_string(num_items) + ", takes 0 or more");
  if (num_workers < 1)
    throw pybind11::value_error("even_share: num_workers is " + std::to_string(num_workers) + ", takes 1 or more");
  std::vector<std::pair<int64_t, int64_t>> plan;
  for (int64_t worker = 0; worker < num_workers; ++worker) {
    const Range range = even_share(num_items, num_workers, worker);
    plan.emplace_back(range.begin, range.end);
  }
  return plan;
}

}  // namespace
}  // namespace paged_attn::ops

PYBIND11_MODULE(_C, m) {
  using namespace paged_attn::ops;
  namespace py = pybind11;
  m.doc() = "Operators of torch.ops.paged_attn and what the package asks about its build.";
  m.def("build_info", build_info, "Compiler, C++ standard, torch version and ABI this library was compiled with.");
  m.def("cpu_isa", [] { return std::string(cpu_kernels().isa); }, "The instruction set of the CPU kernels in use.");
  m.def("cpu_isas", cpu_isas, "Instruction sets that were built and that this machine runs, best first.");
  m.def("set_cpu_isa", set_cpu_isa, py::arg("name"), "Use the kernels of one of cpu_isas(); for tests and measurements.");
  m.def("even_share", even_share_plan, py::arg("num_items"), py::arg("num_workers"),
        "[begin, end) of every worker: contiguous runs, the first ones longer by one item.");
}
