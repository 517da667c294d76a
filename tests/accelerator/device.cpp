// An accelerator in host memory, for tests: torch's PrivateUse1 device.
//
// Nothing runs when it is enqueued. Every operation, copy, event and message goes into the queue of the current stream.
// A worker runs the queues only while the host waits for something, and stops when that is done. Which stream goes on
// is drawn from a seed, so a run repeats exactly, and whatever streams leave open is tried in an order that hurts.
//
// Rules:
//  - Closures hold addresses, never owners of device memory: what the host has freed is free, as on a GPU.
//  - Freed memory belongs to the stream that it was allocated on, and what is allocated there next may lie in it. So the
//    next allocation on that stream, of whatever size, fills all of it with ones in the order of the stream: NaN in
//    every float dtype.
//  - `mutex` is a leaf: nobody runs an operation or takes Python's lock while holding it.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NumericUtils.h>
#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/ForeachUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_chunk_cat_native.h>
#include <ATen/ops/_foreach_add_native.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <ATen/ops/split_with_sizes_copy_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

const c10::Device kSim(c10::DeviceType::PrivateUse1, 0);
constexpr size_t kAlignment = 512;

// ---------------------------------------------------------------------------------------------------------------------
// Streams, and the worker

// A point of a stream that others may wait for: 0 until the stream has passed it, then the time of that. The time is the
// number of operations that the device had done, and one.
using Mark = std::shared_ptr<std::atomic<int64_t>>;

Mark new_mark() { return std::make_shared<std::atomic<int64_t>>(0); }

// A message between ranks: an object of Python with start(), arrived(seconds) and finish().
struct Message {
  py::object object;
  bool is_started = false;
  explicit Message(py::object object) : object(std::move(object)) {}
  ~Message() {
    py::gil_scoped_acquire gil;
    object = py::object();
  }
};

enum class Progress { kNone, kSome, kDone };

// For so long a message is waited for before other streams go on. Ranks with one seed and one program never wait that
// long: they choose alike. Others would wait for each other for good.
constexpr double kPatienceSeconds = 0.25;

struct Item {
  std::function<void()> run;  // an operation; else one of the others
  Mark signals, waits;
  std::unique_ptr<Message> message;
  std::string kind;
};

struct Stream {
  std::deque<Item> items;
  std::optional<uint64_t> priority;  // drawn at its first turn in a schedule: what other streams there are matters not
  bool is_late = false;  // a message of it did not arrive when it was looked for
};

struct Schedule {
  std::mt19937_64 random{0};
  std::set<std::string> late;    // kinds that run when nothing else can
  std::string first = "random";  // or "compute", or "side": streams that go on as long as they can
};

class Device {
 public:
  std::mutex mutex;
  std::deque<Stream> streams{1};
  Schedule schedule;

  void enqueue(int64_t stream, Item item) {
    std::lock_guard<std::mutex> lock(mutex);
    push(stream, std::move(item));
  }

  void push(int64_t stream, Item item) { streams.at(stream).items.push_back(std::move(item)); }

  int64_t new_stream() {
    std::lock_guard<std::mutex> lock(mutex);
    streams.emplace_back();
    return static_cast<int64_t>(streams.size()) - 1;
  }

  Mark record(int64_t stream) {
    Item item;
    item.signals = new_mark();
    Mark mark = item.signals;
    enqueue(stream, std::move(item));
    return mark;
  }

  void block(int64_t stream, Mark mark) {
    Item item;
    item.waits = std::move(mark);
    enqueue(stream, std::move(item));
  }

