#include "philox.h"
#include "row_filter.h"
#include "sample.h"
#include "scalars.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

enum Status : int32_t { kNanIgnored = 1, kNothingToChoose = 2, kBadParameter = 4 };
constexpr int64_t kGrain = 1 << 14;  // entries that are worth a thread: not measured

// No winner scores less: the largest entry has weight 0 and the largest exponential is 33 log 2.
constexpr float kLeastScore = -3.2f;
// What the errors of fp32 weights above -26 and of gumbel_bound stay below.
constexpr float kMargin = 1e-3f;

// Logits minus the largest of 64 entries, -inf behind the end.
template <class T>
void differences(const T* x, int64_t n, double top, float* out) {
  int64_t i = 0;
  if constexpr (!std::is_same_v<T, double>) {
    const Floats down = Floats::all(static_cast<float>(-top));
    for (; i + kLanes <= n; i += kLanes) {
      (Floats::load(x + i) + down).store(out + i);
    }
  }
  for (; i < n; ++i) {
    out[i] = static_cast<float>(to_double(x[i]) - top);
  }
  std::fill(out + i, out + kDraws, -kInfinity);
}

// argmax of (x - top) / temperature - log E over what the cut keeps. fp32 bounds rule out all entries but a few, which
// float64 decides.
template <class T>
int64_t race(const T* x, int64_t n, double top, double temperature, const DrawKey& draw, const Cut<KeyOf<T>>& cut) {
  const bool screened = temperature > 1e-30 && temperature < 1e30;
  const float scale = screened ? static_cast<float>(1 / temperature) : 0.0f;
  double best = -std::numeric_limits<double>::infinity();
  float bar = kLeastScore - kMargin;
  int64_t winner = -1;
  uint32_t words[kDraws];
  float bound[kDraws];
  for (int64_t from = 0; from < n; from += kDraws) {
    const int64_t count = std::min<int64_t>(kDraws, n - from);
    philox_block(draw, from, words);
    differences(x + from, count, top, bound);
    uint32_t any = 0;
    for (int i = 0; i < kDraws; ++i) {
      bound[i] = screened ? bound[i] * scale + gumbel_bound(words[i]) : kInfinity;
      any |= bound[i] >= bar;
    }
    for (int64_t i = 0; any && i < count; ++i) {
      if (!(bound[i] >= bar) || !cut.keeps(x[from + i], from + i)) {
        continue;
      }
      const double below = to_double(x[from + i]) - top;
      const double score = (below == 0 ? 0.0 : below / temperature) + gumbel_of(words[i]);
      if (score > best) {
        best = score;
        winner = from + i;
        bar = std::max(bar, static_cast<float>(best) - kMargin);
      }
    }
  }
  return winner;
}

template <class T>
void one_row(const SampleRows& args, int64_t row) {
  const T* x = args.logits.row<const T>(row);
  const int64_t n = args.num_valid;
  const double temperature = float_at(args.temperature, row);
  const double top_p = args.top_p ? float_at(args.top_p, row) : 1.0;
  const bool greedy = temperature == 0;
  const bool bad = !(temperature >= 0) || std::isinf(temperature) || (top_p != top_p && !greedy);
  const RowTop top = top_of(x, n);
  const bool empty = top.value == -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  if (!empty && !bad) {
    if (greedy || std::isinf(top.value)) {
      token = first_equal(x, n, top.value);
    } else {
      Cut<KeyOf<T>> cut;
      const int64_t top_k = args.top_k ? index_at(args.top_k, row) : 0;
      if (filters(n, top_k, top_p)) {
        Scratch scratch;
        auto* weight = scratch.take<double>(n);
        weights(x, n, top.value, temperature, weight);
        cut = cut_of(x, weight, n, top_k, top_p, CutRoom<KeyOf<T>>(scratch, n));
      }
      const DrawKey draw(index_at(args.seed, row), index_at(args.position, row), args.stream);
      token = race(x, n, top.value, temperature, draw, cut);
    }
  }
  args.token.row<int64_t>(row)[0] = token;
  args.status.row<int32_t>(row)[0] =
      (top.has_nan ? kNanIgnored : 0) + (empty ? kNothingToChoose : 0) + (bad ? kBadParameter : 0);
}

template <class T>
void all_rows(const SampleRows& args) {
  const int64_t grain = std::max<int64_t>(1, kGrain / args.num_valid);
  args.parallel(args.logits.size[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      one_row<T>(args, row);
    }
  });
}

}  // namespace

void sample_rows(const SampleRows& args) {
  switch (args.logits.dtype) {
    case DType::f64:
      return all_rows<double>(args);
    case DType::f32:
      return all_rows<float>(args);
    case DType::bf16:
      return all_rows<Bf16>(args);
    default:
      return all_rows<Fp16>(args);
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
