// A CPU allocator for torch that makes memory errors fatal where they happen, and a report of fatal signals.
//
// Each block has pages of its own. It ends where a page ends that nobody may touch, as close as the alignment of 64
// bytes allows:
//
//   | no access | front: canary | block | back: canary, below 64 bytes | no access |
//
// A freed block's pages become inaccessible, and stay so in a quarantine. So a late read or write, on whatever thread,
// is a fault. A write into the canaries is found when the block is freed, and aborts the process.
//
// Plain C functions for ctypes; no Python here.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMaxQuarantined = 10000;  // blocks; Linux allows a process 65530 mappings
constexpr size_t kAlignment = 64;  // what torch's own allocator gives
constexpr unsigned char kCanary = 0xA5;
constexpr unsigned char kFresh = 0xF5;  // what new memory holds: as a float of any size, a large negative number
constexpr int kMaxFrames = 48;
constexpr int kMaxFreeFrames = 12;

int report_fd = STDERR_FILENO;

void say(const char* text) { (void)!write(report_fd, text, strlen(text)); }

struct Block {
  char* region;  // from the first guard page on
  size_t region_nbytes;
  size_t nbytes;
  uint64_t number;  // of the allocation
  bool is_freed;
  int num_frames;
  void* freed_by[kMaxFreeFrames];
};

class Guard final : public c10::Allocator {
 public:
  explicit Guard(size_t quarantine_nbytes) : limit_(quarantine_nbytes) {}

  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &Guard::release, cpu};
    const size_t held = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    const size_t usable = (held + kPage - 1) / kPage * kPage;
    Block block{nullptr, usable + 2 * kPage, nbytes, 0, false, 0, {}};
    void* region = mmap(nullptr, block.region_nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) throw std::runtime_error("DefaultCPUAllocator: the guard allocator got no memory from mmap; see vm.max_map_count");
    block.region = static_cast<char*>(region);
    char* first = block.region + kPage;
    if (mprotect(first, usable, PROT_READ | PROT_WRITE)) throw std::runtime_error("guard allocator: mprotect failed");
    char* data = first + usable - held;
    memset(first, kCanary, data - first);
    memset(data, kFresh, nbytes);
    memset(data + nbytes, kCanary, held - nbytes);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      block.number = ++num_allocations_;
      blocks_[data] = block;
    }
    c10::profiledCPUMemoryReporter().New(data, nbytes);  // as torch's own allocator tells its profiler
    return {data, data, &Guard::release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Guard::release; }

  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

  uint64_t num_allocations() const { return num_allocations_; }

  // Called while the process dies: another thread may hold the lock for good.
  void describe(const char* address) {
    char text[256];
    if (!mutex_.try_lock()) {
      say("the table of blocks is locked\n");
      return;
    }
    auto next = blocks_.upper_bound(const_cast<char*>(address));
    const Block* nearest = nullptr;
    const char* data = nullptr;
    for (auto candidate : {next, next == blocks_.begin() ? blocks_.end() : std::prev(next)}) {
      if (candidate == blocks_.end()) continue;
      const Block& block = candidate->second;
      if (address >= block.region && address < block.region + block.region_nbytes) nearest = &block, data = candidate->first;
    }
    if (nearest == nullptr) {
      say("the address belongs to no block of the guard allocator\n");
    } else {
      const long offset = address - data;
      const char* where = offset < 0 ? "before" : offset < long(nearest->nbytes) ? "in" : "behind";
      snprintf(text, sizeof text, "the address is %s a %s block of %zu bytes, at offset %ld (allocation %llu)\n", where,
               nearest->is_freed ? "freed" : "live", nearest->nbytes, offset, (unsigned long long)nearest->number);
      say(text);
      if (nearest->num_frames > 0) {
        say("the block was freed by:\n");
        backtrace_symbols_fd(nearest->freed_by, nearest->num_frames, report_fd);
      }
    }
    mutex_.unlock();
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static void release(void* data);

  void free(char* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(data);
    if (found == blocks_.end() || found->second.is_freed) die("freed twice, or never allocated", data);
    Block& block = found->second;
    check(data, block);
    // New pages of no access: unlike mprotect, this gives the memory back, and lets the kernel join neighbours.
    void* gone = mmap(block.region, block.region_nbytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (gone == MAP_FAILED) die("mmap failed; see vm.max_map_count", data);
    block.is_freed = true;
    block.num_frames = backtrace(block.freed_by, kMaxFreeFrames);
    quarantine_.push_back(data);
    quarantined_ += block.region_nbytes;
    while ((quarantined_ > limit_ || quarantine_.size() > kMaxQuarantined) && quarantine_.size() > 1) {
      auto oldest = blocks_.find(quarantine_.front());
      quarantine_.pop_front();
      quarantined_ -= oldest->second.region_nbytes;
      munmap(oldest->second.region, oldest->second.region_nbytes);
      blocks_.erase(oldest);
    }
  }

  void check(char* data, const Block& block) {
    for (const char* at = block.region + kPage; at < data; ++at)
      if (static_cast<unsigned char>(*at) != kCanary) die("somebody wrote before this block", at);
    const char* end = block.region + block.region_nbytes - kPage;
    for (const char* at = data + block.nbytes; at < end; ++at)
      if (static_cast<unsigned char>(*at) != kCanary) die("somebody wrote behind this block", at);
  }

  [[noreturn]] void die(const char* what, const char* address) {
    say("guard allocator: ");
    say(what);
    say("\n");
    mutex_.unlock();
    describe(address);
    abort();
  }

  const size_t limit_;
  std::mutex mutex_;
  std::map<char*, Block> blocks_;
  std::deque<char*> quarantine_;
  size_t quarantined_ = 0;
  std::atomic<uint64_t> num_allocations_{0};
};

Guard* guard = nullptr;  // lives as long as the process: storages keep its deleter

void Guard::release(void* data) {
  if (data != nullptr) guard->free(static_cast<char*>(data));
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};
struct sigaction earlier[NSIG];

void on_fatal(int number, siginfo_t* info, void*) {
  char text[128];
  snprintf(text, sizeof text, "\nfatal signal %d (%s), address %p, thread %d\n", number, strsignal(number),
           info->si_addr, gettid());
  say(text);
  if (guard != nullptr && (number == SIGSEGV || number == SIGBUS))
    guard->describe(static_cast<const char*>(info->si_addr));
  say("native stack of this thread:\n");
  void* frames[kMaxFrames];
  backtrace_symbols_fd(frames, backtrace(frames, kMaxFrames), report_fd);
  // The handler from before, faulthandler's, writes the Python stacks: it runs when the instruction faults again.
  sigaction(number, &earlier[number], nullptr);
  if (info->si_code <= 0) raise(number);  // somebody sent it
}

}  // namespace