  // Runs the device until `mark` is reached, or, without one, until nothing is left. Throws what an operation threw.
  void run_until(const Mark& mark) {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex);
    if (!has_worker_) {
      has_worker_ = true;
      num_threads_ = at::get_num_threads();
      std::thread([this] { work(); }).detach();
    }
    goal_ = mark;
    is_wanted_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !is_wanted_; });
    goal_.reset();
    if (!error_.empty()) {
      std::string error;
      std::swap(error, error_);
      TORCH_CHECK(false, "simulated device: ", error);
    }
  }

  bool is_idle(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex);
    return streams.at(stream).items.empty();
  }

  // After a failure: forget what was enqueued.
  void drop_all() {
    std::deque<Item> dropped;
    std::lock_guard<std::mutex> turn(turn_);
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& stream : streams) {
      for (auto& item : stream.items) {
        if (item.signals) *item.signals = now_;
        dropped.push_back(std::move(item));
      }
      stream.items.clear();
    }
    error_.clear();
  }

 private:
  std::mutex turn_;  // of host threads that wait
  std::condition_variable changed_;
  bool has_worker_ = false, is_wanted_ = false;
  int num_threads_ = 1;
  int64_t now_ = 1;
  Mark goal_;
  std::string error_;

  void work() {
    at::set_num_threads(num_threads_);  // as on the host: kernels add in the same order
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed_.wait(lock, [this] { return is_wanted_; });
      while (error_.empty() && !is_reached()) step(lock);
      is_wanted_ = false;
      changed_.notify_all();
    }
  }

  bool is_reached() {
    bool is_empty = true;
    for (bool has_passed = true; has_passed;) {  // a mark that one stream passes may let another one go on
      has_passed = false;
      is_empty = true;
      for (auto& stream : streams) {
        has_passed |= pass_marks(stream);
        is_empty &= stream.items.empty();
      }
    }
    return goal_ ? goal_->load() != 0 : is_empty;
  }

  // Marks take no time. Returns whether there were any at the head of `stream`.
  bool pass_marks(Stream& stream) {
    auto& items = stream.items;
    bool has_passed = false;
    while (!items.empty() && (items.front().signals || (items.front().waits && *items.front().waits))) {
      if (items.front().signals) *items.front().signals = now_;
      items.pop_front();
      has_passed = true;
    }
    return has_passed;
  }

  // One stream goes on by one operation.
  void step(std::unique_lock<std::mutex>& lock) {
    Stream* chosen = choose();
    if (chosen == nullptr) {
      bool was_late = false;
      for (auto& stream : streams) was_late |= std::exchange(stream.is_late, false);
      if (!was_late) error_ = "every stream waits for an event that no stream will reach";
      return;
    }
    Item& item = chosen->items.front();  // stays where it is: only this thread pops
    lock.unlock();
    Progress progress = Progress::kDone;
    std::string error;
    try {
      if (item.message) {
        progress = go_on_with(*item.message);
      } else {
        item.run();
      }
    } catch (const std::exception& e) {
      error = e.what();
    }
    lock.lock();
    if (!error.empty()) error_ = error;
    chosen->is_late = progress == Progress::kNone;
    if (progress == Progress::kNone) return;
    for (auto& stream : streams) stream.is_late = false;
    if (progress == Progress::kSome) return;
    now_ += 1;
    Item finished = std::move(chosen->items.front());
    chosen->items.pop_front();
    lock.unlock();
    finished = Item();  // what it owned goes without the lock
    lock.lock();
  }

  // The first step starts the message; the second one ends it, when it has arrived.
  static Progress go_on_with(Message& message) {
    py::gil_scoped_acquire gil;
    if (!std::exchange(message.is_started, true)) {
      message.object.attr("start")();
      return Progress::kSome;
    }
    if (!message.object.attr("arrived")(kPatienceSeconds).cast<bool>()) return Progress::kNone;
    message.object.attr("finish")();
    return Progress::kDone;
  }

  Stream* choose() {
    auto& random = schedule.random;
    std::vector<Stream*> able, late;
    for (auto& stream : streams) {
      if (stream.items.empty() || stream.items.front().waits || stream.is_late) continue;
      if (!stream.priority) stream.priority = random();
      (schedule.late.count(stream.items.front().kind) ? late : able).push_back(&stream);
    }
    auto& from = able.empty() ? late : able;
    if (from.empty()) return nullptr;
    if (random() % 8 == 0) from[random() % from.size()]->priority = random();
    auto rank = [this](Stream* stream) {
      bool is_first = schedule.first == (stream == &streams[0] ? "compute" : "side");
      return std::make_pair(is_first, *stream->priority);
    };
    return *std::max_element(from.begin(), from.end(), [&](Stream* a, Stream* b) { return rank(a) < rank(b); });
  }
};

Device& device() {
  static Device* one = new Device();  // never destroyed: the worker outlives static objects
  return *one;
}

thread_local int64_t current_stream = 0;

py::object* on_sync = nullptr;
py::object* on_launch = nullptr;

// ---------------------------------------------------------------------------------------------------------------------
// What CUDA asks of a program whose streams are captured into a graph. Nothing is recorded here: the device runs what is
// enqueued, as always, and `on_break` is told of all that CUDA would refuse, or leave out of the graph.

using Clock = std::map<int64_t, int64_t>;  // how many operations of each stream come before a point of a stream

