#include "mma.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/convert.cuh"

namespace dmtp::host {
namespace {

template <class Sum>
struct Operands {
  const uint32_t *a, *b;
  Sum* c;
};

// The rows of A and the columns of B, from the words that lanes have of them.
template <class Element>
struct Matrices {
  static constexpr int kDepth = 32 / sizeof(Element);
  Element a[16][kDepth], b[8][kDepth];

  template <class Sum>
  void gather(void* const* lanes, Sum*) {
    for (int lane = 0; lane < 32; ++lane) {
      const auto& own = *static_cast<const Operands<Sum>*>(lanes[lane]);
      const int g = lane / 4, byte = lane % 4 * 4;
      for (int i = 0; i < 4; ++i) {
        std::memcpy(reinterpret_cast<char*>(a[g + i % 2 * 8]) + byte + i / 2 * 16, own.a + i, 4);
      }
      for (int i = 0; i < 2; ++i) {
        std::memcpy(reinterpret_cast<char*>(b[g]) + byte + i * 16, own.b + i, 4);
      }
    }
  }
};

template <class Sum>
Sum& of_c(void* const* lanes, int row, int column) {
  const auto& lane = *static_cast<const Operands<Sum>*>(lanes[row % 8 * 4 + column / 2]);
  return lane.c[(row >= 8) * 2 + column % 2];
}

// x toward zero to a multiple of the unit.
double cut(double x, double unit) {
  return std::trunc(x / unit) * unit;
}

float sum_of(const double (&terms)[9]) {
  double greatest = 0, plain = 0;
  for (const double term : terms) {
    greatest = std::max(greatest, std::fabs(term));
    plain += term;
  }
  if (!std::isfinite(plain) || greatest == 0) {
    return static_cast<float>(plain);
  }
  const double unit = std::ldexp(1.0, std::max(std::ilogb(greatest) - 24, -149));
  double sum = 0;
  for (const double term : terms) {
    sum += cut(term, unit);
  }
  return static_cast<float>(sum == 0 ? 0 : cut(sum, std::ldexp(1.0, std::max(std::ilogb(sum) - 23, -149))));
}

template <float (*kWide)(uint16_t)>
void all_halves(void* const* lanes) {
  Matrices<uint16_t> m;
  m.gather(lanes, static_cast<float*>(nullptr));
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float& c = of_c<float>(lanes, row, column);
      for (int first = 0; first < 16; first += 8) {
        double terms[9] = {c};
        for (int k = 0; k < 8; ++k) {
          terms[k + 1] = static_cast<double>(kWide(m.a[row][first + k])) * kWide(m.b[column][first + k]);
        }
        c = sum_of(terms);
      }
    }
  }
}

void all_int8(void* const* lanes) {
  Matrices<int8_t> m;
  m.gather(lanes, static_cast<int32_t*>(nullptr));
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      uint32_t sum = 0;
      for (int k = 0; k < 32; ++k) {
        sum += static_cast<uint32_t>(m.a[row][k] * m.b[column][k]);
      }
      int32_t& c = of_c<int32_t>(lanes, row, column);
      c = static_cast<int32_t>(static_cast<uint32_t>(c) + sum);
    }
  }
}

struct Eighths {
  const uint16_t* row;
  uint32_t* r;
};

template <bool kTransposed>
void all_rows(void* const* lanes) {
  const auto element = [=](int matrix, int row, int column) -> uint32_t {
    return static_cast<const Eighths*>(lanes[8 * matrix + row])->row[column];
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int one = lane / 4, pair = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = kTransposed ? element(i, pair, one) : element(i, one, pair);
      const uint32_t high = kTransposed ? element(i, pair + 1, one) : element(i, one, pair + 1);
      static_cast<const Eighths*>(lanes[lane])->r[i] = low | high << 16;
    }
  }
}

}  // namespace

void mma(Half half, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Operands<float> mine{a, b, c};
  join(half == Half::bf16 ? all_halves<cuda::from_bf16> : all_halves<cuda::from_fp16>, &mine);
}

void mma(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Operands<int32_t> mine{a, b, c};
  join(all_int8, &mine);
}

void load_matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  aligned(row, 16);
  in_shared(row, 16);
  Eighths mine{static_cast<const uint16_t*>(row), r};
  join(transposed ? all_rows<true> : all_rows<false>, &mine);
}

}  // namespace dmtp::host
