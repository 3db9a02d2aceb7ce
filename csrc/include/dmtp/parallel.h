#pragma once

#include <cstdint>

namespace dmtp {

using RangeBody = void (*)(int64_t begin, int64_t end, void* context);

// The framework's threads: runs the body over parts of [0, n) that are `grain` long or longer, and waits for all of
// them.
struct ParallelFor {
  void (*run)(int64_t n, int64_t grain, RangeBody body, void* context);
  int threads;

  // `body(begin, end)`; it must not throw.
  template <class Body>
  void operator()(int64_t n, int64_t grain, Body body) const {
    run(n, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<Body*>(context))(begin, end); }, &body);
  }
};

}  // namespace dmtp