class Capture {
 public:
  void begin(py::object on_break) {
    std::lock_guard<std::mutex> lock(mutex_);
    on_break_ = new py::object(std::move(on_break));
    ++number_;
    origin_ = current_stream;
    clocks_ = {{origin_, {}}};
    is_active_ = true;
  }

  void end() {
    std::string unjoined;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [stream, clock] : clocks_)
        if (clock[stream] > clocks_[origin_][stream]) unjoined += " " + std::to_string(stream);
    }
    if (!unjoined.empty()) broken("the capture ends before its stream has waited for others:" + unjoined);
    is_active_ = false;
  }

  // An allocation is no part of a graph, but its memory is that of the graph only if its stream is captured.
  void operation(int64_t stream, const std::string& what, bool is_allocation = false) {
    if (!is_active_) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = clocks_.find(stream);
      if (found != clocks_.end()) {
        if (!is_allocation) ++found->second[stream];
        return;
      }
    }
    broken(what + " on a stream that is not captured");
  }

  // What an event of this stream stands for: the number of the capture, or 0, and what comes before it.
  std::pair<int64_t, Clock> recorded(int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = clocks_.find(stream);
    if (!is_active_ || found == clocks_.end()) return {0, {}};
    return {number_, found->second};
  }

  void wait(int64_t stream, const std::pair<int64_t, Clock>& event) {
    std::string problem;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      bool is_of_this = is_active_ && event.first == number_;
      if (is_of_this && stream == 0 && stream != origin_) {
        problem = "the default stream waits for a captured one";
      } else if (is_of_this) {  // a stream that waits for a captured one is captured, too
        for (auto& [other, count] : event.second) {
          auto& known = clocks_[stream][other];
          known = std::max(known, count);
        }
        clocks_[stream];
      } else if (event.first != 0) {  // CUDA refuses it, captured or not
        problem = "a wait for an event of a capture that has ended";
      } else if (is_active_ && clocks_.count(stream)) {
        problem = "a captured stream waits for an event that is not captured";
      }
    }
    if (!problem.empty()) broken(problem);
  }

  // What the host may not ask for while any stream is captured.
  void refuse(const std::string& what) {
    if (is_active_) broken(what);
  }

 private:
  std::mutex mutex_;  // a leaf, like the device's
  std::atomic<bool> is_active_{false};
  int64_t number_ = 0, origin_ = 0;
  std::map<int64_t, Clock> clocks_;  // of the streams that are captured
  py::object* on_break_ = nullptr;

  void broken(const std::string& what) {
    py::gil_scoped_acquire gil;
    (*on_break_)(what);
  }
};

Capture& capture() {
  static Capture* one = new Capture();
  return *one;
}

// The host is about to wait for the device.
void count_sync(const std::string& what) {
  capture().refuse("the host waits: " + what);
  py::gil_scoped_acquire gil;
  if (on_sync != nullptr) (*on_sync)(what);
}

thread_local bool is_counted = false;  // see AsOne

// The host asks the device for one more thing: an operation by its name, "wait" (of a stream), or a collective.
void count_launch(const std::string& what) {
  if (on_launch == nullptr || is_counted) return;
  py::gil_scoped_acquire gil;
  if (on_launch != nullptr) (*on_launch)(what);  // another thread may have reset it meanwhile
}

// While it lives, what this thread asks for counts as one operation.
struct AsOne {
  explicit AsOne(const std::string& what) {
    count_launch(what);
    is_counted = true;
  }
  ~AsOne() { is_counted = false; }
};

void synchronize(int64_t stream, const std::string& what) {
  count_sync(what);
  device().run_until(device().record(stream));
}

void drain() {
  device().run_until(nullptr);
}

