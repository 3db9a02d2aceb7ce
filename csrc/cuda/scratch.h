#pragma once

#include <cstdint>

namespace dmtp::cuda {

// A call and its memory on the device: of `memory` nothing is read that the call did not write, the counters are 0
// between calls.
template <class Args>
struct Scratched {
  Args args;
  void* memory;
  int64_t bytes;
  int32_t* counters;
  int64_t count;
};

}  // namespace dmtp::cuda
