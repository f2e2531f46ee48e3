#include "simt/executor.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "simt/fiber.h"

#if defined(PA_SIMT_SWITCH)
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
constexpr int kMaxWarpLanes = 64;
constexpr int kDefaultWorkers = 2;
constexpr int64_t kMaxSharedBytes = 48 * 1024;  // what every card has without asking for more
constexpr int64_t kSharedAlignment = 16;
constexpr int kMaxSharedArrays = 64;
constexpr int64_t kGapBytes = 64;  // between shared arrays: nobody's
constexpr int64_t kRoomBytes = kMaxSharedBytes + (kMaxSharedArrays + 1) * (kGapBytes + kSharedAlignment);
constexpr unsigned char kUnwritten = 0xff;  // makes NaN of every floating-point type

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
  // Of the shuffle group whose first lane this thread is: how many lanes have come, and which was the first to.
  int lanes_here = 0;
  int first_here = 0;
#if defined(PA_SIMT_TSAN)
  unsigned barriers = 0;  // passed so far
#endif
};

struct SharedArray {
  int64_t offset;
  int64_t bytes;
  char* data;
};

std::string at(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }
bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0); }

// ThreadSanitizer would take a call of memset for an access of the GPU thread that happens to come first; volatile prevents it.
void fill_unwritten(char* data, int64_t bytes) {
#if defined(PA_SIMT_TSAN)
  volatile char* to = data;
  for (int64_t i = 0; i < bytes; ++i) to[i] = char(kUnwritten);
#else
  std::memset(data, kUnwritten, size_t(bytes));
#endif
}

unsigned long number_in_environment(const char* name, unsigned long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtoul(value, nullptr, 10) : otherwise;
}

std::atomic<unsigned long>& seed() {
  static std::atomic<unsigned long> value{number_in_environment("PAGED_ATTN_SIMT_SEED", 0)};
  return value;
}

// SplitMix64: a block's order follows from the seed and its index alone, whoever runs it. (mt19937_64 takes longer to seed than
// a block takes to run.)
struct Random {
  using result_type = uint64_t;
  uint64_t state;

  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t(0); }
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
};

// What the OS threads of one launch share.
struct Launch {
  Grid grid;
  void (*body)(const void*);
  const void* argument;
  std::vector<int64_t> blocks;  // in the order of their start
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::string error;  // of whoever set `failed`
  char end = 0;       // an address: what ThreadSanitizer knows the end of all GPU threads by

  void fail(const std::string& what) {
    if (!failed.exchange(true)) error = what;
  }
};

// Runs blocks, one at a time, on the OS thread that calls it.
class Executor {
 public:
  void run_blocks(Launch& launch);

  int current_thread() const { return current_; }
  int64_t current_block() const { return block_; }
  int64_t num_blocks() const { return launch_->grid.blocks; }

  void barrier(Site site) {
    Thread& own = threads_[current_];
    own.state = State::kAtBarrier;
    own.site = site;
    if (at_barrier_++ == 0) barrier_site_ = site;
    one_barrier_ = (at_barrier_ == 1 || one_barrier_) && same(site, barrier_site_);
#if defined(PA_SIMT_TSAN)
    // Two addresses in turn: who is already at the next barrier must not be waited for by who is still to leave this one.
    char* address = barrier_address(own.barriers++);
    __tsan_release(address);
#endif
    if (at_barrier_ == launch_->grid.threads && one_barrier_) {
      at_barrier_ = 0;
      set_all_ready();
    }
    give_way(own, false);
#if defined(PA_SIMT_TSAN)
    __tsan_acquire(address);
#endif
  }

