// Even share: contiguous runs of equal length, the first `num_items % num_workers` of them one item longer.
// The scheme of CUB's GridEvenShare: every worker finds its run by arithmetic alone, and runs differ by at most one item.
#pragma once

#include "core/portability.h"

namespace paged_attn {

struct Range {
  int64_t begin;
  int64_t end;
};

PA_HD Range even_share(int64_t num_items, int64_t num_workers, int64_t worker) {
  const int64_t share = num_items / num_workers;
  const int64_t longer = num_items % num_workers;
  const int64_t begin = worker * share + (worker < longer ? worker : longer);
  return {begin, begin + share + (worker < longer ? 1 : 0)};
}

}  // namespace paged_attn
