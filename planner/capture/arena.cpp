// Memory of a training step at fixed places in one arena, in place of what torch's CPU allocator gives.
//
// A thread that has entered a table takes its allocations, one after the other, for the next of that table. While a
// table records, it writes down sizes, and when each allocation is made and freed. Once it has places, an allocation of
// the size that was recorded lies at its place, if nobody holds any of that: whoever keeps a tensor for longer than the
// step did when it was recorded keeps its memory. Whatever has no place, or another size, comes from the allocator that
// was there before. So every tensor has memory of its own at all times, whatever a program does.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

c10::Allocator* before = nullptr;

std::mutex mutex;  // of all that follows, but for what belongs to a thread

// Bytes in which places lie. What lies there keeps them, even if nobody else does.
struct Memory {
  explicit Memory(size_t size) : size(size) {
    void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base = found == MAP_FAILED ? nullptr : static_cast<char*>(found);
  }
  ~Memory() {
    if (base) munmap(base, size);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* base;
  size_t size;
  std::map<char*, char*> taken;  // from the first byte to the one after the last
};
using SharedMemory = std::shared_ptr<Memory>;

struct Made {
  int64_t size;
  int64_t died;  // how many allocations had been made by then; -1 while it is there
};

// A table either records, or has places; then it does not change any more, but for its counts.
struct Table {
  std::vector<Made> made;
  std::vector<int64_t> starts;  // of each part of the step, the first allocation
  std::vector<int64_t> sizes, offsets;
  SharedMemory memory;
  int64_t placed = 0, missed = 0;
};
using SharedTable = std::shared_ptr<Table>;

struct Recorded {
  SharedTable table;
  size_t index;
};

std::unordered_map<void*, Recorded>& recorded() {
  static auto* found = new std::unordered_map<void*, Recorded>;  // outlives every tensor
  return *found;
}

// By its first byte, each memory in which something lies.
std::map<char*, SharedMemory>& occupied() {
  static auto* found = new std::map<char*, SharedMemory>;
  return *found;
}

thread_local SharedTable active;
thread_local size_t next_allocation = 0;

// Free whatever this allocator gave.
void forget(void* address) {
  SharedMemory emptied;  // goes back to the system after the lock
  {
    const std::lock_guard<std::mutex> held(mutex);
    char* first = static_cast<char*>(address);
    auto after = occupied().upper_bound(first);
    if (after != occupied().begin()) {
      const auto found = std::prev(after);
      Memory& memory = *found->second;
      if (first < memory.base + memory.size) {
        c10::profiledCPUMemoryReporter().Delete(address);
        memory.taken.erase(first);
        if (memory.taken.empty()) {
          emptied = std::move(found->second);
          occupied().erase(found);
        }
        return;
      }
    }
    const auto found = recorded().find(address);
    if (found != recorded().end()) {
      Table& table = *found->second.table;
      table.made[found->second.index].died = static_cast<int64_t>(table.made.size());
      recorded().erase(found);
    }
  }
  before->raw_deallocate(address);
}

c10::DataPtr as_ours(void* address) { return {address, address, &forget, c10::Device(c10::DeviceType::CPU)}; }

c10::DataPtr record(const SharedTable& table, size_t size) {
  void* address = before->raw_allocate(size);
  const std::lock_guard<std::mutex> held(mutex);
  recorded().insert_or_assign(address, Recorded{table, table->made.size()});
  table->made.push_back({static_cast<int64_t>(size), -1});
  return as_ours(address);
}

// Return the address of a place, which is taken from now on; nullptr if any of it is already.
char* take(const SharedMemory& memory, int64_t offset, size_t size) {
  char* first = memory->base + offset;
  char* end = first + size;
  auto& taken = memory->taken;
  const auto next = taken.lower_bound(first);
  if (next != taken.end() && next->first < end) return nullptr;
  if (next != taken.begin() && std::prev(next)->second > first) return nullptr;
  if (taken.empty()) occupied().emplace(memory->base, memory);
  taken.emplace_hint(next, first, end);
  return first;
}

c10::DataPtr place(Table& table, size_t size) {
  const size_t index = next_allocation++;
  const bool is_known = index < table.sizes.size() && table.sizes[index] == static_cast<int64_t>(size);
  const bool is_inside = is_known && table.offsets[index] >= 0;
  void* address = nullptr;
  {
    const std::lock_guard<std::mutex> held(mutex);
    if (is_inside) address = take(table.memory, table.offsets[index], size);
    if (address) {
      ++table.placed;
    } else if (!is_known || is_inside) {
      ++table.missed;
    }
  }
  if (!address) return before->allocate(size);
  c10::profiledCPUMemoryReporter().New(address, size);
  return as_ours(address);
}

struct StepAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (!active || !size) return before->allocate(size);
    return active->memory ? place(*active, size) : record(active, size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace

extern "C" {

// Put our allocator before torch's, for good; it hands on whatever is asked for outside of a table. Return whether the
// one that is there allows that.
int64_t arena_install() {
  static auto* own = new StepAllocator;
  if (before) return 1;
  c10::Allocator* found = c10::GetAllocator(c10::DeviceType::CPU);
  if (!found->raw_deleter()) return 0;
  before = found;
  // A process that is forked meanwhile, to load data, must not find the lock taken for good.
  pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  c10::SetAllocator(c10::DeviceType::CPU, own, UINT8_MAX);
  return c10::GetAllocator(c10::DeviceType::CPU) == own;
}

void* arena_table() { return new SharedTable(std::make_shared<Table>()); }

void arena_forget(void* table) { delete static_cast<SharedTable*>(table); }

// Let this thread take its next allocations for those of a part of a table: parts are entered in their order.
void arena_enter(void* handle, int64_t part) {
  const SharedTable& table = *static_cast<SharedTable*>(handle);
  if (!table->memory) {
    const std::lock_guard<std::mutex> held(mutex);
    while (static_cast<int64_t>(table->starts.size()) <= part) {
      table->starts.push_back(static_cast<int64_t>(table->made.size()));
    }
  } else {
    const bool is_known = part < static_cast<int64_t>(table->starts.size());
    next_allocation = is_known ? table->starts[part] : table->sizes.size();
  }
  active = table;
}

void arena_leave() { active.reset(); }

int64_t arena_recorded(void* handle) {
  const std::lock_guard<std::mutex> held(mutex);
  return static_cast<int64_t>((*static_cast<SharedTable*>(handle))->made.size());
}

// Say of each recorded allocation its size, and how many had been made when it was freed: -1 if it never was.
void arena_read(void* handle, int64_t count, int64_t* sizes, int64_t* died) {
  const std::lock_guard<std::mutex> held(mutex);
  const Table& table = **static_cast<SharedTable*>(handle);
  for (int64_t index = 0; index < count; ++index) {
    sizes[index] = table.made[index].size;
    died[index] = table.made[index].died;
  }
}

void* arena_memory(int64_t size) {
  auto made = std::make_shared<Memory>(static_cast<size_t>(size));
  return made->base ? new SharedMemory(std::move(made)) : nullptr;
}

void arena_release(void* memory) { delete static_cast<SharedMemory*>(memory); }

// Make a table with places of what another one recorded, of as many allocations as are given; one below 0 stays outside.
void* arena_placed(void* recorded, int64_t count, const int64_t* offsets, void* memory) {
  const std::lock_guard<std::mutex> held(mutex);
  const Table& table = **static_cast<SharedTable*>(recorded);
  auto made = std::make_shared<Table>();
  for (int64_t index = 0; index < count; ++index) made->sizes.push_back(table.made[index].size);
  made->offsets.assign(offsets, offsets + count);
  made->starts = table.starts;
  made->memory = *static_cast<SharedMemory*>(memory);
  return new SharedTable(std::move(made));
}

// Say how many allocations lay at their places since this was last asked, and how many came from elsewhere.
void arena_counts(void* handle, int64_t* counts) {
  const std::lock_guard<std::mutex> held(mutex);
  Table& table = **static_cast<SharedTable*>(handle);
  counts[0] = table.placed;
  counts[1] = table.missed;
  table.placed = table.missed = 0;
}
}
