#include "block_attention.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "attention_keys.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// The keys of a slot in a tile, from the positions it sees.
void find_rows(const int64_t* positions, int count, Request::Span seen, int32_t* first, int32_t* last) {
  *first = static_cast<int32_t>(std::lower_bound(positions, positions + count, seen.begin) - positions);
  *last = std::max(*first, static_cast<int32_t>(std::lower_bound(positions, positions + count, seen.end) - positions));
}

template <class T>
bool finite(T x, float scale) {
  const float value = to_float(x) * scale;
  return value - value == 0;
}

// Values that some rows do not see may not be multiplied, not even by zero, unless they are finite. In copies of those
// that are not they are zero; where a row sees them its sum is not a number.
class Tainted {
 public:
  Tainted(KeyTile& tile, int64_t dim, char* copies) : tile_(tile), dim_(dim) {
    const int64_t bytes = bytes_of(tile.value_type);
    for (int i = 0; i < tile.count; ++i) {
      with_row_type(tile.value_type, [&]<class T>(const T*) {
        const auto* from = reinterpret_cast<const T*>(tile.value[i]);
        bool whole = true;
        for (int64_t d = 0; d < dim; ++d) {
          whole &= finite(from[d], tile.value_scale);
        }
        if (whole) {
          return;
        }
        auto* to = reinterpret_cast<T*>(copies + i * dim * bytes);
        for (int64_t d = 0; d < dim; ++d) {
          to[d] = finite(from[d], tile.value_scale) ? from[d] : T{};
        }
        original_.push_back({i, tile.value[i]});
        tile.value[i] = reinterpret_cast<const char*>(to);
      });
    }
  }

  void spread(const TileMath& math, int rows, const Partial& out) const {
    for (const auto& [i, row] : original_) {
      with_row_type(tile_.value_type, [&]<class T>(const T*) {
        for (int64_t d = 0; d < dim_; ++d) {
          if (finite(reinterpret_cast<const T*>(row)[d], tile_.value_scale)) {
            continue;
          }
          for (int r = 0; r < rows; ++r) {
            if (tile_.first[r] <= i && i < tile_.last[r]) {
              out.sums[r * math.sums_stride() + math.column(d)] = std::numeric_limits<float>::quiet_NaN();
            }
          }
        }
      });
    }
  }

 private:
  struct Row {
    int key;
    const char* value;
  };
  const KeyTile& tile_;
  int64_t dim_;
  std::vector<Row> original_;
};

// All of one call: units are the rows (slots times heads of a group, up to kMostRows) of one request and kv head.
class Attention {
 public:
  Attention(const BlockAttention& args, const TileMath& math, Scratch& scratch) : args_(args), math_(math) {
    batch_ = args.q.size[0];
    slots_ = args.q.size[1];
    kv_heads_ = args.k_cache.size[2];
    group_ = args.q.size[2] / kv_heads_;
    dim_ = args.q.size[3];
    blocks_ = (slots_ * group_ + kMostRows - 1) / kMostRows;
    units_ = batch_ * kv_heads_ * blocks_;
    rows_ = static_cast<int>(std::min<int64_t>(kMostRows, ceil_multiple(slots_ * group_, 16)));
    requests_.reserve(batch_);
    for (int64_t b = 0; b < batch_; ++b) {
      requests_.emplace_back(args, b);
    }
    const int64_t threads = args.parallel.threads;
    partials_ = std::max(threads, std::min(4 * threads, 2 * threads + units_));
    queries_ = scratch.take<char>(units_ * math.query_bytes());
    sums_ = scratch.take<float>((units_ + partials_) * rows_ * math.sums_stride());
    tops_ = scratch.take<float>((units_ + partials_) * rows_);
    totals_ = scratch.take<float>((units_ + partials_) * rows_);
    seen_ = scratch.fill<uint8_t>((units_ + partials_) * rows_, 0);
    worker_bytes_ = ceil_multiple(math.scratch_bytes() + math.keys() * dim_ * 4, 64);
    memory_ = scratch.take<char>(threads * worker_bytes_);
  }

