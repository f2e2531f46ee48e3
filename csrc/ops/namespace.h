// Where operators are registered: torch.ops.paged_attn. The test suite compiles the GPU kernels for the host and registers them
// under a name of their own, which is why the namespace is a macro.
#pragma once

#include <torch/library.h>

#if !defined(PAGED_ATTN_NAMESPACE)
#define PAGED_ATTN_NAMESPACE paged_attn
#endif

// TORCH_LIBRARY does not expand its first argument by itself.
#define PA_EXPAND_LIBRARY(name, m) TORCH_LIBRARY(name, m)
#define PA_EXPAND_LIBRARY_FRAGMENT(name, m) TORCH_LIBRARY_FRAGMENT(name, m)
#define PA_EXPAND_LIBRARY_IMPL(name, key, m) TORCH_LIBRARY_IMPL(name, key, m)
#define PA_LIBRARY(m) PA_EXPAND_LIBRARY(PAGED_ATTN_NAMESPACE, m)
#define PA_LIBRARY_FRAGMENT(m) PA_EXPAND_LIBRARY_FRAGMENT(PAGED_ATTN_NAMESPACE, m)
#define PA_LIBRARY_IMPL(key, m) PA_EXPAND_LIBRARY_IMPL(PAGED_ATTN_NAMESPACE, key, m)
