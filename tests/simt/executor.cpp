#include "simt/executor.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "simt/fiber.h"

#if defined(__x86_64__)
__asm__(R"(
.text
.hidden paged_attn_simt_switch
.globl paged_attn_simt_switch
.type paged_attn_simt_switch, @function
paged_attn_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size paged_attn_simt_switch, .-paged_attn_simt_switch
)");
#endif

namespace paged_attn::simt {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxSharedBytes = 48 * 1024;  // what every card has without asking for more

struct Violation {
  std::string what;
};

enum class State { kReady, kAtBarrier, kInShuffle, kLeft };

struct Thread {
  Fiber fiber;
  State state = State::kReady;
  Site site{};
  Shuffle kind{};
  int argument = 0;
  int width = 0;
  uint32_t value = 0;
};

struct SharedArray {
  int64_t offset;
  int64_t bytes;
  void* data;
};

std::string at(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

// Volatile, so that it is no call of memset, which ThreadSanitizer would take for an access of this thread.
void fill_with_nan(void* data, int64_t bytes) {
  volatile unsigned char* to = static_cast<unsigned char*>(data);
  for (int64_t i = 0; i < bytes; ++i) to[i] = 0xff;
}

unsigned long initial_seed() {
  const char* value = std::getenv("PAGED_ATTN_SIMT_SEED");
  return value ? std::strtoul(value, nullptr, 10) : 0;
}

unsigned long& seed() {
  static unsigned long value = initial_seed();
  return value;
}

// One launch at a time per OS thread.
class Executor {
 public:
  void run(const Grid& grid, void (*body)(const void*), const void* argument) {
    grid_ = grid;
    body_ = body;
    argument_ = argument;
    random_.seed(seed());
    main_.adopt_main();
    std::vector<int64_t> blocks(static_cast<size_t>(grid.blocks));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = int64_t(i);
    std::shuffle(blocks.begin(), blocks.end(), random_);
    for (int64_t block : blocks) {
      run_block(block);
      if (!error_.empty()) break;
    }
#if defined(PA_SIMT_TSAN)
    __tsan_acquire(&end_of_launch_);
    stacks_.clear();
    for (void* memory : used_memory_) munmap(memory, size_t(std::max<int64_t>(grid_.shared_bytes, 1)));
    used_memory_.clear();
#endif
    if (error_.empty()) return;
    const std::string what = std::string(grid.name) + ": " + error_;
    error_.clear();
    throw std::runtime_error(what);
  }

  int current_thread() const { return current_; }
  int64_t current_block() const { return block_; }
  int64_t num_blocks() const { return grid_.blocks; }

  void barrier(Site site) {
    Thread& own = threads_[size_t(current_)];
    own.state = State::kAtBarrier;
    own.site = site;
    ++at_barrier_;
#if defined(PA_SIMT_TSAN)
    __tsan_release(&barrier_);
#endif
    own.fiber.switch_to(main_);
#if defined(PA_SIMT_TSAN)
    __tsan_acquire(&barrier_);
#endif
  }

  uint32_t shuffle(Shuffle kind, uint32_t value, int argument, int width, Site site) {
    Thread& own = threads_[size_t(current_)];
    const int lane = current_ % width;
    const int source = kind == Shuffle::kXor ? lane ^ argument : kind == Shuffle::kUp ? lane - argument : argument;
    if (width < 1 || width > grid_.warp_lanes || (width & (width - 1)) || argument < 0 || source >= width) {
      violation("lane " + std::to_string(lane) + " asks for lane " + std::to_string(source) + " of " + std::to_string(width) +
                " at " + at(site));
    }
    own.state = State::kInShuffle;
    own.site = site;
    own.kind = kind;
    own.argument = argument;
    own.width = width;
    own.value = value;
    // The last of the group sets all of them free, itself included.
    const int first = current_ - lane;
    for (int i = first; i < first + width; ++i) {
      const Thread& other = threads_[size_t(i)];
      if (other.state == State::kInShuffle && (other.width != width || other.kind != kind || other.site.line != site.line ||
                                               std::string(other.site.file) != site.file)) {
        violation("lanes of one group are in shuffles at " + at(site) + " and " + at(other.site));
      }
      if (other.state != State::kInShuffle) {
        own.fiber.switch_to(main_);
        return own.value;
      }
    }
    uint32_t results[64];
    for (int i = 0; i < width; ++i) {
      const Thread& lane_i = threads_[size_t(first + i)];
      const int from = kind == Shuffle::kXor   ? i ^ lane_i.argument
                       : kind == Shuffle::kUp ? (i < lane_i.argument ? i : i - lane_i.argument)
                                              : lane_i.argument;
      results[i] = threads_[size_t(first + from)].value;
    }
    for (int i = 0; i < width; ++i) {
      threads_[size_t(first + i)].value = results[i];
      threads_[size_t(first + i)].state = State::kReady;
    }
    return own.value;
  }

  void* shared_array(int64_t offset, int64_t bytes) {
    for (const SharedArray& array : arrays_) {
      if (array.offset == offset && array.bytes == bytes) return array.data;
      const bool apart = offset + bytes <= array.offset || array.offset + array.bytes <= offset;
      if (!apart) {
        violation("shared arrays overlap: " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " and " +
                  std::to_string(array.bytes) + " at " + std::to_string(array.offset));
      }
    }
    if (offset < 0 || bytes < 0 || offset % 16 || offset + bytes > grid_.shared_bytes) {
      violation("a shared array of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                " does not lie, aligned to 16, in the " + std::to_string(grid_.shared_bytes) + " bytes of the launch");
    }
    arrays_.push_back({offset, bytes, place_for(offset, bytes)});
    return arrays_.back().data;
  }

 private:
  void* place_for(int64_t offset, int64_t bytes) {
#if defined(PA_SIMT_ASAN)
    void* data = nullptr;
    if (posix_memalign(&data, 16, size_t(bytes)) != 0) violation("out of memory");
    fill_with_nan(data, bytes);
    used_memory_.push_back(data);
    return data;
#else
    (void)bytes;
    return memory_ + offset;
#endif
  }

  // Before the threads of a block exist.
  void prepare_shared() {
    arrays_.clear();
#if defined(PA_SIMT_ASAN)
    for (void* data : used_memory_) free(data);
    used_memory_.clear();
#elif defined(PA_SIMT_TSAN)
    memory_ = static_cast<char*>(mmap(nullptr, size_t(std::max<int64_t>(grid_.shared_bytes, 1)), PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    used_memory_.push_back(memory_);
    fill_with_nan(memory_, grid_.shared_bytes);
#else
    room_.assign(size_t(grid_.shared_bytes) + 16, char(0xff));
    memory_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(room_.data()) + 15) / 16 * 16);
#endif
  }

  static void enter() {
    Executor& self = instance();
    self.threads_[size_t(self.current_)].fiber.start(self.main_);
    try {
      self.body_(self.argument_);
    } catch (const Violation& violation) {
      self.error_ = "block " + std::to_string(self.block_) + ", thread " + std::to_string(self.current_) + ": " + violation.what;
    }
    Thread& own = self.threads_[size_t(self.current_)];
    own.state = State::kLeft;
    ++self.left_;
#if defined(PA_SIMT_TSAN)
    __tsan_release(&self.end_of_launch_);
#endif
    own.fiber.switch_to(self.main_, true);
    std::abort();  // nobody switches to a thread that left
  }

  void run_block(int64_t block) {
    block_ = block;
    at_barrier_ = left_ = 0;
    prepare_shared();
    threads_.assign(size_t(grid_.threads), Thread());
    // A stack that another block's threads used would carry their accesses along.
    const size_t first_stack = kFreshStacks ? stacks_.size() : 0;
    while (stacks_.size() < first_stack + size_t(grid_.threads)) stacks_.emplace_back();
    for (size_t i = 0; i < threads_.size(); ++i) threads_[i].fiber.prepare(stacks_[first_stack + i], enter);
    order_.resize(threads_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = int(i);
    std::shuffle(order_.begin(), order_.end(), random_);
    while (left_ < grid_.threads && error_.empty()) {
      bool ran = false;
      for (int i : order_) {
        if (threads_[size_t(i)].state != State::kReady) continue;
        ran = true;
        current_ = i;
        main_.switch_to(threads_[size_t(i)].fiber);
        if (!error_.empty()) break;
      }
      if (ran) continue;
      if (at_barrier_ == grid_.threads && all_at_one_barrier()) {
        for (Thread& thread : threads_) thread.state = State::kReady;
        at_barrier_ = 0;
        continue;
      }
      error_ = "block " + std::to_string(block_) + ": threads wait for others that do not come: " + where_all_are();
    }
    for (Thread& thread : threads_) thread.fiber.release();
  }

  bool all_at_one_barrier() const {
    return std::all_of(threads_.begin(), threads_.end(), [&](const Thread& thread) {
      return thread.site.line == threads_[0].site.line && std::string(thread.site.file) == threads_[0].site.file;
    });
  }

  // Runs of threads that wait at one place.
  std::string where_all_are() const {
    std::string text;
    const auto place = [](const Thread& thread) {
      if (thread.state == State::kLeft) return std::string("left");
      return (thread.state == State::kAtBarrier ? "at the barrier of " : "in the shuffle of ") + at(thread.site);
    };
    for (size_t begin = 0, end = 1; begin < threads_.size(); begin = end++) {
      while (end < threads_.size() && place(threads_[end]) == place(threads_[begin])) ++end;
      text += (begin ? "; " : "") + std::to_string(begin) + " to " + std::to_string(end - 1) + " " + place(threads_[begin]);
    }
    return text;
  }

 public:
  static Executor& instance() {
    static thread_local Executor executor;
    return executor;
  }

 private:
#if defined(PA_SIMT_TSAN)
  static constexpr bool kFreshStacks = true;
  char end_of_launch_ = 0;  // addresses that ThreadSanitizer knows synchronisation by
  char barrier_ = 0;
#else
  static constexpr bool kFreshStacks = false;
#endif
  Grid grid_{};
  void (*body_)(const void*) = nullptr;
  const void* argument_ = nullptr;
  std::mt19937_64 random_;
  Fiber main_;
  std::vector<Stack> stacks_;
  std::vector<Thread> threads_;
  std::vector<int> order_;
  std::vector<SharedArray> arrays_;
  std::vector<void*> used_memory_;
  std::vector<char> room_;
  char* memory_ = nullptr;
  int64_t block_ = 0;
  int current_ = 0;
  int at_barrier_ = 0;
  int left_ = 0;
  std::string error_;
};

}  // namespace

void violation(const std::string& what) { throw Violation{what}; }

int thread_index() { return Executor::instance().current_thread(); }
int64_t block_index() { return Executor::instance().current_block(); }
int64_t num_blocks() { return Executor::instance().num_blocks(); }
void block_barrier(Site site) { Executor::instance().barrier(site); }
uint32_t shuffle(Shuffle kind, uint32_t value, int argument, int width, Site site) {
  return Executor::instance().shuffle(kind, value, argument, width, site);
}
void* shared_array(int64_t offset, int64_t bytes) { return Executor::instance().shared_array(offset, bytes); }

void run(const Grid& grid, void (*body)(const void*), const void* argument) {
  const std::string name = std::string(grid.name) + ": ";
  if (grid.threads < 1 || grid.threads > kMaxThreads || grid.threads % grid.warp_lanes) {
    throw std::runtime_error(name + std::to_string(grid.threads) + " threads, takes whole warps, up to " +
                             std::to_string(kMaxThreads));
  }
  if (grid.shared_bytes > kMaxSharedBytes) {
    throw std::runtime_error(name + std::to_string(grid.shared_bytes) + " bytes of shared memory, takes up to " +
                             std::to_string(kMaxSharedBytes));
  }
  Executor::instance().run(grid, body, argument);
}

}  // namespace paged_attn::simt

extern "C" __attribute__((visibility("default"))) void paged_attn_simt_set_seed(unsigned long value) {
  paged_attn::simt::seed() = value;
}
