// A GPU thread's own stack and the switch to it and back. On x86-64 by hand, ten times as fast as ucontext, which saves the
// signal mask by a system call; ucontext elsewhere. The sanitizers are told of every switch.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(__x86_64__) && !defined(PAGED_ATTN_SIMT_UCONTEXT)
#define PA_SIMT_SWITCH 1
#else
#include <ucontext.h>
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PA_SIMT_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define PA_SIMT_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define PA_SIMT_ASAN 1
#endif
// The executor itself is compiled without -fsanitize=thread, so that only the kernels are watched: it is told by this macro.
#if defined(__SANITIZE_THREAD__) || defined(PAGED_ATTN_SIMT_TSAN)
#define PA_SIMT_TSAN 1
#endif

#if defined(PA_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(PA_SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace paged_attn::simt {

#if defined(PA_SIMT_ASAN) || defined(PA_SIMT_TSAN)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

// Memory with a page below it that may not be touched: an overflow stops the program where it happens.
class Stack {
 public:
  Stack() {
    page_ = size_t(sysconf(_SC_PAGESIZE));
    base_ = static_cast<char*>(
        mmap(nullptr, kStackBytes + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(base_, page_, PROT_NONE);
  }
  ~Stack() {
    if (base_) munmap(base_, kStackBytes + page_);
  }
  Stack(Stack&& other) noexcept : base_(other.base_), page_(other.page_) { other.base_ = nullptr; }
  Stack(const Stack&) = delete;
  Stack& operator=(Stack&&) = delete;

  char* bottom() const { return base_ + page_; }
  char* top() const { return bottom() + kStackBytes; }

 private:
  char* base_;
  size_t page_;
};

#if defined(PA_SIMT_SWITCH)
// Saves the callee-saved registers and the stack pointer, and continues where `to` was saved.
extern "C" void paged_attn_simt_switch(void** from, void* to);
#endif

// What runs on a stack: the main program (without a stack of its own) or a GPU thread.
class Fiber {
 public:
  // `entry` never returns.
  void prepare(const Stack& stack, void (*entry)()) {
    bottom_ = stack.bottom();
#if defined(PA_SIMT_ASAN)
    __asan_unpoison_memory_region(stack.bottom(), kStackBytes);
#endif
#if defined(PA_SIMT_SWITCH)
    void** top = reinterpret_cast<void**>(stack.top()) - 2;
    *top = reinterpret_cast<void*>(entry);  // the first switch returns into it, at a stack aligned as after a call
    context_ = top - kSavedRegisters;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack.bottom();
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
#if defined(PA_SIMT_TSAN)
    tsan_ = __tsan_create_fiber(0);
#endif
  }

  void adopt_main() {
    bottom_ = nullptr;  // another OS thread's, perhaps
#if defined(PA_SIMT_ASAN)
    main_size_ = 0;
#endif
#if defined(PA_SIMT_TSAN)
    tsan_ = __tsan_get_current_fiber();
#endif
  }

#if defined(PA_SIMT_TSAN)
  // Hands its ThreadSanitizer fiber on, to be destroyed.
  void retire(std::vector<void*>& retired) {
    retired.push_back(tsan_);
    tsan_ = nullptr;
  }
#endif

  // Leaves this one, on which the caller runs, for `to`; comes back when somebody switches to it. `last`: never.
  void switch_to(Fiber& to, bool last = false) {
    (void)last;
#if defined(PA_SIMT_ASAN)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, to.bottom_, to.size());
#endif
#if defined(PA_SIMT_TSAN)
    __tsan_switch_to_fiber(to.tsan_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(PA_SIMT_SWITCH)
    paged_attn_simt_switch(&context_, to.context_);
#else
    swapcontext(&context_, &to.context_);
#endif
#if defined(PA_SIMT_ASAN)
    arrived(fake);
#endif
  }

  // On a fiber's first run, before anything else. `from`: who switched to it.
  void start(Fiber& from) {
    (void)from;
#if defined(PA_SIMT_ASAN)
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!from.bottom_) {  // the main program's stack, which nobody else knows
      from.bottom_ = bottom;
      from.main_size_ = size;
    }
#endif
  }

 private:
#if defined(PA_SIMT_ASAN)
  static void arrived(void* fake) { __sanitizer_finish_switch_fiber(fake, nullptr, nullptr); }
  size_t size() const { return main_size_ ? main_size_ : kStackBytes; }
  size_t main_size_ = 0;
#endif
#if defined(PA_SIMT_SWITCH)
  static constexpr int kSavedRegisters = 6;
  void* context_ = nullptr;
#else
  ucontext_t context_;
#endif
  const void* bottom_ = nullptr;
#if defined(PA_SIMT_TSAN)
  void* tsan_ = nullptr;
#endif
};

}  // namespace paged_attn::simt