  uint32_t shuffle(Shuffle kind, uint32_t value, int argument, int width, Site site) {
    Thread& own = threads_[current_];
    const int lane = current_ & (width - 1);
    const int source = source_lane(kind, lane, argument);
    if (argument < 0 || source >= width) {
      violation("lane " + std::to_string(lane) + " asks for lane " + std::to_string(argument < 0 ? argument : source) + " of " +
                std::to_string(width) + " at " + at(site));
    }
    own.state = State::kInShuffle;
    own.site = site;
    own.kind = kind;
    own.argument = argument;
    own.width = width;
    own.value = value;
    Thread* group = &threads_[current_ - lane];
    if (group->lanes_here++ == 0) group->first_here = current_;
    const Thread& first = threads_[group->first_here];
    if (first.width != width || first.kind != kind || !same(first.site, site)) {
      violation("lanes of one group are in shuffles at " + at(first.site) + " and " + at(site) + ": " + where_all_are());
    }
    if (group->lanes_here < width) {
      give_way(own, false);
      return own.value;
    }
    // The last one answers for all, before anybody can come with the next value, and goes on.
    group->lanes_here = 0;
    uint32_t values[kMaxWarpLanes];
    for (int i = 0; i < width; ++i) values[i] = group[i].value;
    const int order = int(random_() & uint64_t(width - 1));
    for (int j = 0; j < width; ++j) {
      const int i = j ^ order;
      group[i].value = values[source_lane(kind, i, group[i].argument)];
      if (i != lane) set_ready(current_ - lane + i);
    }
    own.state = State::kReady;
    return own.value;
  }

