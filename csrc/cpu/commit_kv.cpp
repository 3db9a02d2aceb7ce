#include "commit_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "commit_plan.h"
#include "vector.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int64_t kGrain = 1 << 16;  // bytes moved that are worth a thread: not measured
constexpr uint8_t kNan = 0x7f;       // of both fp8 formats

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 8;
    case DType::f32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}

// Round to nearest even, after saturation, to a format of this many fraction bits whose smallest normal number is
// 2^(1 - bias).
template <int kFraction, int kBias>
uint8_t to_fp8(float x, float most) {
  if (x != x) {
    return kNan;
  }
  x = std::clamp(x, -most, most);
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = (bits >> 24) & 0x80, magnitude = bits & 0x7fffffff;
  constexpr int kDrop = 23 - kFraction;
  uint32_t code;
  if (magnitude < static_cast<uint32_t>(128 - kBias) << 23) {
    // the sum's unit in the last place is the format's smallest number
    constexpr uint32_t kUnit = static_cast<uint32_t>(128 - kBias + kDrop) << 23;
    float unit, value;
    std::memcpy(&unit, &kUnit, sizeof unit);
    std::memcpy(&value, &magnitude, sizeof value);
    value += unit;
    std::memcpy(&code, &value, sizeof code);
    code -= kUnit;
  } else {
    const uint32_t half = (1u << (kDrop - 1)) - 1 + ((magnitude >> kDrop) & 1);
    code = (magnitude + half - (static_cast<uint32_t>(127 - kBias) << 23)) >> kDrop;
  }
  return static_cast<uint8_t>(sign | code);
}

template <class Wide, class T>
void widen(const void* from, Wide* to, int64_t n) {
  const auto* values = static_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == 8) {
      to[i] = static_cast<Wide>(values[i]);
    } else {
      to[i] = to_float(values[i]);
    }
  }
}

template <class Wide>
void read(DType dtype, const void* from, Wide* to, int64_t n) {
  switch (dtype) {
    case DType::f64:
      return widen<Wide, double>(from, to, n);
    case DType::f32:
      return widen<Wide, float>(from, to, n);
    case DType::f16:
      return widen<Wide, Fp16>(from, to, n);
    default:
      return widen<Wide, Bf16>(from, to, n);
  }
}

// double goes through float, as torch's conversions do
template <class T, class Wide>
void narrow(const Wide* from, void* to, int64_t n) {
  auto* values = static_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) {
    values[i] = from_float<T>(static_cast<float>(from[i]));
  }
}

template <int kFraction, int kBias, class Wide>
void narrow_fp8(const Wide* from, void* to, int64_t n, float most) {
  auto* codes = static_cast<uint8_t*>(to);
  for (int64_t i = 0; i < n; ++i) {
    // saturated first: what is beyond float must not become an infinity that was none
    codes[i] = to_fp8<kFraction, kBias>(
        static_cast<float>(std::clamp<Wide>(from[i], static_cast<Wide>(-most), static_cast<Wide>(most))), most);
  }
}

template <class Wide>
void write(DType dtype, const Wide* from, void* to, int64_t n) {
  switch (dtype) {
    case DType::f64:
      for (int64_t i = 0; i < n; ++i) {
        static_cast<double*>(to)[i] = from[i];
      }
      return;
    case DType::f32:
      return narrow<float>(from, to, n);
    case DType::f16:
      return narrow<Fp16>(from, to, n);
    case DType::bf16:
      return narrow<Bf16>(from, to, n);
    case DType::f8e4m3:
      return narrow_fp8<3, 7>(from, to, n, 448.0f);
    default:
      return narrow_fp8<2, 15>(from, to, n, 57344.0f);
  }
}

struct Rotation {
  const Tensor* table = nullptr;  // null: none
  int64_t position = 0;
};

