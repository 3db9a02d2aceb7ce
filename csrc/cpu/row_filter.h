#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "exps.h"
#include "scratch.h"
#include "vector.h"

// Rows of logits: their largest entry, and which entries top-k and top-p leave.
namespace dmtp::DMTP_CAPABILITY {

inline double to_double(double x) {
  return x;
}
template <class T>
inline double to_double(T x) {
  return to_float(x);
}

template <class T>
using KeyOf = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;

// Orders like the logit; NaN counts as -inf, -0 as 0.
inline uint32_t key_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x == 0 ? 0.0f : x != x ? -kInfinity : x);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}
inline uint64_t key_of(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x == 0 ? 0.0 : x != x ? -static_cast<double>(kInfinity) : x);
  return bits >> 63 ? ~bits : bits | 0x8000000000000000;
}
template <class T>
inline uint32_t key_of(T x) {
  return key_of(to_float(x));
}

struct RowTop {
  double value;  // -inf where nothing is above it
  bool has_nan;
};

template <class T>
inline RowTop top_of(const T* x, int64_t n) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  Wide top[kLanes];
  uint8_t nan[kLanes] = {};
  std::fill(top, top + kLanes, -std::numeric_limits<Wide>::infinity());
  const auto take = [&](int lane, Wide value) {
    nan[lane] |= value != value;
    top[lane] = value > top[lane] ? value : top[lane];
  };
  int64_t i = 0;
  if constexpr (std::is_same_v<T, double>) {
    for (; i + kLanes <= n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        take(lane, x[i + lane]);
      }
    }
  } else {
    for (; i + kLanes <= n; i += kLanes) {
      float values[kLanes];
      Floats::load(x + i).store(values);
      for (int lane = 0; lane < kLanes; ++lane) {
        take(lane, values[lane]);
      }
    }
  }
  for (; i < n; ++i) {
    take(0, static_cast<Wide>(to_double(x[i])));
  }
  RowTop out{-std::numeric_limits<double>::infinity(), false};
  for (int lane = 0; lane < kLanes; ++lane) {
    out.value = std::max<double>(out.value, top[lane]);
    out.has_nan |= nan[lane] != 0;
  }
  return out;
}

template <class T>
inline int64_t first_equal(const T* x, int64_t n, double value) {
  int64_t i = 0;
  while (i < n && to_double(x[i]) != value) {
    ++i;
  }
  return i;
}

// (x - top) / temperature of entries [0, n), -inf for NaN; `top` is finite and the temperature positive.
template <class T>
inline void weights(const T* x, int64_t n, double top, double temperature, double* out) {
  for (int64_t i = 0; i < n; ++i) {
    const double below = to_double(x[i]) - top;
    out[i] = below == 0 ? 0.0 : below < 0 ? below / temperature : -static_cast<double>(kInfinity);
  }
}

// The last entry, in order of falling key and rising id, that a filter keeps.
template <class Key>
struct Cut {
  Key key = 0;
  int64_t id = std::numeric_limits<int64_t>::max();

  template <class T>
  bool keeps(T x, int64_t i) const {
    const Key k = key_of(x);
    return k > key || (k == key && i <= id);
  }
};

// Room for the search of one row's cut.
template <class Key>
struct CutRoom {
  Key* key;
  double* exp;
  int64_t* mass;
  int32_t* list;

  CutRoom(Scratch& scratch, int64_t n)
      : key(scratch.take<Key>(n)),
        exp(scratch.take<double>(n)),
        mass(scratch.take<int64_t>(n)),
        list(scratch.take<int32_t>(n)) {}
};

// The least prefix of the ranking whose `amount` reaches `target`, which lies in 1..sum. `amount(id)` is not negative.
template <class Key, class Amount>
inline Cut<Key> least_prefix(const Key* key, int64_t n, int64_t target, Amount amount, int32_t* list) {
  constexpr int kBits = 8, kBins = 1 << kBits;
  int64_t bins[kBins], listed = n;
  for (int shift = 8 * sizeof(Key) - kBits; shift >= 0; shift -= kBits) {
    const bool whole = shift == static_cast<int>(8 * sizeof(Key)) - kBits;
    std::fill(bins, bins + kBins, 0);
    for (int64_t i = 0; i < listed; ++i) {
      const int64_t id = whole ? i : list[i];
      bins[(key[id] >> shift) & (kBins - 1)] += amount(id);
    }
    int bin = kBins - 1;
    while (bin > 0 && bins[bin] < target) {
      target -= bins[bin--];
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < listed; ++i) {
      const int64_t id = whole ? i : list[i];
      list[kept] = static_cast<int32_t>(id);
      kept += ((key[id] >> shift) & (kBins - 1)) == static_cast<Key>(bin);
    }
    listed = kept;
  }
  int64_t at = 0;
  while (at + 1 < listed && amount(list[at]) < target) {
    target -= amount(list[at++]);
  }
  return {key[list[at]], list[at]};
}

// Units of the integer masses of top-p: dmtp_kernels/ops/sample/filters.py.
inline double mass_unit(int64_t n) {
  return std::ldexp(1.0, static_cast<int>(std::min<int64_t>(52, 62 - std::bit_width(static_cast<uint64_t>(n - 1)))));
}

inline bool filters(int64_t n, int64_t top_k, double top_p) {
  return (top_k > 0 && top_k < n) || top_p < 1;
}

// What top_k (<= 0 or >= n: off) and top_p (>= 1: off) keep of a row; `weight` as of `weights`.
template <class T>
inline Cut<KeyOf<T>> cut_of(const T* x, const double* weight, int64_t n, int64_t top_k, double top_p,
                            const CutRoom<KeyOf<T>>& room) {
  Cut<KeyOf<T>> cut;
  const bool by_count = top_k > 0 && top_k < n, by_mass = !(top_p >= 1);
  const auto* key = room.key;
  for (int64_t i = 0; i < n; ++i) {
    room.key[i] = key_of(x[i]);
  }
  if (by_count) {
    cut = least_prefix(key, n, top_k, [](int64_t) { return int64_t{1}; }, room.list);
  }
  if (by_mass) {
    exps(weight, n, room.exp);
    const double unit = mass_unit(n);
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool kept = key[i] > cut.key || (key[i] == cut.key && i <= cut.id);
      room.mass[i] = kept ? static_cast<int64_t>(room.exp[i] * unit + 0.5) : 0;
      total += room.mass[i];
    }
    const double share = std::ceil(std::max(top_p, 0.0) * static_cast<double>(total));
    const int64_t target = std::clamp<int64_t>(static_cast<int64_t>(share), 1, total);
    cut = least_prefix(key, n, target, [&](int64_t i) { return room.mass[i]; }, room.list);
  }
  return cut;
}

}  // namespace dmtp::DMTP_CAPABILITY