  void* shared_array(int64_t offset, int64_t bytes) {
    for (int i = 0; i < num_arrays_; ++i) {
      const SharedArray& array = arrays_[i];
      if (array.offset == offset && array.bytes == bytes) return array.data;
      const bool apart = offset + bytes <= array.offset || array.offset + array.bytes <= offset;
      if (!apart) {
        violation("shared arrays overlap: " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " and " +
                  std::to_string(array.bytes) + " at " + std::to_string(array.offset));
      }
    }
    if (offset < 0 || bytes < 0 || offset % kSharedAlignment || offset + bytes > launch_->grid.shared_bytes) {
      violation("a shared array of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                " does not lie, aligned to 16, in the " + std::to_string(launch_->grid.shared_bytes) + " bytes of the launch");
    }
    if (num_arrays_ == kMaxSharedArrays) violation("more than " + std::to_string(kMaxSharedArrays) + " shared arrays");
    char* data = free_room_;
    free_room_ += (bytes + kGapBytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
#if defined(PA_SIMT_ASAN)
    __asan_unpoison_memory_region(data, size_t(bytes));
    fill_unwritten(data, bytes);
#else
    fill_unwritten(data, bytes + kGapBytes);
#endif
    arrays_[num_arrays_++] = {offset, bytes, data};
    return data;
  }

 private:
  static int source_lane(Shuffle kind, int lane, int argument) {
    switch (kind) {
      case Shuffle::kXor: return lane ^ argument;
      case Shuffle::kUp: return lane < argument ? lane : lane - argument;
      default: return argument;
    }
  }

  // Threads that can go on, in the order in which they will; nobody is in here twice.
  void set_ready(int thread) {
    threads_[thread].state = State::kReady;
    int at = next_ready_ + num_ready_++;
    if (at >= launch_->grid.threads) at -= launch_->grid.threads;
    ready_[at] = thread;
  }
  void set_all_ready() {
    const size_t threads = size_t(launch_->grid.threads);
    const size_t first = size_t(random_() % threads);
    for (size_t i = 0; i < threads; ++i) set_ready(order_[(first + i) % threads]);
  }
  // Straight to the next thread, or to the main program where nobody can go on.
  void give_way(Thread& own, bool last) {
    if (num_ready_ == 0) {
      own.fiber.switch_to(main_, last);
      return;
    }
    const int next = ready_[next_ready_];
    if (++next_ready_ == launch_->grid.threads) next_ready_ = 0;
    --num_ready_;
    current_ = next;
    if (&own != &threads_[next]) own.fiber.switch_to(threads_[next].fiber, last);
  }

#if defined(PA_SIMT_TSAN)
  // Below the arrays; ThreadSanitizer tells addresses apart by words of 8 bytes.
  char* barrier_address(unsigned barrier) const { return room_ + 8 * (barrier & 1); }
  static void destroy(std::vector<void*>& fibers) {
    for (void* fiber : fibers) __tsan_destroy_fiber(fiber);
    fibers.clear();
  }
  // A destroyed fiber's number is soon another's, who would then seem to have made its accesses: they are kept for a while.
  static constexpr size_t kMaxRetired = 2048;
  std::vector<void*> retired_;
#endif

  static void enter();
  void run_block(int64_t block);
  void open_shared();
  void close_shared();
  std::string where_all_are() const;

  Launch* launch_ = nullptr;
  Random random_{};
  Fiber main_;
  std::vector<Stack> stacks_;
  std::unique_ptr<Thread[]> threads_{new Thread[kMaxThreads]};
  int order_[kMaxThreads];
  int ready_[kMaxThreads];
  int next_ready_ = 0;
  int num_ready_ = 0;
  SharedArray arrays_[kMaxSharedArrays];
  int num_arrays_ = 0;
  char* room_ = nullptr;
  char* free_room_ = nullptr;
  int64_t block_ = 0;
  int current_ = 0;
  int at_barrier_ = 0;
  bool one_barrier_ = false;
  Site barrier_site_{};
  int left_ = 0;
  std::string error_;
};

// Initial-exec: one load instead of a call, and the executor is asked for it at every step. A fiber stays on its OS thread.
__thread Executor* executor __attribute__((tls_model("initial-exec"))) = nullptr;

void Executor::enter() {
  Executor& self = *executor;
  Thread& own = self.threads_[self.current_];
  own.fiber.start(self.main_);
  try {
    self.launch_->body(self.launch_->argument);
  } catch (const Violation& violation) {
    self.error_ = "block " + std::to_string(self.block_) + ", thread " + std::to_string(self.current_) + ": " + violation.what;
    self.num_ready_ = 0;  // the block is given up
  }
  own.state = State::kLeft;
  ++self.left_;
#if defined(PA_SIMT_TSAN)
  __tsan_release(&self.launch_->end);
#endif
  self.give_way(own, true);
  std::abort();  // nobody switches to a thread that left
}

void Executor::open_shared() {
  num_arrays_ = 0;
#if defined(PA_SIMT_TSAN)
  // Afresh, lest what an earlier block did to an address, as data or as a barrier, count for this one.
  if (room_) munmap(room_, size_t(kRoomBytes));
  room_ = nullptr;
#endif
  if (!room_) {
    void* room = mmap(nullptr, size_t(kRoomBytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) throw std::bad_alloc();
    room_ = static_cast<char*>(room);
  }
#if defined(PA_SIMT_ASAN)
  __asan_poison_memory_region(room_, size_t(kRoomBytes));
#endif
  free_room_ = room_ + kGapBytes;
}

void Executor::close_shared() {
#if !defined(PA_SIMT_ASAN)
  for (int i = 0; i < num_arrays_; ++i) {
    const char* gap = arrays_[i].data + arrays_[i].bytes;
    if (std::any_of(gap, gap + kGapBytes, [](char byte) { return byte != char(kUnwritten); })) {
      error_ = "block " + std::to_string(block_) + ": somebody wrote beyond the shared array of " +
               std::to_string(arrays_[i].bytes) + " bytes at " + std::to_string(arrays_[i].offset);
    }
  }
#endif
}

void Executor::run_block(int64_t block) {
  const int threads = launch_->grid.threads;
  block_ = block;
  random_.state = seed() + uint64_t(block) * 0xd1342543de82ef95u;
  at_barrier_ = left_ = next_ready_ = num_ready_ = 0;
  open_shared();
  while (stacks_.size() < size_t(threads)) stacks_.emplace_back();
  for (int i = 0; i < threads; ++i) {
    Thread& thread = threads_[i];
    thread.fiber.prepare(stacks_[size_t(i)], enter);
    thread.lanes_here = 0;
#if defined(PA_SIMT_TSAN)
    thread.barriers = 0;
#endif
    order_[i] = i;
  }
  std::shuffle(order_, order_ + threads, random_);
  set_all_ready();
  current_ = ready_[0];
  next_ready_ = 1 % threads;
  --num_ready_;
  main_.switch_to(threads_[current_].fiber);
#if defined(PA_SIMT_TSAN)
  if (!error_.empty()) __tsan_acquire(&launch_->end);  // the words were written by a GPU thread
#endif
  if (error_.empty() && left_ < threads) {
    error_ = "block " + std::to_string(block) + ": threads wait for others that do not come: " + where_all_are();
  }
  if (error_.empty()) close_shared();
#if defined(PA_SIMT_TSAN)
  for (int i = 0; i < threads; ++i) threads_[i].fiber.retire(retired_);
  if (retired_.size() > kMaxRetired) destroy(retired_);
  stacks_.clear();
#endif
}

void Executor::run_blocks(Launch& launch) {
  launch_ = &launch;
  executor = this;
  main_.adopt_main();
  try {
    for (size_t i; !launch.failed && (i = launch.next++) < launch.blocks.size();) {
      run_block(launch.blocks[i]);
      if (error_.empty()) continue;
      launch.fail(error_);
      error_.clear();
    }
  } catch (const std::exception& exception) { launch.fail(exception.what()); }
  executor = nullptr;
#if defined(PA_SIMT_TSAN)
  destroy(retired_);
#endif
}

// Runs of threads that are at one place.
std::string Executor::where_all_are() const {
  const auto place = [](const Thread& thread) -> std::string {
    switch (thread.state) {
      case State::kLeft: return "left";
      case State::kAtBarrier: return "at the barrier of " + at(thread.site);
      case State::kInShuffle: return "in the shuffle of " + at(thread.site);
      default: return "on their way";
    }
  };
  std::string text;
  for (int begin = 0, end = 1; begin < launch_->grid.threads; begin = end++) {
    const std::string here = place(threads_[begin]);
    while (end < launch_->grid.threads && place(threads_[end]) == here) ++end;
    text += (begin ? "; " : "") + std::to_string(begin) + " to " + std::to_string(end - 1) + " " + here;
  }
  return text;
}

// Stacks and memory are kept for the next launch; never freed, since a launch may come as late as the program's end.
class Pool {
 public:
  std::vector<std::unique_ptr<Executor>> take(size_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::unique_ptr<Executor>> taken;
    while (taken.size() < count) {
      if (idle_.empty()) idle_.emplace_back(new Executor);
      taken.push_back(std::move(idle_.back()));
      idle_.pop_back();
    }
    return taken;
  }
  void give_back(std::vector<std::unique_ptr<Executor>> taken) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::unique_ptr<Executor>& one : taken) idle_.push_back(std::move(one));
  }
  static Pool& instance() {
    static Pool* const pool = new Pool;
    return *pool;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Executor>> idle_;
};

}  // namespace

void violation(const std::string& what) { throw Violation{what}; }

int thread_index() { return executor->current_thread(); }
int64_t block_index() { return executor->current_block(); }
int64_t num_blocks() { return executor->num_blocks(); }
void block_barrier(Site site) { executor->barrier(site); }
uint32_t shuffle(Shuffle kind, uint32_t value, int argument, int width, Site site) {
  return executor->shuffle(kind, value, argument, width, site);
}
void* shared_array(int64_t offset, int64_t bytes) { return executor->shared_array(offset, bytes); }

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
  Launch launch;
  launch.grid = grid;
  launch.body = body;
  launch.argument = argument;
  launch.blocks.resize(size_t(grid.blocks));
  for (size_t i = 0; i < launch.blocks.size(); ++i) launch.blocks[i] = int64_t(i);
  std::shuffle(launch.blocks.begin(), launch.blocks.end(), Random{seed()});

  const size_t asked = std::max<size_t>(number_in_environment("PAGED_ATTN_SIMT_THREADS", kDefaultWorkers), 1);
  std::vector<std::unique_ptr<Executor>> executors = Pool::instance().take(std::min(asked, launch.blocks.size()));
  std::vector<std::thread> workers;
  for (size_t i = 1; i < executors.size(); ++i) {
    workers.emplace_back([&launch, own = executors[i].get()] { own->run_blocks(launch); });
  }
  if (!executors.empty()) executors[0]->run_blocks(launch);
  for (std::thread& worker : workers) worker.join();
  Pool::instance().give_back(std::move(executors));
#if defined(PA_SIMT_TSAN)
  __tsan_acquire(&launch.end);
#endif
  if (launch.failed) throw std::runtime_error(name + launch.error);
}

}  // namespace paged_attn::simt

extern "C" __attribute__((visibility("default"))) void paged_attn_simt_set_seed(unsigned long value) {
  paged_attn::simt::seed() = value;
}