// One head of one row, as it goes into the cache. `wide` has room for two.
template <class Wide>
void make_head(const CommitKV& args, const CommitLayer& layer, const void* from, void* to, int64_t b, int64_t h,
               Rotation rotation, Wide* wide) {
  const int64_t dim = layer.rows.size[3];
  read(layer.rows.dtype, from, wide, dim);
  Wide* other = wide + dim;
  if (layer.norm) {
    read(layer.norm.dtype, layer.norm.data, other, dim);
    Wide squares = 0;
    for (int64_t i = 0; i < dim; ++i) {
      squares += wide[i] * wide[i];
    }
    const Wide factor = 1 / std::sqrt(squares / static_cast<Wide>(dim) + static_cast<Wide>(args.norm_eps));
    for (int64_t i = 0; i < dim; ++i) {
      wide[i] = wide[i] * factor * (static_cast<Wide>(args.norm_offset) + other[i]);
    }
  }
  if (rotation.table != nullptr) {
    const int64_t rotary = rotation.table->size[1], half = rotary / 2;
    const auto* row = static_cast<const char*>(rotation.table->data) +
                      rotation.position * rotation.table->stride[0] * size_of(rotation.table->dtype);
    read(rotation.table->dtype, row, other, rotary);
    for (int64_t i = 0; i < half; ++i) {
      const Wide first = wide[i], second = wide[i + half], cos = other[i], sin = other[i + half];
      wide[i] = first * cos - second * sin;
      wide[i + half] = second * cos + first * sin;
    }
  }
  if (layer.scale) {
    const auto scale = static_cast<Wide>(
        static_cast<const float*>(layer.scale.data)[b * layer.scale.stride[0] + h * layer.scale.stride[1]]);
    for (int64_t i = 0; i < dim; ++i) {
      wide[i] /= scale;
    }
  }
  write(layer.cache.dtype, wide, to, dim);
}

// The elements [begin, end) that a tensor of rank 3 or 4 may touch, as addresses.
std::pair<uintptr_t, uintptr_t> span(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < 4; ++i) {
    last += (t.size[i] - 1) * t.stride[i];
  }
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  return {begin, begin + static_cast<uintptr_t>((last + 1) * size_of(t.dtype))};
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto [a_begin, a_end] = span(a);
  const auto [b_begin, b_end] = span(b);
  return a_begin < b_end && b_begin < a_end;
}

// The rows of one request in one layer.
class RowMover {
 public:
  RowMover(const CommitKV& args, const CommitPlan& plan, int64_t b, const CommitLayer& layer)
      : args_(args), plan_(plan), layer_(layer), b_(b) {
    const int64_t page_size = args.caches[layer.owner].page_size;
    const bool paged = page_size > 0;
    heads_ = layer.rows.size[2];
    from_bytes_ = size_of(layer.rows.dtype);
    to_bytes_ = size_of(layer.cache.dtype);
    head_bytes_ = layer.rows.size[3] * to_bytes_;
    page_ = layer.cache.stride[0] * to_bytes_;
    row_ = paged ? layer.cache.stride[1] * to_bytes_ : 0;
    head_ = layer.cache.stride[paged ? 2 : 1] * to_bytes_;
    page_size_ = paged ? page_size : 1;
    copied_ = layer.rows.dtype == layer.cache.dtype && !layer.norm && !layer.rotated && !layer.scale;
    wide_ = layer.rows.dtype == DType::f64 || layer.cache.dtype == DType::f64;
  }

  void run() {
    // the plan is in the calling thread's scratch
    thread_local std::vector<double> buffer;
    const int64_t bytes = heads_ * head_bytes_, wide = 2 * layer_.rows.size[3];
    const bool aliased = overlap(layer_.rows, layer_.cache);
    buffer.resize(std::max<size_t>(buffer.size(), wide + (aliased ? plan_.rows * bytes / 8 + 1 : 0)));
    wide_buffer_ = buffer.data();
    if (aliased) {
      // rows may lie where others of the request go: all are read first
      auto* kept = reinterpret_cast<char*>(wide_buffer_ + wide);
      for (int64_t j = 0; j < plan_.rows; ++j) {
        make(j, kept + j * bytes, head_bytes_);
      }
      promote();
      for (int64_t j = 0; j < plan_.rows; ++j) {
        if (slot(j) >= 0) {
          copy(kept + j * bytes, head_bytes_, address(slot(j)), head_);
        }
      }
      return;
    }
    promote();
    for (int64_t j = 0; j < plan_.rows; ++j) {
      make(j, slot(j) >= 0 ? address(slot(j)) : nullptr, head_);
    }
  }

 private:
  int64_t slot(int64_t j) const { return plan_.slot[b_ * plan_.rows + j]; }

  char* address(int64_t slot) const {
    return static_cast<char*>(layer_.cache.data) + slot / page_size_ * page_ + slot % page_size_ * row_;
  }

