#include "lm_head_scorer.h"
#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// Rows as they are, products and sums in fp32 in whatever order is fastest.
template <class T>
struct DenseScorer final : Scorer {
  Tensor weight;
  ByteRows rows;
  States states;

  DenseScorer(const Tensor& weight, int64_t count, const States& states)
      : weight(weight), rows(byte_rows(weight, count)), states(states) {}

  int64_t row_bytes() const override { return rows.bytes + 4; }

#ifdef __AVX512BW__

  static constexpr int kLines = kPair * sizeof(T) / 64;  // of cache that one step reads of a row

  void score(int64_t first, int count, int64_t later, int, float* scores) const override {
    const int64_t n = states.count;
    Ahead ahead = Ahead::of_lines(rows.block(later), ceil_div(n, 8) * ceil_div(states.width, kPair) * kLines * kBlock);
    int64_t s = 0;
    for (; s + 8 <= n; s += 8) {
      add_states<8, 2>(first, count, s, ahead, scores);
    }
    if (n - s >= 4) {
      add_states<4, 4>(first, count, s, ahead, scores);
      s += 4;
    }
    if (n - s >= 2) {
      add_states<2, 4>(first, count, s, ahead, scores);
      s += 2;
    }
    if (n - s >= 1) {
      add_states<1, 4>(first, count, s, ahead, scores);
    }
  }

  // In parts of the columns whose states stay in the first-level cache.
  template <int S, int R>
  void add_states(int64_t first, int count, int64_t s, Ahead& ahead, float* scores) const {
    constexpr int64_t kPart = 4096 / S;
    __m512 sums[kBlock][S];
    for (int64_t begin = 0; begin < states.width; begin += kPart) {
      const int64_t end = begin + kPart < states.width ? begin + kPart : states.width;
      int r = 0;
      for (; r + R <= count; r += R) {
        add<S, R>(weight.row<const T>(first + r), s, begin, end, ahead, sums + r);
      }
      for (; r < count; ++r) {
        add<S, 1>(weight.row<const T>(first + r), s, begin, end, ahead, sums + r);
      }
    }
    for (int r = 0; r < count; ++r) {
      for (int i = 0; i < S; ++i) {
        scores[(s + i) * kBlock + r] = _mm512_reduce_add_ps(sums[r][i]);
      }
    }
  }

  template <int S, int R>
  void add(const T* row, int64_t s, int64_t begin, int64_t end, Ahead& ahead, __m512 (*sums)[S]) const {
    const float* state = states.row(s);
    __m512 acc[R][S];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < S; ++j) {
        acc[r][j] = begin == 0 ? _mm512_setzero_ps() : sums[r][j];
      }
    }
    const auto step = [&](int64_t i, int64_t left) __attribute__((always_inline)) {
      ahead.template step<R * kLines>();
      Pair w[R];
      for (int r = 0; r < R; ++r) {
        const T* p = row + r * weight.stride[0] + i;
        w[r] = left < kPair ? load_pair(p, left) : load_pair(p);
      }
      for (int j = 0; j < S; ++j) {
        const float* h = state + j * states.stride + i;
        const __m512 even = held(_mm512_loadu_ps(h)), odd = held(_mm512_loadu_ps(h + 16));
        for (int r = 0; r < R; ++r) {
          acc[r][j] = _mm512_fmadd_ps(w[r].even, even, acc[r][j]);
          acc[r][j] = _mm512_fmadd_ps(w[r].odd, odd, acc[r][j]);
        }
      }
    };
    int64_t i = begin;
    for (; i + kPair <= end; i += kPair) {
      step(i, kPair);
    }
    if (i < end) {
      step(i, end - i);
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < S; ++j) {
        sums[r][j] = acc[r][j];
      }
    }
  }

#else

  void score(int64_t first, int count, int64_t, int, float* scores) const override {
    constexpr int kPart = 32;
    for (int r = 0; r < count; ++r) {
      const T* row = weight.row<const T>(first + r);
      for (int64_t s = 0; s < states.count; ++s) {
        const float* h = states.row(s);
        alignas(64) float part[kPart] = {};
        int64_t i = 0;
        for (; i + kPart <= states.width; i += kPart) {
          for (int j = 0; j < kPart; ++j) {
            part[j] += h[i + j] * to_float(row[i + j]);
          }
        }
        float sum = 0.0f;
        for (; i < states.width; ++i) {
          sum += h[i] * to_float(row[i]);
        }
        for (const float p : part) {
          sum += p;
        }
        scores[s * kBlock + r] = sum;
      }
    }
  }

#endif
};

// The scores of a float low-rank factor are canonical dots, so that its shortlists are the same everywhere.
template <class T>
struct CanonicalScorer final : Scorer {
  Tensor matrix;
  ByteRows rows;
  States states;

  CanonicalScorer(const Tensor& matrix, int64_t count, const States& states)
      : matrix(matrix), rows(byte_rows(matrix, count)), states(states) {}

  int64_t row_bytes() const override { return rows.bytes; }

  void score(int64_t first, int count, int64_t later, int, float* scores) const override {
    Ahead ahead(rows.block(later), states.count * kBlock);
    for (int r = 0; r < count; ++r) {
      for (int64_t s = 0; s < states.count; ++s) {
        ahead.step();
        scores[s * kBlock + r] = canonical_dot(states.row(s), matrix.row<const T>(first + r), states.width);
      }
    }
  }
};

}  // namespace

std::unique_ptr<Scorer> make_dense_scorer(const Tensor& weight, int64_t count, const Tensor& hidden, int64_t first,
                                          const States& states, int workers, Scratch& scratch) {
#ifdef __AMX_BF16__
  if (weight.dtype == DType::bf16 && hidden.dtype == DType::bf16) {
    return make_dense_tiles(byte_rows(weight, count), hidden, first, states.count, workers, scratch);
  }
#else
  (void)hidden, (void)first, (void)workers, (void)scratch;
#endif
  return with_float_type(weight.dtype, [&]<class T>(const T*) -> std::unique_ptr<Scorer> {
    return std::make_unique<DenseScorer<T>>(weight, count, states);
  });
}

std::unique_ptr<Scorer> make_canonical_scorer(const Tensor& rows, int64_t count, const States& states) {
  return with_float_type(rows.dtype, [&]<class T>(const T*) -> std::unique_ptr<Scorer> {
    return std::make_unique<CanonicalScorer<T>>(rows, count, states);
  });
}

}  // namespace dmtp::DMTP_CAPABILITY
