#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

// Blocks of GPU threads as fibers of one CPU thread, for tests of csrc/cuda. Fibers change only where threads may wait;
// which runs next is drawn from the seed.
namespace dmtp::host {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// What threads of a warp do together.
enum class Together : uint8_t { block_barrier, warp_barrier, shuffle, ballot, match, join };

// Where a call stands in the sources: the name by which a barrier is switched off.
struct Site {
  const char* file;
  int line;
};

struct Block;

struct Thread {
  Index index, block;
  Block* home = nullptr;
};

extern Thread* current;  // that runs now
extern Index block_size, grid_size;

// Waits for all threads of the block that have not returned.
void block_barrier(Site);
// Waits for the lanes of `mask`.
void warp_barrier(Site, uint32_t mask);
// Waits likewise; `value` of lane `from`, the lanes whose value is not 0, or those whose value is the caller's.
uint64_t together(Together, uint32_t mask, uint64_t value, int from);
// Waits for all 32 lanes; the last to come calls `all` with what each of them brings.
void join(void (*all)(void* const* lanes), void* mine);
// Whether the barrier, or the wait, at a site is switched off.
bool skipped(Site);
// A copy to shared memory, 16 bytes of which the first come from memory and the rest are zero. It lands at once, or
// when its thread waits for the group it was committed to, never before and never else.
void copy_async(void* to, const void* from, int bytes);
void commit_copies();
// Waits until no more than the last `groups` groups are on their way.
void wait_copies(Site, int groups);
// Lets others run, for loops that wait for them.
void pause();
// Before an atomic: others may come first.
void before_atomic();
// Memory of the block, full of garbage at first: the same for all of its threads that ask at one site.
void* shared(int site, size_t bytes);

// Blocks that a device holds at once, one to three: from the seed.
int resident_blocks();
// Runs a grid. Null, or what went wrong: a deadlock, lanes that wait at different places, or an address outside.
const char* run(Index grid, Index block, bool cooperative, const std::function<void()>& thread);

}  // namespace dmtp::host

// For Python.
extern "C" {
void dmtp_host_seed(uint64_t seed);
// Switches off the barriers at "file.cu:line" from now on; null: none.
void dmtp_host_without(const char* site);
// The barriers that ran since the last call, as "file.cu:line" words.
const char* dmtp_host_barriers();
// Launches and barriers that ran since the last call.
uint64_t dmtp_host_launches();
}