  void run() {
    const ParallelFor& parallel = args_.parallel;
    parallel(units_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) {
        pack(u);
        clear(u);
      }
    });
    std::vector<int64_t> done(units_, 0);
    std::vector<Task> tasks;
    while (plan(done, tasks)) {
      std::atomic<int64_t> next = 0;
      parallel(std::min<int64_t>(parallel.threads, static_cast<int64_t>(tasks.size())), 1,
               [&](int64_t begin, int64_t end) {
                 math_.enter();
                 for (int64_t w = begin; w < end; ++w) {
                   for (int64_t t = next++; t < static_cast<int64_t>(tasks.size()); t = next++) {
                     work(tasks[t], w);
                   }
                 }
                 math_.leave();
               });
      for (const Task& task : tasks) {
        if (task.partial >= 0) {
          merge(task.unit, units_ + task.partial);
        }
      }
    }
    parallel(units_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) {
        finish(u);
      }
    });
  }

 private:
  struct Task {
    int64_t unit, first, count;  // items
    int64_t partial;             // where the result waits to be merged in order; negative: merged at once
  };

  // What to do next, for all threads. Every item is summed from nothing and items are merged in order, so what runs
  // together changes no bit.
  bool plan(std::vector<int64_t>& done, std::vector<Task>& tasks) const {
    constexpr int64_t kTogether = 8;
    tasks.clear();
    int64_t live = 0;
    for (int64_t u = 0; u < units_; ++u) {
      live += done[u] < requests_[u / (kv_heads_ * blocks_)].items();
    }
    const int64_t share = live == 0 ? 0 : (2 * args_.parallel.threads + live - 1) / live;
    int64_t partial = 0;
    for (int64_t u = 0; u < units_; ++u) {
      const int64_t left = requests_[u / (kv_heads_ * blocks_)].items() - done[u];
      if (left <= 0) {
        continue;
      }
      if (share == 1) {
        tasks.push_back({u, done[u], std::min(left, kTogether), -1});
        done[u] += std::min(left, kTogether);
      } else {
        for (int64_t i = 0; i < std::min(left, share); ++i) {
          tasks.push_back({u, done[u]++, 1, partial++});
        }
      }
    }
    return !tasks.empty();
  }

  Partial partial(int64_t at) const {
    return {tops_ + at * rows_, totals_ + at * rows_, sums_ + at * rows_ * math_.sums_stride()};
  }

  void clear(int64_t at) const {
    const Partial p = partial(at);
    std::fill_n(p.top, rows_, -kInfinity);
    std::fill_n(p.total, rows_, 0.0f);
    std::fill_n(p.sums, rows_ * math_.sums_stride(), 0.0f);
    std::fill_n(seen_ + at * rows_, rows_, 0);
  }

  int64_t request_of(int64_t unit) const { return unit / (kv_heads_ * blocks_); }
  int64_t head_of(int64_t unit) const { return unit / blocks_ % kv_heads_; }
  int64_t first_row(int64_t unit) const { return unit % blocks_ * kMostRows; }
  int rows_of(int64_t unit) const {
    return static_cast<int>(std::min<int64_t>(kMostRows, slots_ * group_ - first_row(unit)));
  }

  void pack(int64_t unit) const {
    const Tensor& q = args_.q;
    const char* rows[kMostRows];
    for (int r = 0; r < rows_of(unit); ++r) {
      const int64_t row = first_row(unit) + r, head = head_of(unit) * group_ + row % group_;
      rows[r] = static_cast<const char*>(q.data) +
                (request_of(unit) * q.stride[0] + row / group_ * q.stride[1] + head * q.stride[2]) * bytes_of(q.dtype);
    }
    math_.pack(rows, rows_of(unit), queries_ + unit * math_.query_bytes());
  }

  void work(const Task& task, int64_t worker) const {
    for (int64_t i = 0; i < task.count; ++i) {
      const int64_t at = units_ + (task.partial >= 0 ? task.partial : worker);
      clear(at);
      item(task.unit, task.first + i, at, memory_ + worker * worker_bytes_);
      if (task.partial < 0) {
        merge(task.unit, at);
      }
    }
  }

  void item(int64_t unit, int64_t number, int64_t at, char* memory) const {
    const int64_t b = request_of(unit);
    const Request& request = requests_[b];
    const Keys keys(args_, request, b, head_of(unit));
    const int64_t step = math_.keys();
    int64_t positions[kMostKeys];
    if (number < request.chunks()) {
      const int64_t begin = request.low + number * kChunk, end = std::min(begin + kChunk, request.context);
      KeyTile tile = keys.in_cache(begin, std::min(begin + step, end), positions);
      for (int64_t p = begin; p < end; p += step) {
        // a chunk later for the last tile: the worker goes on with that one, most likely
        const KeyTile next =
            keys.in_cache(std::min(p + step, request.context), std::min(p + 2 * step, request.context), positions);
        add(unit, tile, &next, at, memory);
        tile = next;
      }
      return;
    }
    int32_t first[kMostRows], last[kMostRows];
    const auto add_ragged = [&](KeyTile tile, auto seen_by) {
      for (int r = 0; r < rows_of(unit); ++r) {
        find_rows(positions, tile.count, seen_by((first_row(unit) + r) / group_), first + r, last + r);
      }
      tile.first = first;
      tile.last = last;
      const Tainted tainted(tile, dim_, memory + math_.scratch_bytes());
      add(unit, tile, nullptr, at, memory);
      tainted.spread(math_, rows_of(unit), partial(at));
    };
    for (int64_t p = request.edge; p < request.low; p += step) {
      add_ragged(keys.in_cache(p, std::min(p + step, request.low), positions),
                 [&](int64_t slot) { return request.context_of(slot); });
    }
    for (int64_t r = 0; r < request.block_length; r += step) {
      KeyTile tile = keys.in_block(r, std::min(r + step, request.block_length), positions);
      if (request.block_differs()) {
        add_ragged(tile, [&](int64_t slot) { return request.block_of(slot); });
      } else {
        add(unit, tile, nullptr, at, memory);
      }
    }
  }

  void add(int64_t unit, const KeyTile& tile, const KeyTile* next, int64_t at, char* memory) const {
    const int rows = rows_of(unit);
    bool any = false;
    for (int r = 0; r < rows; ++r) {
      const bool sees = tile.first != nullptr ? tile.first[r] < tile.last[r] : tile.count > 0;
      seen_[at * rows_ + r] |= sees;
      any |= sees;
    }
    if (any) {
      math_.add(tile, next, queries_ + unit * math_.query_bytes(), rows, memory, partial(at));
    }
  }

  // The two factors that bring sums with other tops together.
  struct Join {
    float top, left, right;

    Join(float a, float b) : top(b > a ? b : a) {
      const float shift = top == -kInfinity ? 0.0f : top;
      float factors[kLanes] = {a - shift, b - shift};
      exp_lanes(factors);
      left = factors[0];
      right = factors[1];
    }
  };

  void merge(int64_t unit, int64_t from) const {
    const Partial into = partial(unit), part = partial(from);
    const int64_t stride = math_.sums_stride();
    for (int r = 0; r < rows_of(unit); ++r) {
      if (!seen_[from * rows_ + r]) {
        continue;
      }
      seen_[unit * rows_ + r] = 1;
      const Join join(into.top[r], part.top[r]);
      const Floats left = Floats::all(join.left), right = Floats::all(join.right);
      for (int64_t d = r * stride; d < (r + 1) * stride; d += kLanes) {
        fma(Floats::load(into.sums + d), left, Floats::load(part.sums + d) * right).store(into.sums + d);
      }
      into.total[r] = into.total[r] * join.left + part.total[r] * join.right;
      into.top[r] = join.top;
    }
  }

  float sink_of(int64_t head) const {
    const Tensor& sink = args_.sink;
    if (!sink) {
      return -kInfinity;
    }
    if (sink.dtype == DType::f64) {
      return static_cast<float>(*sink.row<const double>(head));
    }
    return with_row_type(sink.dtype, [&]<class T>(const T*) { return to_float(*sink.row<const T>(head)); });
  }

  void finish(int64_t unit) const {
    const Partial sums = partial(unit);
    for (int r = 0; r < rows_of(unit); ++r) {
      const int64_t b = request_of(unit), row = first_row(unit) + r, slot = row / group_;
      const int64_t head = head_of(unit) * group_ + row % group_;
      const bool seen = seen_[unit * rows_ + r] != 0;
      const float sink = sink_of(head);
      const Join join(sums.top[r], sink);
      const float total = sums.total[r] * join.left + join.right;
      const float factor = join.left / total;
      auto* lse = static_cast<float*>(args_.lse.data) + b * args_.lse.stride[0] + slot * args_.lse.stride[1] +
                  head * args_.lse.stride[2];
      *lse = seen ? join.top + std::log(total) : -kInfinity;
      with_row_type(args_.out.dtype, [&]<class T>(const T*) {
        if constexpr (sizeof(T) > 1) {
          const Tensor& out = args_.out;
          T* to = static_cast<T*>(out.data) + b * out.stride[0] + slot * out.stride[1] + head * out.stride[2];
          const float* from = sums.sums + r * math_.sums_stride();
          for (int64_t d = 0; d < dim_; ++d) {
            to[d * out.stride[3]] = from_float<T>(seen ? from[math_.column(d)] * factor : 0.0f);
          }
        }
      });
    }
  }

  const BlockAttention& args_;
  const TileMath& math_;
  std::vector<Request> requests_;
  int64_t batch_, slots_, kv_heads_, group_, dim_, blocks_, units_, partials_, worker_bytes_;
  int rows_;
  char* queries_;
  float *sums_, *tops_, *totals_;
  uint8_t* seen_;
  char* memory_;
};

std::unique_ptr<TileMath> make_math(const BlockAttention& args) {
#ifdef __AMX_BF16__
  const auto narrow = [](DType t) { return t == DType::bf16 || t == DType::f8e4m3 || t == DType::f8e5m2; };
  if (args.q.dtype == DType::bf16 && narrow(args.k_cache.dtype) && narrow(args.v_cache.dtype)) {
    return make_tile_math(args);
  }
#endif
  return make_vector_math(args);
}

}  // namespace

void block_attention(const BlockAttention& args) {
  Scratch scratch;
  const std::unique_ptr<TileMath> math = make_math(args);
  Attention(args, *math, scratch).run();
}

}  // namespace dmtp::DMTP_CAPABILITY
