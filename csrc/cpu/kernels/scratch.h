// Memory that one thread needs while it works: one buffer per thread, grown on demand and kept, so that a call allocates
// nothing.
#pragma once

#include <cstdlib>
#include <new>

#include "core/portability.h"

namespace paged_attn::cpu {

class Scratch {
 public:
  // Forgets what was taken before and makes room for `bytes` in total.
  void reset(int64_t bytes) {
    used_ = 0;
    if (bytes <= capacity_) return;
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
    data_ = static_cast<char*>(std::aligned_alloc(kAlignment, size_t(round_up(bytes, kAlignment))));
    if (!data_) throw std::bad_alloc();
    capacity_ = bytes;
  }

  template <typename T>
  T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(data_ + used_);
    used_ += bytes_for<T>(count);
    return result;
  }

  template <typename T>
  static constexpr int64_t bytes_for(int64_t count) {
    return round_up(count * int64_t(sizeof(T)), kAlignment);
  }

  ~Scratch() { std::free(data_); }

 private:
  static constexpr int64_t kAlignment = 64;
  char* data_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
};

}  // namespace paged_attn::cpu