void enqueue(std::function<void()> run, std::string kind = "compute") {
  Item item;
  item.run = std::move(run);
  item.kind = std::move(kind);
  capture().operation(current_stream, item.kind);
  device().enqueue(current_stream, std::move(item));
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

struct Block {
  void* address;
  size_t nbytes;
  int64_t stream;
  std::set<int64_t> also_on;  // record_stream
};

class SimAllocator final : public c10::Allocator {
 public:
  size_t limit = 0, allocated = 0, peak = 0;
  std::map<int64_t, size_t> held, most_held;  // by stream: memory of one serves no other

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, kSim};
    size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    Block* block = allocate_block(rounded);
    return {block->address, block->address, &release, kSim};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    count_launch("aten::copy_");
    enqueue([=] { std::memcpy(to, from, nbytes); });
  }

  void record(void* address, int64_t stream) {
    std::lock_guard<std::mutex> lock(device().mutex);
    auto found = blocks_.find(address);
    if (found != blocks_.end() && found->second->stream != stream) found->second->also_on.insert(stream);
  }

  // With nothing in any queue: nothing is left of what ran before.
  void spoil_all_free() {
    std::lock_guard<std::mutex> lock(device().mutex);
    take_back_recorded();
    for (auto& each : freed_) spoil(each.second);
    for (auto& each : free_) spoil(each.second);
  }

 private:
  std::unordered_map<void*, Block*> blocks_;
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free_;
  std::vector<std::pair<Block*, std::vector<Mark>>> recorded_;
  std::map<int64_t, std::vector<Block*>> freed_;  // since the last allocation on the stream

  static void release(void* address);

  Block* allocate_block(size_t rounded) {
    capture().operation(current_stream, "an allocation", true);
    std::lock_guard<std::mutex> lock(device().mutex);
    TORCH_CHECK_WITH(
        OutOfMemoryError, limit == 0 || allocated + rounded <= limit, "simulated device: out of memory: ", rounded,
        " bytes asked for, ", allocated, " of ", limit, " in use");
    take_back_recorded();
    spoil_freed();
    auto& free = free_[{current_stream, rounded}];
    Block* block;
    if (free.empty()) {
      block = new Block{std::aligned_alloc(kAlignment, rounded), rounded, current_stream, {}};
      std::memset(block->address, 0xFF, rounded);
    } else {
      block = free.back();
      free.pop_back();
    }
    blocks_[block->address] = block;
    allocated += rounded;
    peak = std::max(peak, allocated);
    size_t& here = held[current_stream];
    here += rounded;
    most_held[current_stream] = std::max(most_held[current_stream], here);
    return block;
  }

  void free_block(void* address) {
    std::lock_guard<std::mutex> lock(device().mutex);
    auto found = blocks_.find(address);
    Block* block = found->second;
    blocks_.erase(found);
    allocated -= block->nbytes;
    if (block->also_on.empty()) {
      make_free(block);
      return;
    }
    std::vector<Mark> marks;
    for (int64_t stream : block->also_on) {
      Item item;
      item.signals = new_mark();
      marks.push_back(item.signals);
      device().push(stream, std::move(item));
    }
    block->also_on.clear();
    recorded_.emplace_back(block, std::move(marks));
  }

  void take_back_recorded() {
    auto is_free = [this](auto& each) {
      for (auto& mark : each.second)
        if (!*mark) return false;
      make_free(each.first);
      return true;
    };
    recorded_.erase(std::remove_if(recorded_.begin(), recorded_.end(), is_free), recorded_.end());
  }

  void make_free(Block* block) {
    held[block->stream] -= block->nbytes;
    freed_[block->stream].push_back(block);
  }

  static void spoil(const std::vector<Block*>& blocks) {
    for (Block* block : blocks) std::memset(block->address, 0xFF, block->nbytes);
  }

  // Whoever gets memory on the current stream may write it from here on.
  void spoil_freed() {
    auto freed = std::exchange(freed_[current_stream], {});
    if (freed.empty()) return;
    for (Block* block : freed) free_[{block->stream, block->nbytes}].push_back(block);
    Item item;
    item.kind = "free";
    item.run = [freed = std::move(freed)] { spoil(freed); };
    device().push(current_stream, std::move(item));
  }
};

SimAllocator& allocator() {
  static SimAllocator* one = new SimAllocator();
  return *one;
}

void SimAllocator::release(void* address) {
  if (address != nullptr) allocator().free_block(address);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, at::kCPU};
    size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    void* address = std::aligned_alloc(kAlignment, rounded);
    std::memset(address, 0xFF, rounded);
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[address] = rounded;
    return {address, address, &release, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = sizes_.upper_bound(const_cast<void*>(address));
    if (next == sizes_.begin()) return false;
    auto& [start, nbytes] = *std::prev(next);
    return static_cast<const char*>(address) < static_cast<char*>(start) + nbytes;
  }

 private:
  std::mutex mutex_;
  std::map<void*, size_t> sizes_;

  static void release(void* address);
};

PinnedAllocator& pinned() {
  static PinnedAllocator* one = new PinnedAllocator();
  return *one;
}