  void promote() const {
    if (plan_.target[b_] >= 0) {
      copy(address(plan_.source[b_]), head_, address(plan_.target[b_]), head_);
    }
  }

  void copy(const char* from, int64_t from_step, char* to, int64_t to_step) const {
    if (from_step == head_bytes_ && to_step == head_bytes_) {
      std::memmove(to, from, heads_ * head_bytes_);
      return;
    }
    for (int64_t h = 0; h < heads_; ++h) {
      std::memmove(to + h * to_step, from + h * from_step, head_bytes_);
    }
  }

  void make(int64_t j, char* to, int64_t to_step) const {
    if (slot(j) < 0) {
      return;
    }
    const Tensor& rows = layer_.rows;
    const auto* from = static_cast<const char*>(rows.data) + (b_ * rows.stride[0] + j * rows.stride[1]) * from_bytes_;
    if (copied_) {
      copy(from, rows.stride[2] * from_bytes_, to, to_step);
      return;
    }
    Rotation rotation;
    if (layer_.rotated) {
      const int64_t position = whole_at(args_.positions, b_ * args_.positions.stride[0] + j);
      rotation = {&args_.cos_sin, std::clamp<int64_t>(position, 0, args_.cos_sin.size[0] - 1)};
    }
    for (int64_t h = 0; h < heads_; ++h) {
      const auto* head = from + h * rows.stride[2] * from_bytes_;
      if (wide_) {
        make_head<double>(args_, layer_, head, to + h * to_step, b_, h, rotation, wide_buffer_);
      } else {
        make_head<float>(args_, layer_, head, to + h * to_step, b_, h, rotation,
                         reinterpret_cast<float*>(wide_buffer_));
      }
    }
  }

  const CommitKV& args_;
  const CommitPlan& plan_;
  const CommitLayer& layer_;
  int64_t b_, heads_, from_bytes_, to_bytes_, head_bytes_, page_, row_, head_, page_size_;
  bool copied_, wide_;
  double* wide_buffer_ = nullptr;
};

void choose_hidden(const CommitKV& args, const CommitPlan& plan, int64_t b) {
  const int64_t count = plan.count[b];
  if (count == 0) {
    return;
  }
  if (args.hidden) {
    const int64_t bytes = size_of(args.hidden.dtype);
    const auto* from = static_cast<const char*>(args.hidden.data) +
                       (b * args.hidden.stride[0] + (count - 1) * args.hidden.stride[1]) * bytes;
    auto* to = static_cast<char*>(args.next_hidden.data) + b * args.next_hidden.stride[0] * bytes;
    std::memmove(to, from, args.hidden.size[2] * bytes);
  }
  if (args.lengths) {
    const int64_t at = b * args.lengths.stride[0];
    if (args.lengths.dtype == DType::i64) {
      static_cast<int64_t*>(args.lengths.data)[at] += count;
    } else {
      static_cast<int32_t*>(args.lengths.data)[at] += static_cast<int32_t>(count);
    }
  }
}

}  // namespace

void commit_kv(const CommitKV& args) {
  Scratch scratch;
  const int64_t batch = args.error.size[0];
  for (int64_t b = 0; b < batch; ++b) {
    static_cast<int32_t*>(args.error.data)[b * args.error.stride[0]] = 0;
  }
  auto* plans = scratch.take<CommitPlan>(args.cache_count);
  for (int64_t c = 0; c < args.cache_count; ++c) {
    plans[c] = commit_plan(args, args.caches[c], scratch);
  }
  int64_t bytes = 1;  // of a request
  for (int64_t i = 0; i < args.count; ++i) {
    const Tensor& rows = args.layers[i].rows;
    bytes += rows.size[1] * rows.size[2] * rows.size[3] * size_of(rows.dtype);
  }
  const int64_t parts = args.count + 1;  // of a request: every kind of every layer, and its hidden
  args.parallel(batch * parts, std::max<int64_t>(1, kGrain * parts / bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / parts, part = i % parts;
      if (part == args.count) {
        choose_hidden(args, plans[0], b);
        continue;
      }
      const CommitLayer& layer = args.layers[part];
      if (plans[0].count[b] > 0 && args.caches[layer.owner].num_slots > 0 && layer.rows.size[2] > 0) {
        RowMover(args, plans[layer.owner], b, layer).run();
      }
    }
  });
}

}  // namespace dmtp::DMTP_CAPABILITY
