#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fiber_state.h"

namespace dmtp::host {

Thread* current = nullptr;
Index block_size, grid_size;
std::mt19937_64 draw;
std::vector<Fiber*> ready;
std::string without;
std::set<std::string> barriers;

namespace {

constexpr size_t kStack = 64 << 10;
constexpr size_t kSharedMost = 48 << 10;  // bytes of a block that CUDA gives without being asked

uint64_t seed = 0, launches = 0;
std::string words, fault;
std::vector<Stack*> stacks;  // not in use
const std::function<void()>* body = nullptr;
jmp_buf scheduler;

}  // namespace

std::string name_of(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  const std::string file = slash == nullptr ? site.file : slash + 1;
  return site.line == 0 ? file : file + ":" + std::to_string(site.line);
}

std::string where(const Fiber& t) {
  char text[96];
  std::snprintf(text, sizeof text, "thread %u,%u,%u of block %u,%u,%u", t.index.x, t.index.y, t.index.z, t.block.x,
                t.block.y, t.block.z);
  return text;
}

Fiber& self() {
  return *static_cast<Fiber*>(current);
}

void fail(const std::string& message) {
  fault = message;
  _longjmp(scheduler, 2);
}

__attribute__((noinline)) void to_scheduler() {
  if (_setjmp(self().stack->context) == 0) {
    _longjmp(scheduler, 1);
  }
}

namespace {

void fiber_main() {
  for (;;) {
    (*body)();
    self().state = State::done;
    // comes back as another fiber
    to_scheduler();
  }
}

Stack* take_stack() {
  if (stacks.empty()) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, kStack + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
      std::abort();
    }
    stacks.push_back(new Stack{static_cast<char*>(memory) + page, false, {}, {}});  // kept for good
  }
  Stack* stack = stacks.back();
  stacks.pop_back();
  return stack;
}

// A fiber's turn, until it waits, pauses or returns; false where the launch failed.
__attribute__((noinline)) bool resume(Fiber& t) {
  current = &t;
  const int back = _setjmp(scheduler);
  if (back == 0) {
    Stack& stack = *t.stack;
    if (stack.started) {
      _longjmp(stack.context, 1);
    }
    stack.started = true;
    getcontext(&stack.start);
    stack.start.uc_stack.ss_sp = stack.memory;
    stack.start.uc_stack.ss_size = kStack;
    stack.start.uc_link = nullptr;
    makecontext(&stack.start, fiber_main, 0);
    setcontext(&stack.start);
  }
  current = nullptr;
  return back == 1;
}

void outside(int, siginfo_t* info, void*) {
  if (current == nullptr) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  char text[64];
  std::snprintf(text, sizeof text, ": an access outside of memory, at %p", info->si_addr);
  fault = where(self()) + text;
  _longjmp(scheduler, 2);
}

// Reports accesses outside of memory, while it lives.
class Watch {
 public:
  Watch() {
    struct sigaction action{};
    action.sa_sigaction = outside;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    stack_t stack{};
    stack.ss_sp = stack_;
    stack.ss_size = sizeof stack_;
    sigaltstack(&stack, &stack_before_);
    sigaction(SIGSEGV, &action, &segv_);
    sigaction(SIGBUS, &action, &bus_);
  }
  ~Watch() {
    sigaction(SIGSEGV, &segv_, nullptr);
    sigaction(SIGBUS, &bus_, nullptr);
    sigaltstack(&stack_before_, nullptr);
  }

 private:
  alignas(16) inline static char stack_[1 << 16];
  struct sigaction segv_, bus_;
  stack_t stack_before_;
};

std::unique_ptr<Block> make_block(uint64_t number) {
  auto block = std::make_unique<Block>();
  const size_t count = size_t{block_size.x} * block_size.y * block_size.z;
  block->threads = std::vector<Fiber>(count);
  for (size_t i = 0; i < count; ++i) {
    Fiber& t = block->threads[i];
    t.id = static_cast<int>(i);
    t.home = block.get();
    t.stack = take_stack();
    t.index = {static_cast<unsigned>(i % block_size.x), static_cast<unsigned>(i / block_size.x % block_size.y),
               static_cast<unsigned>(i / block_size.x / block_size.y)};
    t.block = {static_cast<unsigned>(number % grid_size.x), static_cast<unsigned>(number / grid_size.x % grid_size.y),
               static_cast<unsigned>(number / grid_size.x / grid_size.y)};
  }
  return block;
}