void PinnedAllocator::release(void* address) {
  if (address == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(pinned().mutex_);
    pinned().sizes_.erase(address);
  }
  std::free(address);
}

// ---------------------------------------------------------------------------------------------------------------------
// What torch asks a device for

struct Event {
  Mark mark;
  std::pair<int64_t, Clock> captured;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kSim, id); }
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return kSim; }
  c10::Device getDevice() const override { return kSim; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(device().new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(device().new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->mark = device().record(on.id());
    static_cast<Event*>(*event)->captured = capture().recorded(on.id());
  }
  void block(void* event, const c10::Stream& on) const override {
    count_launch("wait");
    if (event == nullptr || !static_cast<Event*>(event)->mark) return;
    capture().wait(on.id(), static_cast<Event*>(event)->captured);
    device().block(on.id(), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    capture().refuse("event.query");
    return event == nullptr || !static_cast<Event*>(event)->mark || *static_cast<Event*>(event)->mark;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    count_sync("event.synchronize");
    if (event == nullptr || !static_cast<Event*>(event)->mark) return;
    device().run_until(static_cast<Event*>(event)->mark);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {  // an operation takes 1 ms
    auto time = [](void* event) { return static_cast<Event*>(event)->mark->load(); };
    TORCH_CHECK(time(from) && time(to), "elapsed_time: an event was not reached yet");
    return static_cast<double>(time(to) - time(from));
  }
  bool queryStream(const c10::Stream& on) const override {
    capture().refuse("stream.query");
    return device().is_idle(on.id());
  }
  void synchronizeStream(const c10::Stream& on) const override { synchronize(on.id(), "stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    count_sync("synchronize");
    drain();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& on) const override {
    allocator().record(memory.get(), on.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return pinned().holds(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  c10::Device getDeviceFromPtr(void*) const override { return kSim; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    size_t kept = std::min(impl->nbytes(), nbytes);
    auto memory = allocator().allocate(nbytes);
    if (kept > 0) allocator().copy_data(memory.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(nbytes);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Operations

// The memory of `tensor` as a tensor of the CPU that owns nothing. It may be read and written by the worker only.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  size_t needed = tensor.numel() == 0 ? 0 : at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  TORCH_CHECK(
      needed <= tensor.storage().nbytes(), "simulated device: an illegal memory access: a tensor of shape ",
      tensor.sizes(), " lies in memory of ", tensor.storage().nbytes(), " bytes");
  auto* start = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  TORCH_CHECK(
      start != nullptr || needed == 0, "simulated device: an illegal memory access: a tensor of shape ",
      tensor.sizes(), " has no memory of its own; is it a wrapper?");
  void* address = start == nullptr ? nullptr : start + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(address, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

// A value that a kernel gets when it is launched: later writes of the host do not show.
Tensor argument_on_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_privateuseone()) return on_host(tensor);
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

Tensor as_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;  // kernels mix these with any device
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta));
}

Tensor like_meta(const Tensor& meta) {
  return at::detail::empty_strided_generic(
      meta.sizes(), meta.strides(), &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      meta.scalar_type());
}

IValue replaced(const IValue& value, c10::DeviceType type, const std::function<Tensor(const Tensor&)>& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(replace(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> each : value.toOptionalTensorList())
      list.push_back(each ? std::optional<Tensor>(replace(*each)) : each);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) return c10::Device(type);
  return value;
}

Stack replaced(const Stack& values, c10::DeviceType type, const std::function<Tensor(const Tensor&)>& replace) {
  Stack result;
  for (const IValue& value : values) result.push_back(replaced(value, type, replace));
  return result;
}

void copy_results(const Stack& targets, const Stack& results) {
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].isTensor() && targets[i].toTensor().defined() && results[i].toTensor().numel() > 0)
      targets[i].toTensor().copy_(results[i].toTensor());
    if (targets[i].isTensorList()) {
      auto to = targets[i].toTensorVector(), from = results[i].toTensorVector();
      for (size_t j = 0; j < to.size(); ++j) to[j].copy_(from[j]);
    }
  }
}

const std::unordered_set<std::string> kReadByHost = {
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::unique_consecutive", "aten::repeat_interleave"};
std::set<std::string> ran_at_once;  // operations without a kernel that tells the shape of the result

// An index of booleans has as many results as are true.
bool is_read_by_host(const std::string& name, const Stack& arguments) {
  if (kReadByHost.count(name)) return true;
  if (name != "aten::index") return false;
  for (const std::optional<Tensor>& each : arguments[1].toOptionalTensorVector())
    if (each && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte)) return true;
  return false;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Runs `op` now, with the host waiting for all that it reads.
void run_at_once(const c10::OperatorHandle& op, Stack* stack, const Stack& arguments) {
  drain();
  Stack results = replaced(arguments, c10::DeviceType::CPU, argument_on_host);
  op.callBoxed(&results);
  for (size_t i = 0; i < results.size(); ++i) {
    IValue outcome = replaced(results[i], c10::DeviceType::CPU, [](const Tensor& each) {
      if (!each.defined()) return each;
      Tensor made = like_meta(each);
      enqueue([to = on_host(made), each] { to.copy_(each); });
      return made;
    });
    const auto& info = op.schema().returns()[i].alias_info();
    for (size_t j = 0; info != nullptr && j < arguments.size(); ++j) {
      const auto& theirs = op.schema().arguments()[j].alias_info();
      if (theirs != nullptr && *theirs == *info) outcome = arguments[j];
    }
    stack->push_back(outcome);
  }
}

void describe(const Tensor& tensor, std::string& key) {
  if (!tensor.defined()) {
    key += 'u';
    return;
  }
  key += tensor.is_cpu() && tensor.dim() == 0 ? (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 'h') : 't';
  key += static_cast<char>(tensor.scalar_type());
  for (int64_t each : tensor.sizes()) key += std::to_string(each) + ',';
  key += ';';
  for (int64_t each : tensor.strides()) key += std::to_string(each) + ',';
}

// Appends to `key` what a meta kernel sees of `value`; returns whether that is all that it sees.
bool describe(const IValue& value, std::string& key) {
  if (value.isTensor()) {
    describe(value.toTensor(), key);
  } else if (value.isTensorList()) {
    for (const Tensor& each : value.toTensorList()) describe(each, key += '+');
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor> each : value.toOptionalTensorList()) describe(each.value_or(Tensor()), key += '+');
  } else if (value.isNone() || value.isDevice()) {
    key += '-';
  } else if (value.isInt()) {
    key += 'i' + std::to_string(value.toInt());
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    key.append("d").append(reinterpret_cast<const char*>(&number), sizeof number);
  } else if (value.isBool()) {
    key += value.toBool() ? "yes" : "no";
  } else if (value.isString()) {
    key += '"' + value.toStringRef() + '"';
  } else if (value.isIntList()) {
    for (int64_t each : value.toIntList()) key += std::to_string(each) + ',';
  } else if (value.isBoolList()) {
    for (bool each : value.toBoolList()) key += each ? "yes," : "no,";
  } else {
    return false;
  }
  key += '|';
  return true;
}

struct OnMeta {
  Stack arguments, results;  // afterwards: out= may have been resized
};

// What the meta kernel of `op` makes of `arguments`. Kept: many are written in Python, and took three quarters of the
// time of a test.
OnMeta run_on_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  static auto& known = *new std::unordered_map<std::string, OnMeta>();
  static std::mutex mutex;
  std::string key = op.schema().name() + '.' + op.schema().overload_name() + '|';
  bool is_described = true;
  for (const IValue& each : arguments) is_described = is_described && describe(each, key);
  if (is_described) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  OnMeta made{replaced(arguments, c10::DeviceType::Meta, as_meta), {}};
  made.results = made.arguments;
  op.callBoxed(&made.results);
  if (is_described) {
    std::lock_guard<std::mutex> lock(mutex);
    known.emplace(std::move(key), made);
  }
  return made;
}

// Every operation without a kernel of its own below: enqueues the CPU's.
void enqueue_operation(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  Stack arguments = torch::jit::pop(*stack, parameters.size());
  bool is_random = false;
  size_t num_written = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    is_random |= parameters[i].name() == "generator";
    num_written += is_written(parameters[i]);
    TORCH_CHECK(
        parameters[i].alias_info() == nullptr || is_written(parameters[i]), "simulated device: ", schema.name(),
        " returns a view and has no kernel");
  }
  count_launch(schema.name());
  if (is_read_by_host(schema.name(), arguments)) {
    count_sync(schema.name());
    return run_at_once(op, stack, arguments);
  }
  if (is_random && num_written == 1 && is_written(parameters[0])) {  // drawn in the order of the host
    Tensor target = arguments[0].toTensor();
    Tensor drawn = at::empty_strided(target.sizes(), target.strides(), target.options().device(at::kCPU));
    Stack drawing = arguments;
    drawing[0] = drawn;
    op.callBoxed(&drawing);
    enqueue([to = on_host(target), drawn] { to.copy_(drawn); });
    stack->push_back(target);
    return;
  }
  if (is_random) {
    ran_at_once.insert(schema.name());
    return run_at_once(op, stack, arguments);
  }

  Stack outcome, targets;  // what is returned, and what the worker fills
  bool is_new = false;
  for (const auto& each : schema.returns()) is_new |= each.alias_info() == nullptr;
  if (is_new || schema.overload_name().find("out") != std::string::npos) {
    OnMeta meta;
    try {
      meta = run_on_meta(op, arguments);
    } catch (const c10::NotImplementedError&) {
      TORCH_CHECK(is_new || num_written > 0, schema.name());
      ran_at_once.insert(schema.name());
      return run_at_once(op, stack, arguments);
    }
    for (size_t i = 0; i < parameters.size(); ++i)  // out= may have been resized
      if (is_written(parameters[i]) && arguments[i].isTensor() && arguments[i].toTensor().defined() &&
          arguments[i].toTensor().sizes() != meta.arguments[i].toTensor().sizes())
        arguments[i].toTensor().resize_(meta.arguments[i].toTensor().sizes());
    outcome = std::move(meta.results);
    if (schema.name() == "aten::native_layer_norm") {  // the CPU's statistics are of the dtype that its backward takes
      const Tensor input = arguments[0].toTensor(), weight = arguments[2].toOptional<Tensor>().value_or(Tensor());
      const bool is_mixed = weight.defined() && weight.scalar_type() != input.scalar_type();
      for (size_t i : {1, 2}) outcome[i] = outcome[i].toTensor().to(is_mixed ? at::kFloat : input.scalar_type());
    }
  }
  outcome.resize(schema.returns().size());
  for (size_t i = 0; i < outcome.size(); ++i) {
    const auto& info = schema.returns()[i].alias_info();
    if (info == nullptr) {
      outcome[i] = replaced(outcome[i], c10::DeviceType::PrivateUse1, [](const Tensor& meta) {
        return meta.defined() ? like_meta(meta) : meta;
      });
      targets.push_back(replaced(outcome[i], c10::DeviceType::CPU, on_host));
      continue;
    }
    targets.emplace_back();
    for (size_t j = 0; j < arguments.size(); ++j)
      if (parameters[j].alias_info() != nullptr && *parameters[j].alias_info() == *info) outcome[i] = arguments[j];
  }
  Stack inputs = replaced(arguments, c10::DeviceType::CPU, argument_on_host);
  enqueue([op, inputs = std::move(inputs), targets = std::move(targets)]() mutable {
    Stack results = inputs;
    op.callBoxed(&results);
    copy_results(targets, results);
  });
  for (auto& each : outcome) stack->push_back(std::move(each));
}

Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

// As on CUDA: without non_blocking the host waits; a copy of memory that is not pinned makes it wait in any case.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (source.numel() == 0) return target;
  count_launch("aten::copy_");
  Tensor from = on_host(source), to = on_host(target);
  const bool is_across = source.is_cpu() || target.is_cpu();
  const bool is_pinned = is_across && pinned().holds(source.is_cpu() ? source.data_ptr() : target.data_ptr());
  if (!is_across || (non_blocking && is_pinned)) {
    enqueue([from, to] { to.copy_(from); }, is_across ? "copy" : "compute");
    return target;
  }
  std::string what = source.is_cpu() ? "copy from the host" : "copy to the host";
  if (non_blocking && source.is_cpu()) {  // the driver takes the values, and the stream is not waited for
    count_sync(what + ", not pinned");
    enqueue([from = from.clone(), to] { to.copy_(from); }, "copy");
    return target;
  }
  enqueue([from, to] { to.copy_(from); }, "copy");
  synchronize(current_stream, what + (non_blocking ? ", not pinned" : ""));
  return target;
}

