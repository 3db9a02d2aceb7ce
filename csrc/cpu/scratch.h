#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace dmtp::DMTP_CAPABILITY {

// Scratch memory of one kernel call, kept by the calling thread for the next: a call allocates only what no call before
// it needed. One at a time per thread.
class Scratch {
 public:
  Scratch() {
    if (kept().size() > 1) {
      std::size_t total = 0;
      for (const Block& block : kept()) {
        total += block.size;
      }
      kept().clear();
      grow(total);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // `count` elements on a cache line of their own, content undefined.
  template <class T>
  T* take(int64_t count) {
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    if (kept().empty() || kept().back().size - used_ < bytes) {
      grow(bytes);
    }
    void* start = kept().back().data.get() + used_;
    used_ += bytes;
    return static_cast<T*>(start);
  }

  template <class T>
  T* fill(int64_t count, T value) {
    T* start = take<T>(count);
    for (int64_t i = 0; i < count; ++i) {
      start[i] = value;
    }
    return start;
  }

 private:
  static constexpr std::size_t kLine = 64, kLeast = 1 << 16;

  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  struct Block {
    std::unique_ptr<std::byte[], Free> data;
    std::size_t size;
  };

  static std::vector<Block>& kept() {
    thread_local std::vector<Block> blocks;
    return blocks;
  }

  void grow(std::size_t bytes) {
    const std::size_t size = bytes < kLeast ? kLeast : bytes;
    auto* data = static_cast<std::byte*>(std::aligned_alloc(kLine, size));
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    kept().push_back({std::unique_ptr<std::byte[], Free>(data), size});
    used_ = 0;
  }

  std::size_t used_ = 0;
};

}  // namespace dmtp::DMTP_CAPABILITY
