#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"

// What the schedule (fibers.cpp) and the words of a warp (lanes.cpp) share.
namespace dmtp::host {

constexpr int kWarp = 32;

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
  std::map<int, std::pair<std::unique_ptr<char[]>, size_t>> shared;
  size_t shared_bytes = 0;
  size_t at_barrier = 0, done = 0;  // threads
};

extern std::mt19937_64 draw;
extern std::vector<Fiber*> ready;
extern std::string without;             // the barriers that are switched off
extern std::set<std::string> barriers;  // that ran

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

}  // namespace dmtp::host