bool have_one_dtype(at::TensorList tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](auto& each) { return each.dtype() == tensors[0].dtype(); });
}

// The following run as the operations that they consist of, and count as one where CUDA has one kernel.
void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  std::optional<AsOne> one;
  if (at::native::_check_tensors_share_device_and_dtype({targets, sources}, true) && have_one_dtype(targets) &&
      have_one_dtype(sources) && at::native::_check_tensors_share_sizes_and_strides({targets, sources}))
    one.emplace("aten::_foreach_copy_");
  at::native::foreach_tensor_copy_list_kernel_slow_(targets, sources, non_blocking);
}

void foreach_add(at::TensorList targets, at::TensorList values, const at::Scalar& alpha) {
  std::optional<AsOne> one;
  if (at::native::can_use_fast_route({targets, values}, alpha)) one.emplace("aten::_foreach_add_");
  at::native::foreach_tensor_add_list_kernel_slow_(targets, values, alpha);
}

void split_copy(const Tensor& self, at::IntArrayRef sizes, int64_t dim, at::TensorList out) {
  bool is_fused = self.is_non_overlapping_and_dense();
  for (const Tensor& each : out) is_fused &= each.is_non_overlapping_and_dense() && each.dtype() == self.dtype();
  std::optional<AsOne> one;
  if (is_fused) one.emplace("aten::split_with_sizes_copy");
  at::native::split_with_sizes_copy_out(self, sizes, dim, out);
}

