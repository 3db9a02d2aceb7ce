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

// What threads of a cluster, a block or a warp do together.
enum class Together : uint8_t { cluster_barrier, block_barrier, warp_barrier, shuffle, ballot, match, join };

// Where a call stands in the sources: the name by which a barrier is switched off.
struct Site {
  const char* file;
  int line;
};

struct Block;

struct Thread {
  Index index, block;
  int rank = 0;  // of the block in its cluster
  Block* home = nullptr;
};

extern Thread* current;  // that runs now
extern Index block_size, grid_size;

// Waits for all threads of the cluster, or of the block, that have not returned.
void cluster_barrier(Site);
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
// The block's dynamic memory, of which the launch has asked for `least` bytes or more.
void* dynamic_shared(size_t least);
// Ends the launch unless these bytes are a variable's of the block, or dynamic memory of it.
void in_shared(const void* at, size_t bytes);
// The same variable of another block of the cluster. There is no access before that block begins and after it ends.
void* of_block(const void* mine, int rank);
[[noreturn]] void misaligned(const void* at, size_t unit);
// Ends the launch unless the address is a multiple of `unit`.
inline void aligned(const void* at, size_t unit) {
  if (reinterpret_cast<uintptr_t>(at) % unit != 0) {
    misaligned(at, unit);
  }
}

extern bool recording;
void append_access(const void* at, size_t bytes, bool store);
// An access to global memory.
inline void record(const void* at, size_t bytes, bool store) {
  if (recording) {
    append_access(at, bytes, store);
  }
}

// Blocks that a device holds at once, one to three: from the seed.
int resident_blocks();
extern int processors;
// What a launch may ask for: blocks in one cluster, bytes of dynamic shared memory of a block.
struct Wish {
  int cluster = 1;
  int64_t dynamic = 0;
};
constexpr int kMostCluster = 8;
constexpr int64_t kSharedLimit = 227 << 10;
// Runs a grid. Null, or what went wrong: a deadlock, lanes that wait at different places, or an address outside.
const char* run(Index grid, Index block, bool cooperative, const std::function<void()>& thread, Wish = {});

}  // namespace dmtp::host

// For Python.
extern "C" {
void dmtp_host_seed(uint64_t seed);
// Switches off the barriers at "file.cu:line" from now on; null: none.
void dmtp_host_without(const char* site);
// The barriers that ran since the last call, as "file.cu:line" words.
const char* dmtp_host_barriers();
// Launches since the last seed.
uint64_t dmtp_host_launches();
// Multiprocessors that the device claims to have.
void dmtp_host_processors(int count);

// Of a thread, to global memory, as kernels that use load_global and the like make it.
struct Access {
  uint64_t address;
  uint32_t bytes, block, launch, store;  // launches count from 0, the first since the recording began
};
// Forgets what was recorded and begins, or stops.
void dmtp_host_record(int on);
// How many accesses were recorded, in the order in which they happened.
uint64_t dmtp_host_accesses(const Access** first);
}
