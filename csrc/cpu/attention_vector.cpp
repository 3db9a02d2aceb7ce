#include <algorithm>

#include "attention_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// Rows and vectors of sums that stay in registers.
#if defined(__AVX512F__)
constexpr int kBlockRows = 6, kBlockVectors = 4;
#elif defined(__AVX2__)
constexpr int kBlockRows = 2, kBlockVectors = 2;
#else
constexpr int kBlockRows = 2, kBlockVectors = 1;
#endif

// c[m, n] (+)= a[m, k] b[k, n], n a multiple of 16. Every sum is one chain over k from zero, whatever the block it is
// in: what is there is added last, or thousands of keys would make one chain.
struct Product {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride, depth;
  bool add;

  template <int R, int N>
  void block(int64_t m, int64_t n) const {
    Floats sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        sums[r][i] = Floats::zero();
      }
    }
    for (int64_t k = 0; k < depth; ++k) {
      Floats right[N];
      for (int i = 0; i < N; ++i) {
        right[i] = Floats::load(b + k * b_stride + n + i * kLanes);
      }
      for (int r = 0; r < R; ++r) {
        const Floats left = Floats::all(a[(m + r) * a_stride + k]);
        for (int i = 0; i < N; ++i) {
          sums[r][i] = fma(left, right[i], sums[r][i]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        float* to = c + (m + r) * c_stride + n + i * kLanes;
        (add ? Floats::load(to) + sums[r][i] : sums[r][i]).store(to);
      }
    }
  }

  template <int N>
  void rows(int64_t n, int64_t count) const {
    int64_t m = 0;
    for (; m + kBlockRows <= count; m += kBlockRows) {
      block<kBlockRows, N>(m, n);
    }
    for (; m < count; ++m) {
      block<1, N>(m, n);
    }
  }

  void operator()(int64_t rows_count, int64_t columns) const {
    int64_t n = 0;
    for (; n + kBlockVectors * kLanes <= columns; n += kBlockVectors * kLanes) {
      rows<kBlockVectors>(n, rows_count);
    }
    for (; n < columns; n += kLanes) {
      rows<1>(n, rows_count);
    }
  }
};

struct VectorMath final : TileMath {
  static constexpr int kKeys = 64;

  int64_t dim, stride;  // elements of a row, and rounded up
  DType type;           // of the queries
  float scale, cap;

  explicit VectorMath(const BlockAttention& args)
      : dim(args.q.size[3]),
        stride(ceil_multiple(dim, kLanes)),
        type(args.q.dtype),
        scale(args.scale),
        cap(args.soft_cap) {}

  int64_t sums_stride() const override { return stride; }
  int keys() const override { return kKeys; }
  int64_t query_bytes() const override { return kMostRows * stride * 4; }

  void pack(const char* const* rows, int count, char* packed) const override {
    for (int r = 0; r < count; ++r) {
      widen(rows[r], type, dim, reinterpret_cast<float*>(packed) + r * stride);
    }
  }

  int64_t scratch_bytes() const override { return (2 * kKeys * stride + kMostRows * kKeys + kLanes * stride) * 4; }

  void add(const KeyTile& tile, const KeyTile*, const char* packed, int rows, char* scratch,
           const Partial& out) const override {
    auto* keys = reinterpret_cast<float*>(scratch);  // [dim, kKeys]
    float* values = keys + kKeys * stride;           // [count, stride]
    float* weights = values + kKeys * stride;        // [rows, kKeys]
    const int columns = static_cast<int>(ceil_multiple(tile.count, kLanes));
    load_keys(tile, keys, weights + kMostRows * kKeys);
    for (int i = 0; i < tile.count; ++i) {
      widen(tile.value[i], tile.value_type, dim, values + i * stride);
    }
    Product{reinterpret_cast<const float*>(packed), stride, keys, kKeys, weights, kKeys, dim, false}(rows, columns);
    for (int r = 0; r < rows; ++r) {
      weigh(tile, r, columns, weights + r * kKeys, out);
    }
    Product{weights, kKeys, values, stride, out.sums, stride, tile.count, true}(rows, stride);
  }

  // Keys as columns, so that lanes are keys.
  void load_keys(const KeyTile& tile, float* keys, float* spare) const {
    for (int first = 0; first < tile.count; first += kLanes) {
      const int count = std::min(kLanes, tile.count - first);
      for (int i = 0; i < kLanes; ++i) {
        if (i < count) {
          widen(tile.key[first + i], tile.key_type, dim, spare + i * stride);
        } else {
          std::fill_n(spare + i * stride, dim, 0.0f);
        }
      }
      for (int64_t d = 0; d < dim; ++d) {
        for (int i = 0; i < kLanes; ++i) {
          keys[d * kKeys + first + i] = spare[i * stride + d];
        }
      }
    }
  }

  // Scores to exp(score - top), with a new top where there is a greater one.
  void weigh(const KeyTile& tile, int r, int columns, float* x, const Partial& out) const {
    const int first = tile.first ? tile.first[r] : 0, last = tile.last ? tile.last[r] : tile.count;
    const float factor = scale * tile.key_scale;
    for (int i = 0; i < columns; i += kLanes) {
      (Floats::load(x + i) * Floats::all(factor)).store(x + i);
      if (cap != 0) {
        cap_lanes(x + i, cap);
      }
    }
    float top = out.top[r];
    for (int i = first; i < last; ++i) {
      top = x[i] > top ? x[i] : top;
    }
    const float shift = top == -kInfinity ? 0.0f : top;
    for (int i = 0; i < columns; i += kLanes) {
      (Floats::load(x + i) + Floats::all(-shift)).store(x + i);
      exp_lanes(x + i);
    }
    const auto clear = [&] {
      std::fill(x, x + std::min(first, columns), 0.0f);
      std::fill(x + std::max(last, 0), x + columns, 0.0f);
    };
    clear();
    Floats sums = Floats::zero();
    for (int i = 0; i < columns; i += kLanes) {
      const Floats weight = Floats::load(x + i);
      sums = sums + weight;
      (weight * Floats::all(tile.value_scale)).store(x + i);
    }
    clear();  // a scale that is not finite says nothing of keys that are not seen
    alignas(64) float decay[kLanes] = {out.top[r] - shift};
    exp_lanes(decay);
    out.total[r] = out.total[r] * decay[0] + sum(sums);
    out.top[r] = top;
    if (decay[0] != 1.0f) {
      float* row = out.sums + r * stride;
      for (int64_t d = 0; d < stride; d += kLanes) {
        (Floats::load(row + d) * Floats::all(decay[0])).store(row + d);
      }
    }
  }
};

}  // namespace

std::unique_ptr<TileMath> make_vector_math(const BlockAttention& args) {
  return std::make_unique<VectorMath>(args);
}

}  // namespace dmtp::DMTP_CAPABILITY
