#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "canonical.h"
#include "dmtp/lm_head.h"
#include "scratch.h"

// The passes over a vocabulary head. A screening pass scores blocks of rows (`Scorer`, one per format) and keeps of
// each state the k best lower ends and, per group of rows, the greatest upper end; a finishing pass takes the canonical
// dots of all rows of the groups that still count. Nothing has a capacity: when every row counts it is the full scan.

namespace dmtp::DMTP_CAPABILITY {

constexpr int kBlock = 32;  // rows scored at once
constexpr int kGroup = 4;   // rows per kept upper end; also the shortlists' unit, so not free to choose
constexpr int kBlockGroups = kBlock / kGroup;

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// fp32 copies of the hidden states.
struct States {
  int64_t count = 0, width = 0;
  int64_t stride = 0;             // floats from one state to the next
  const float* rows = nullptr;    // in the order of canonical.h
  const float* length = nullptr;  // ||h|| rounded up

  const float* row(int64_t i) const { return rows + i * stride; }
};

// `count` rows of `hidden` from row `first` on.
States make_states(const Tensor& hidden, int64_t first, int64_t count, Scratch&, const ParallelFor&);

// The states as fixed point, q = d0 + 256 d1 + 65536 d2 with signed digits (ops/lm_head/digits.py).
struct Digits {
  int64_t count = 0, width = 0;
  int64_t stride = 0;            // a multiple of 128 above the width
  const int8_t* rows = nullptr;  // [count, 3, stride], zeros behind the width
  const double* step = nullptr;  // [count], 2^e; NaN where the state cannot be screened

  const int8_t* row(int64_t i, int digit) const { return rows + (i * 3 + digit) * stride; }
};

Digits make_digits(const Tensor& hidden, int64_t first, int64_t count, Scratch&, const ParallelFor&);

// Bytes that are read next, fetched while the present ones are worked on.
struct Span {
  const char* begin = nullptr;
  int64_t bytes = 0;
};

class Ahead {
 public:
  // The whole span will have been asked for after `calls` calls of `step`: the more calls, the fewer lines at a time. A
  // burst of prefetches holds up the loads behind it (int8 rows of eight states on tiles: 64 % of the bandwidth with 32
  // lines at a time, 88 % with 4, medians on a machine under other load).
  Ahead(Span span, int64_t calls) : Ahead(span, calls, ceil_div(span.bytes, kLine * calls)) {}

  void step() {
    for (int64_t i = 0; i < lines_; ++i, at_ += stride_) {
      __builtin_prefetch(at_, 0, 2);
    }
  }

  // For kernels that know how many lines a step is: the span in so many prefetches, a line or a little more apart.
  static Ahead of_lines(Span span, int64_t prefetches) { return Ahead(span, prefetches, 1); }

  template <int lines>
  void step() {
    for (int i = 0; i < lines; ++i, at_ += stride_) {
      __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  Ahead(Span span, int64_t calls, int64_t lines)
      : at_(span.begin != nullptr ? span.begin : reinterpret_cast<const char*>(this)),
        lines_(lines),
        stride_(lines == 0 ? 0 : ceil_div(span.bytes, lines * calls)) {}

  static constexpr int64_t kLine = 64;
  const char* at_;
  int64_t lines_, stride_;
};

// Screen scores of blocks of rows, in one format, for a fixed set of states. Threads share it.
class Scorer {
 public:
  virtual ~Scorer() = default;

  // scores[s * kBlock + i] of rows first .. first + rows - 1 (rows <= kBlock), `first` a multiple of kBlock. The block
  // at `later` is fetched meanwhile; negative: none.
  virtual void score(int64_t first, int rows, int64_t later, int worker, float* scores) const = 0;

  // The radius of row v for a state of this length is bound[v] * reach.length + reach.extra: more than bounds.py says
  // where scores round more than it knows of.
  struct Reach {
    float length, extra;
  };
  virtual Reach reach(float length) const { return {length, 0.0f}; }

  // Bytes that one row brings from memory.
  virtual int64_t row_bytes() const = 0;

  // Called by a worker before its first and after its last block.
  virtual void enter() const {}
  virtual void leave() const {}
};

// Rows as the screens read them: a matrix of bytes.
struct ByteRows {
  const char* data;
  int64_t stride;  // bytes from one row to the next
  int64_t bytes;   // of one row
  int64_t count;

  const char* row(int64_t i) const { return data + i * stride; }

  Span block(int64_t first) const {
    if (first < 0 || stride != bytes) {
      return {};
    }
    const int64_t rows = count - first < kBlock ? count - first : kBlock;
    return {row(first), rows * bytes};
  }
};

ByteRows byte_rows(const Tensor& matrix, int64_t count);

// The scorer of `head` for the states in `hidden` rows first .. first + count - 1; its memory is of `scratch`.
std::unique_ptr<Scorer> make_scorer(const LMHead& head, const Tensor& hidden, const States& states, int64_t first,
                                    int workers, Scratch& scratch, const ParallelFor& parallel);

std::unique_ptr<Scorer> make_row_scale_scorer(const ByteRows& codes, const float* scale, const Digits&, int workers,
                                              Scratch&);
std::unique_ptr<Scorer> make_multiplier_scorer(const ByteRows& codes, const float* scale, const Digits&, int workers,
                                               Scratch&);
std::unique_ptr<Scorer> make_grouped_scorer(ScreenFormat format, const ByteRows& codes, const Tensor& scale,
                                            const Digits&, int workers, Scratch&);
std::unique_ptr<Scorer> make_dense_scorer(const Tensor& weight, int64_t count, const Tensor& hidden, int64_t first,
                                          const States&, int workers, Scratch&);
std::unique_ptr<Scorer> make_canonical_scorer(const Tensor& rows, int64_t count, const States&);

}  // namespace dmtp::DMTP_CAPABILITY
