#include <vector>

#include "fiber_state.h"

namespace dmtp::host {

bool recording = false;

namespace {

std::vector<Access> accesses;
uint32_t launch = 0;  // the next one's number

}  // namespace

void count_launch() {
  ++launch;
}

void append_access(const void* at, size_t bytes, bool store) {
  const Index& block = current->block;
  accesses.push_back({reinterpret_cast<uint64_t>(at), static_cast<uint32_t>(bytes),
                      block.x + grid_size.x * (block.y + grid_size.y * block.z), launch - 1, store});
}

}  // namespace dmtp::host

void dmtp_host_record(int on) {
  dmtp::host::recording = on != 0;
  if (on != 0) {
    dmtp::host::accesses.clear();
    dmtp::host::launch = 0;
  }
}

uint64_t dmtp_host_accesses(const Access** first) {
  *first = dmtp::host::accesses.data();
  return dmtp::host::accesses.size();
}