std::string stuck(const std::vector<std::unique_ptr<Block>>& resident) {
  std::set<std::string> at;
  for (const auto& block : resident) {
    for (const Fiber& t : block->threads) {
      if (t.state == State::waiting) {
        at.insert(name_of(t.site));
      }
    }
  }
  std::string message = "threads wait for others that never come:";
  for (const std::string& name : at) {
    message += " " + name;
  }
  return message;
}

}  // namespace

void* shared(int site, size_t bytes) {
  Block& block = *self().home;
  auto& [memory, size] = block.shared[site];
  if (!memory) {
    size = bytes;
    block.shared_bytes += bytes;
    if (block.shared_bytes > kSharedMost) {
      fail(where(self()) + ": more shared memory than a block has");
    }
    memory.reset(new char[bytes + 32]);
    std::memset(memory.get(), 0xff, bytes + 32);  // NaN, or -1
  }
  const auto at = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<void*>((at + 15) & ~uintptr_t{15});
}

int resident_blocks() {
  return 1 + static_cast<int>(seed / 3 % 3);
}

const char* run(Index grid, Index block, bool cooperative, const std::function<void()>& thread) {
  const uint64_t total = uint64_t{grid.x} * grid.y * grid.z, threads = uint64_t{block.x} * block.y * block.z;
  fault.clear();
  ++launches;
  if (total == 0 || threads == 0 || threads > 1024 || grid.y > 65535 || grid.z > 65535) {
    return "no such launch: a grid of nothing, or a block of more than 1,024 threads";
  }
  grid_size = grid;
  block_size = block;
  body = &thread;
  draw.seed(seed * 0x9e3779b97f4a7c15u + launches);
  std::vector<uint64_t> order(total);
  for (uint64_t i = 0; i < total; ++i) {
    order[i] = i;
  }
  if (seed > 0) {
    std::shuffle(order.begin(), order.end(), draw);
  }
  const size_t most = cooperative ? total : 1 + draw() % 3;
  // the first two schedules are the plainest: threads in their order, and in the other
  const bool rising = seed == 0, falling = seed == 1;
  std::vector<std::unique_ptr<Block>> resident;
  ready.clear();
  uint64_t next = 0;
  Watch watch;
  while (next < total || !resident.empty()) {
    while (resident.size() < most && next < total) {
      resident.push_back(make_block(order[next++]));
      for (Fiber& t : resident.back()->threads) {
        ready.push_back(&t);
      }
    }
    if (ready.empty()) {
      fault = stuck(resident);
    }
    while (fault.empty() && !ready.empty()) {
      const size_t i = rising ? 0 : falling ? ready.size() - 1 : draw() % ready.size();
      Fiber& t = *ready[i];
      if (!resume(t)) {
        break;
      }
      if (t.state == State::ready) {
        // whoever lets others run waits for them
        std::rotate(ready.begin(), ready.begin() + (rising ? 1 : 0), ready.end());
        std::rotate(ready.begin(), ready.end() - (falling ? 1 : 0), ready.end());
        continue;
      }
      if (rising || falling) {
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ready[i] = ready.back();
        ready.pop_back();
      }
      release(t);
      if (t.home->done == t.home->threads.size()) {
        break;
      }
    }
    std::erase_if(resident, [&](const std::unique_ptr<Block>& one) {
      if (fault.empty() && one->done < one->threads.size()) {
        return false;
      }
      for (Fiber& t : one->threads) {
        // a fiber that did not return is forgotten
        t.stack->started = t.stack->started && t.state == State::done;
        stacks.push_back(t.stack);
      }
      return true;
    });
    if (!fault.empty()) {
      return fault.c_str();
    }
  }
  return nullptr;
}

}  // namespace dmtp::host

void dmtp_host_seed(uint64_t value) {
  dmtp::host::seed = value;
  dmtp::host::launches = 0;
}

void dmtp_host_without(const char* site) {
  dmtp::host::without = site == nullptr ? "" : site;
}

const char* dmtp_host_barriers() {
  dmtp::host::words.clear();
  for (const std::string& name : dmtp::host::barriers) {
    dmtp::host::words += name + " ";
  }
  dmtp::host::barriers.clear();
  return dmtp::host::words.c_str();
}

uint64_t dmtp_host_launches() {
  return dmtp::host::launches;
}
