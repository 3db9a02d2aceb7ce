#pragma once

#include <cfloat>
#include <type_traits>

#include "dmtp/t1_prep.h"
#include "vector.h"

// The steps of T1 preparation that work on one row: norms, and what a residual does to an embedding.
namespace dmtp::DMTP_CAPABILITY {

constexpr int kCanonicalLanes = 256;
// f(float{}), f(Bf16{}) or f(Fp16{}).
template <class F>
void with_type(DType type, F f) {
  switch (type) {
    case DType::bf16:
      return f(Bf16{});
    case DType::f16:
      return f(Fp16{});
    default:
      return f(float{});
  }
}

inline bool finite(float x) {
  return std::fabs(x) <= FLT_MAX;
}

inline void store_part(const Floats& x, int64_t n, float* out) {
  float lanes[kLanes];
  x.store(lanes);
  std::memcpy(out, lanes, n * sizeof(float));
}

// The canonical dot of x with itself (dmtp_kernels/ops/lm_head/canonical.py).
inline float squares(const float* x, int64_t n) {
  constexpr int kVectors = kCanonicalLanes / kLanes;
  Floats lanes[kVectors];
  for (Floats& lane : lanes) {
    lane = Floats::zero();
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = i + kLanes <= n ? Floats::load(x + i) : load_part(x + i, n - i);
    Floats& lane = lanes[i / kLanes % kVectors];
    lane = lane + v * v;
  }
  float tree[kCanonicalLanes];
  for (int j = 0; j < kVectors; ++j) {
    lanes[j].store(tree + j * kLanes);
  }
  for (int width = kCanonicalLanes / 2; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) {
      tree[j] = tree[2 * j] + tree[2 * j + 1];
    }
  }
  return tree[0];
}

// Norms x[n] in place; whether its mean square is finite.
inline bool rms_norm(float* x, int64_t n, const Tensor& weight, float eps, float offset) {
  const float mean = squares(x, n) / static_cast<float>(n);
  const Floats inverse = Floats::all(1.0f / std::sqrt(mean + eps)), shift = Floats::all(offset);
  with_type(weight.dtype, [&](auto type) {
    const auto* w = weight.row<decltype(type)>(0);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      (Floats::load(x + i) * inverse * (Floats::load(w + i) + shift)).store(x + i);
    }
    if (i < n) {
      store_part(load_part(x + i, n - i) * inverse * (load_part(w + i, n - i) + shift), n - i, x + i);
    }
  });
  return finite(mean);
}

template <class T>
void widen(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = to_float(from[i]);
  }
}

// n elements times the factor, each step rounded to T; the very bits when there is nothing to round.
template <class From, class T>
void plain_row(const From* from, int64_t n, float factor, T* to) {
  if constexpr (std::is_same_v<From, T>) {
    if (factor == 1.0f) {
      std::memcpy(to, from, n * sizeof(T));
      return;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const T value = from_float<T>(to_float(from[i]));
    to[i] = factor == 1.0f ? value : from_float<T>(to_float(value) * factor);
  }
}

// `to` holds the plain embedding; a residual that is zero or not finite leaves its bits alone.
template <class T>
void add_residual(const float* delta, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) {
    const T whole = from_float<T>(to_float(to[i]) + delta[i]);
    to[i] = delta[i] != 0.0f && finite(delta[i]) ? whole : to[i];
  }
}

template <class T>
void replace(const float* delta, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = finite(delta[i]) ? from_float<T>(delta[i]) : to[i];
  }
}

template <class F, class T>
void add_to_folded(const F* folded, const float* delta, int64_t n, T1Fusion fusion, T* to) {
  for (int64_t i = 0; i < n; ++i) {
    const float whole = to_float(folded[i]) + delta[i];
    if (fusion == T1Fusion::replace) {
      to[i] = finite(delta[i]) ? from_float<T>(whole) : to[i];
    } else {
      const F kept = delta[i] != 0.0f && finite(delta[i]) ? from_float<F>(whole) : folded[i];
      if constexpr (std::is_same_v<F, T>) {
        to[i] = kept;
      } else {
        to[i] = from_float<T>(to_float(kept));
      }
    }
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
