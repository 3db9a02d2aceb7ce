#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"

// What the schedule (fibers.cpp), the words of a warp (lanes.cpp) and shared memory (shared_memory.cpp) share.
namespace dmtp::host {

constexpr int kWarp = 32;
constexpr size_t kSharedMost = 227 << 10;  // bytes of a block

struct Cluster;

enum class State : uint8_t { ready, waiting, done };

// Where fibers run, one after another.
struct Stack {
  char* memory;
  bool started = false;
  ucontext_t start;
  jmp_buf context;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int64_t group;
};

struct Fiber : Thread {
  int id = 0;  // in its block
  State state = State::ready;
  Together kind{};
  Site site{};
  uint32_t mask = 0;
  uint64_t value = 0, result = 0;
  int from = 0;
  void (*all)(void* const*) = nullptr;
  std::vector<Copy> copies;  // on their way
  int64_t group = 0;         // that they are committed to next
  Stack* stack = nullptr;
};

struct Block {
  std::vector<Fiber> threads;
  Cluster* cluster = nullptr;
  char* shared = nullptr;
  bool begun = false;
  size_t at_barrier = 0, done = 0;  // threads
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  size_t at_barrier = 0;  // threads

  size_t threads() const { return blocks.size() * blocks[0]->threads.size(); }
  size_t done() const {
    size_t all = 0;
    for (const auto& block : blocks) {
      all += block->done;
    }
    return all;
  }
};

extern std::mt19937_64 draw;
extern std::vector<Fiber*> ready;

// "file.cu:line".
std::string name_of(Site);
std::string where(const Fiber&);
Fiber& self();
// Gives the turn back.
void to_scheduler();
// Ends the launch from inside a fiber.
[[noreturn]] void fail(const std::string& message);
// After a thread began to wait, or returned: then it may be the last that others waited for.
void release(Fiber&);

// For a launch whose blocks have this much dynamic shared memory.
void lay_out_shared(size_t dynamic);
// A block's shared memory, full of garbage. Closed, it has no access.
char* take_shared();
void close_shared(char*, bool closed);
bool closed_shared(const void* at);
// Whether no byte between the variables was written.
bool intact_shared(const char*);
void give_shared(char*);
void count_launch();

}  // namespace dmtp::host
