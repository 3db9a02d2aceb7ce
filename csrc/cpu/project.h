#pragma once

#include "vector.h"

namespace dmtp::DMTP_CAPABILITY {

// Matrix rows and vectors whose sums one pass keeps in registers.
#if defined(__AVX512F__)
constexpr int kBlockRows = 4, kBlockVectors = 4;
#elif defined(__AVX2__)
constexpr int kBlockRows = 2, kBlockVectors = 2;
#else
constexpr int kBlockRows = 2, kBlockVectors = 1;
#endif

// Bytes of each row fetched ahead, across the end of the tile: without it one thread reads 16 % slower (24 matrices of
// 2048 x 4096 bf16 in turn, Sapphire Rapids; 512 and 2048 are between).
constexpr int64_t kAheadBytes = 1024;

template <class W>
struct Projection {
  const W* matrix;
  int64_t row_stride;
  int64_t depth;   // columns of the matrix
  const float* x;  // vectors of `depth`, padded to whole vectors
  int64_t x_stride;
  float* out;  // out[i * out_stride + row] = matrix[row] . x[i]
  int64_t out_stride;

  // Every result has one chain of 16-lane sums in ascending order, whatever the tile it is computed in.
  template <int R, int N, bool Fetch>
  void tile(int64_t row, int64_t vector) const {
    constexpr int64_t kAhead = kAheadBytes / sizeof(W);
    const W* w = matrix + row * row_stride;
    const float* v = x + vector * x_stride;
    Floats sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) {
        sums[r][n] = Floats::zero();
      }
    }
    const int64_t whole = depth / kLanes * kLanes;
    for (int64_t k = 0; k < whole; k += kLanes) {
      if (Fetch) {
        const W* ahead = k + kAhead < depth ? w + k + kAhead : w + R * row_stride + (k + kAhead - depth);
        for (int r = 0; r < R; ++r) {
          __builtin_prefetch(ahead + r * row_stride);
        }
      }
      Floats right[N];
      for (int n = 0; n < N; ++n) {
        right[n] = Floats::load(v + n * x_stride + k);
      }
      for (int r = 0; r < R; ++r) {
        const Floats left = Floats::load(w + r * row_stride + k);
        for (int n = 0; n < N; ++n) {
          sums[r][n] = fma(left, right[n], sums[r][n]);
        }
      }
    }
    if (whole < depth) {
      for (int r = 0; r < R; ++r) {
        const Floats left = load_part(w + r * row_stride + whole, depth - whole);
        for (int n = 0; n < N; ++n) {
          sums[r][n] = fma(left, Floats::load(v + n * x_stride + whole), sums[r][n]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) {
        out[(vector + n) * out_stride + row + r] = sum(sums[r][n]);
      }
    }
  }

  template <int R>
  void rows(int64_t row, int64_t batch) const {
    int64_t i = 0;
    if (batch >= kBlockVectors) {
      tile<R, kBlockVectors, true>(row, 0);
      for (i = kBlockVectors; i + kBlockVectors <= batch; i += kBlockVectors) {
        tile<R, kBlockVectors, false>(row, i);
      }
    } else if (batch > 0) {
      tile<R, 1, true>(row, 0);
      i = 1;
    }
    for (; i < batch; ++i) {
      tile<R, 1, false>(row, i);
    }
  }

  // Rows [begin, end) with `batch` vectors; each row is read from memory once.
  void operator()(int64_t begin, int64_t end, int64_t batch) const {
    int64_t row = begin;
    for (; row + kBlockRows <= end; row += kBlockRows) {
      rows<kBlockRows>(row, batch);
    }
    for (; row < end; ++row) {
      rows<1>(row, batch);
    }
  }
};

}  // namespace dmtp::DMTP_CAPABILITY
