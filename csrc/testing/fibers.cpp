#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "fiber_state.h"
#include "watch.h"

namespace dmtp::host {

Thread* current = nullptr;
Index block_size, grid_size;
int processors = 132;
std::mt19937_64 draw;
std::vector<Fiber*> ready;

namespace {

constexpr size_t kStack = 64 << 10;

uint64_t seed = 0, launches = 0;
std::string fault;
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

void misaligned(const void* at, size_t unit) {
  char text[64];
  std::snprintf(text, sizeof text, ": %p is not a multiple of %zu", at, unit);
  fail(where(self()) + text);
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

std::unique_ptr<Cluster> make_cluster(uint64_t first, int blocks) {
  auto cluster = std::make_unique<Cluster>();
  for (int rank = 0; rank < blocks; ++rank) {
    Block& block = *cluster->blocks.emplace_back(make_block(first + static_cast<uint64_t>(rank)));
    block.cluster = cluster.get();
    block.shared = take_shared();
    if (blocks > 1) {
      close_shared(block.shared, true);
    }
    for (Fiber& t : block.threads) {
      t.rank = rank;
      ready.push_back(&t);
    }
  }
  return cluster;
}

void begin(Block& block) {
  if (!block.begun && block.cluster->blocks.size() > 1) {
    close_shared(block.shared, false);
  }
  block.begun = true;
}

// Whether the whole cluster has ended with it.
bool end(Block& block) {
  if (!intact_shared(block.shared)) {
    fault = where(block.threads[0]) + ": its block wrote outside of its shared variables";
  }
  if (block.cluster->blocks.size() > 1) {
    close_shared(block.shared, true);
  }
  return block.cluster->done() == block.cluster->threads();
}

void forget(const Cluster& cluster) {
  for (const auto& block : cluster.blocks) {
    for (const Fiber& t : block->threads) {
      // a fiber that did not return is forgotten
      t.stack->started = t.stack->started && t.state == State::done;
      stacks.push_back(t.stack);
    }
    give_shared(block->shared);
  }
}

std::string stuck(const std::vector<std::unique_ptr<Cluster>>& resident) {
  std::set<std::string> at;
  for (const auto& cluster : resident) {
    for (const auto& block : cluster->blocks) {
      for (const Fiber& t : block->threads) {
        if (t.state == State::waiting) {
          at.insert(name_of(t.site));
        }
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

int resident_blocks() {
  return 1 + static_cast<int>(seed / 3 % 3);
}

const char* run(Index grid, Index block, bool cooperative, const std::function<void()>& thread, Wish wish) {
  const uint64_t total = uint64_t{grid.x} * grid.y * grid.z, threads = uint64_t{block.x} * block.y * block.z;
  fault.clear();
  ++launches;
  count_launch();
  if (total == 0 || threads == 0 || threads > 1024 || grid.y > 65535 || grid.z > 65535) {
    return "no such launch: a grid of nothing, or a block of more than 1,024 threads";
  }
  if (wish.cluster < 1 || wish.cluster > kMostCluster || grid.x % static_cast<unsigned>(wish.cluster) != 0) {
    return "no such launch: a cluster of more than eight blocks, or a grid that clusters do not fill";
  }
  if (wish.dynamic < 0 || wish.dynamic > kSharedLimit) {
    return "no such launch: more dynamic shared memory than a block has";
  }
  grid_size = grid;
  block_size = block;
  body = &thread;
  draw.seed(seed * 0x9e3779b97f4a7c15u + launches);
  lay_out_shared(static_cast<size_t>(wish.dynamic));
  std::vector<uint64_t> order(total / static_cast<uint64_t>(wish.cluster));
  for (uint64_t i = 0; i < order.size(); ++i) {
    order[i] = i * static_cast<uint64_t>(wish.cluster);
  }
  if (seed > 0) {
    std::shuffle(order.begin(), order.end(), draw);
  }
  // clusters: up to three of one block, up to two of more
  const size_t drawn = 1 + draw() % 3, most = cooperative ? total : wish.cluster > 1 ? (drawn + 1) / 2 : drawn;
  // the first two schedules are the plainest: threads in their order, and in the other
  const bool rising = seed == 0, falling = seed == 1;
  std::vector<std::unique_ptr<Cluster>> resident;
  ready.clear();
  size_t next = 0;
  Watch watch;
  while (next < order.size() || !resident.empty()) {
    while (resident.size() < most && next < order.size()) {
      resident.push_back(make_cluster(order[next++], wish.cluster));
    }
    if (ready.empty()) {
      fault = stuck(resident);
    }
    while (fault.empty() && !ready.empty()) {
      const size_t i = rising ? 0 : falling ? ready.size() - 1 : draw() % ready.size();
      Fiber& t = *ready[i];
      begin(*t.home);
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
      if (t.home->done == t.home->threads.size() && end(*t.home)) {
        break;
      }
    }
    std::erase_if(resident, [](const std::unique_ptr<Cluster>& one) {
      const bool over = !fault.empty() || one->done() == one->threads();
      if (over) {
        forget(*one);
      }
      return over;
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

uint64_t dmtp_host_launches() {
  return dmtp::host::launches;
}

void dmtp_host_processors(int count) {
  dmtp::host::processors = count;
}
