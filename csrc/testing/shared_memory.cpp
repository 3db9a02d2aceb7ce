#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "fiber_state.h"

// Of each block: pages without access, its static variables at one end, its dynamic memory at the other, and pages
// without access again. What no variable has stays as it was filled.
namespace dmtp::host {
namespace {

constexpr size_t kStaticMost = 48 << 10;  // bytes of a block that CUDA gives without being asked
constexpr size_t kArea = (kSharedMost + kStaticMost + 0xffff) & ~size_t{0xffff};
constexpr size_t kGap = 16;  // at least, behind a variable
constexpr int kFill = 0xff;  // NaN, or -1

struct Place {
  size_t first, bytes;
};

struct Area {
  char* memory;
  bool closed = false;
};

// the same in every block of a launch
std::map<std::pair<int, size_t>, Place> places;
size_t static_bytes = 0, static_end = 0, dynamic_bytes = 0;
std::vector<Area> areas;
std::vector<char*> unused;

size_t rounded(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

size_t dynamic_first() {
  return kArea - rounded(dynamic_bytes, 128);
}

bool filled(const char* first, const char* end) {
  return std::all_of(first, end, [](char c) { return c == static_cast<char>(kFill); });
}

Area& area_of(const char* memory) {
  return *std::find_if(areas.begin(), areas.end(), [=](const Area& one) { return one.memory == memory; });
}

}  // namespace

void lay_out_shared(size_t dynamic) {
  places.clear();
  static_bytes = static_end = 0;
  dynamic_bytes = dynamic;
}

char* take_shared() {
  if (unused.empty()) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* all = mmap(nullptr, kArea + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* memory = static_cast<char*>(all) + page;
    if (all == MAP_FAILED || mprotect(memory, kArea, PROT_READ | PROT_WRITE) != 0) {
      std::abort();
    }
    std::memset(memory, kFill, kArea);
    areas.push_back({memory});  // kept for good
    unused.push_back(memory);
  }
  char* memory = unused.back();
  unused.pop_back();
  return memory;
}

void close_shared(char* memory, bool closed) {
  area_of(memory).closed = closed;
  if (mprotect(memory, kArea, closed ? PROT_NONE : PROT_READ | PROT_WRITE) != 0) {
    std::abort();
  }
}

bool intact_shared(const char* memory) {
  const char* dynamic = memory + dynamic_first();
  return filled(dynamic - kGap, dynamic) && filled(dynamic + dynamic_bytes, memory + kArea) &&
         std::all_of(places.begin(), places.end(), [=](const auto& one) {
           const char* end = memory + one.second.first + one.second.bytes;
           return filled(end, end + kGap);
         });
}

void give_shared(char* memory) {
  if (area_of(memory).closed) {
    close_shared(memory, false);
  }
  const size_t dynamic = dynamic_first();
  std::memset(memory, kFill, std::min(static_end, dynamic));
  std::memset(memory + dynamic - kGap, kFill, kArea - dynamic + kGap);
  unused.push_back(memory);
}

bool closed_shared(const void* at) {
  const auto* byte = static_cast<const char*>(at);
  return std::any_of(areas.begin(), areas.end(),
                     [=](const Area& one) { return one.closed && byte >= one.memory && byte < one.memory + kArea; });
}

void* shared(int site, size_t bytes) {
  auto [found, made] = places.try_emplace({site, bytes}, Place{static_end, bytes});
  if (made) {
    static_bytes += bytes;
    static_end += rounded(bytes + kGap, 16);
    if (static_bytes > kStaticMost || static_bytes + dynamic_bytes > kSharedMost || static_end > dynamic_first()) {
      fail(where(self()) + ": more shared memory than a block has");
    }
  }
  return self().home->shared + found->second.first;
}

void* dynamic_shared(size_t least) {
  if (least > dynamic_bytes) {
    fail(where(self()) + ": more dynamic shared memory than the launch asked for");
  }
  return self().home->shared + dynamic_first();
}

void in_shared(const void* at, size_t bytes) {
  const auto offset = static_cast<size_t>(static_cast<const char*>(at) - self().home->shared);
  const auto holds = [&](size_t first, size_t size) { return offset >= first && offset + bytes <= first + size; };
  const bool found = std::any_of(places.begin(), places.end(),
                                 [&](const auto& one) { return holds(one.second.first, one.second.bytes); });
  if (!found && !holds(dynamic_first(), dynamic_bytes)) {
    fail(where(self()) + ": not shared memory of its block");
  }
}

void* of_block(const void* mine, int rank) {
  Fiber& t = self();
  in_shared(mine, 1);
  const auto& blocks = t.home->cluster->blocks;
  if (rank < 0 || static_cast<size_t>(rank) >= blocks.size()) {
    fail(where(t) + ": no block " + std::to_string(rank) + " in its cluster");
  }
  const Block& other = *blocks[static_cast<size_t>(rank)];
  if (other.done == other.threads.size()) {
    fail(where(t) + ": shared memory of a block that has ended");
  }
  return other.shared + (static_cast<const char*>(mine) - t.home->shared);
}

}  // namespace dmtp::host