extern "C" {

// Report fatal signals on the file descriptor `fd`, before the handlers that are installed now.
void report_fatal_signals(int fd) {
  report_fd = fd;
  void* frames[1];
  backtrace(frames, 1);  // the first call loads a library, which a handler must not
  static char stack[1 << 16];
  stack_t alternative{};
  if (sigaltstack(nullptr, &alternative) == 0 && (alternative.ss_flags & SS_DISABLE)) {
    alternative = {};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
  }
  struct sigaction action {};
  action.sa_sigaction = on_fatal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : kSignals) sigaction(number, &action, &earlier[number]);
}

// Allocate CPU tensors from here on. `quarantine_nbytes`: address space of freed blocks that stays inaccessible. Returns
// whether preload.cpp was preloaded; without it, nothing is installed.
int install_guard_allocator(size_t quarantine_nbytes) {
  if (guard != nullptr) return 1;
  using Set = void (*)(void*);
  const auto set_default = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "set_default_cpu_allocator"));
  if (set_default == nullptr) return 0;
  guard = new Guard(quarantine_nbytes);
  set_default(static_cast<c10::Allocator*>(guard));
  c10::SetCPUAllocator(guard, /*priority=*/255);
  pthread_atfork([] { guard->lock(); }, [] { guard->unlock(); }, [] { guard->unlock(); });
  return 1;
}

uint64_t num_guarded_allocations() { return guard == nullptr ? 0 : guard->num_allocations(); }
}