Tensor& chunk_cat(at::TensorList tensors, int64_t dim, int64_t num_chunks, Tensor& out) {
  const auto from = tensors[0].scalar_type(), to = out.scalar_type();
  bool is_fused = have_one_dtype(tensors) && out.is_non_overlapping_and_dense();
  for (const Tensor& each : tensors) is_fused &= each.is_contiguous();
  std::optional<AsOne> one;
  if (is_fused && (from == to || (from == at::kBFloat16 && to == at::kFloat))) one.emplace("aten::_chunk_cat");
  return at::native::_chunk_cat_out(tensors, dim, num_chunks, out);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (self.numel() > 0 && needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  Tensor value = on_host(self);
  synchronize(current_stream, "item");
  return value.item();
}

// As the CPU's, and drawn in the order of the host; torch would ask a device for a fused one.
Tensor dropout(const Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input * at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator().record(self.storage().mutable_data_ptr().get(), stream.id());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  // As without a kernel, but they count as CUDA's.
  m.impl("_foreach_copy_", foreach_copy);
  m.impl("_foreach_add_.List", foreach_add);
  m.impl("split_with_sizes_copy.out", split_copy);
  m.impl("_chunk_cat.out", chunk_cat);
  // Else torch takes these apart, and rounds differently than the CPU does.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&enqueue_operation>());
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&enqueue_operation>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&enqueue_operation>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks* hooks = new Hooks();
  m.def("init", [] {
    at::RegisterPrivateUse1HooksInterface(hooks);
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator());
  });
  m.def("on_sync", [](py::object function) {
    on_sync = function.is_none() ? nullptr : new py::object(std::move(function));
  });
  m.def("on_launch", [](py::object function) {
    on_launch = function.is_none() ? nullptr : new py::object(std::move(function));
  });
  m.def("schedule", [](uint64_t seed, std::set<std::string> late, std::string first) {
    std::lock_guard<std::mutex> lock(device().mutex);
    auto& schedule = device().schedule;
    schedule.random.seed(seed);
    schedule.late = std::move(late);
    schedule.first = std::move(first);
    for (auto& stream : device().streams) stream.priority.reset();
  });
  m.def("drain", drain);
  m.def("spoil_all_free", [] { allocator().spoil_all_free(); });
  m.def("drop_all", [] { device().drop_all(); }, py::call_guard<py::gil_scoped_release>());
  m.def("host_view", [](const Tensor& tensor) { return on_host(tensor); });
  m.def("send", [](int64_t stream, std::string kind, py::object message) {
    count_launch(kind);
    Item item;
    item.kind = std::move(kind);
    item.message = std::make_unique<Message>(std::move(message));
    capture().operation(stream, item.kind);
    device().enqueue(stream, std::move(item));
  });
  m.def("begin_capture", [](py::object on_break) { capture().begin(std::move(on_break)); });
  m.def("end_capture", [] { capture().end(); });
  m.def("ran_at_once", [] { return ran_at_once; });
  m.def("set_memory_limit", [](size_t nbytes) { allocator().limit = nbytes; });
  m.def("memory_allocated", [] { return allocator().allocated; });
  m.def("max_memory_allocated", [] { return allocator().peak; });
  m.def("max_memory_reserved", [] {
    size_t total = 0;
    for (auto& each : allocator().most_held) total += each.second;
    return total;
  });
  m.def("reset_peak_memory", [] {
    allocator().peak = allocator().allocated;
    allocator().most_held = allocator().held;
  });
}
