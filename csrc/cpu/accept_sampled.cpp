#include "accept.h"
#include "accept_emit.h"
#include "philox.h"
#include "row_filter.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

enum Status : int32_t { kNanLogits = 1, kUndecided = 2, kBadParameter = 4, kBadDraft = 8 };

template <class T>
const T* row_of(const Tensor& t, int64_t b, int64_t j) {
  return static_cast<const T*>(t.data) + b * t.stride[0] + j * t.stride[1];
}

int64_t id_at(const Tensor& t, int64_t b, int64_t j, int64_t i) {
  return t.dtype == DType::i64 ? row_of<int64_t>(t, b, j)[i] : row_of<int32_t>(t, b, j)[i];
}

template <class T>
void widen(const T* from, int64_t n, double* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = to_double(from[i]);
  }
}

void widen_row(const Tensor& t, int64_t b, int64_t j, int64_t n, double* to) {
  switch (t.dtype) {
    case DType::f64:
      return widen(row_of<double>(t, b, j), n, to);
    case DType::f32:
      return widen(row_of<float>(t, b, j), n, to);
    case DType::bf16:
      return widen(row_of<Bf16>(t, b, j), n, to);
    default:
      return widen(row_of<Fp16>(t, b, j), n, to);
  }
}

// Sum of term(0..n-1) in eight strided chains.
template <class Term>
double sum_of(int64_t n, Term term) {
  constexpr int kChains = 8;
  double chain[kChains] = {};
  int64_t i = 0;
  for (; i + kChains <= n; i += kChains) {
    for (int lane = 0; lane < kChains; ++lane) {
      chain[lane] += term(i + lane);
    }
  }
  for (; i < n; ++i) {
    chain[0] += term(i);
  }
  return ((chain[0] + chain[4]) + (chain[2] + chain[6])) + ((chain[1] + chain[5]) + (chain[3] + chain[7]));
}

// argmax of log weight - log E, the lowest id of several; -1 where no weight is positive.
int64_t race(const double* weight, int64_t n, const DrawKey& draw) {
  constexpr double kMargin = 1e-3;  // relative, over the rounding of bounds
  double best = -std::numeric_limits<double>::infinity(), bar = 0;
  int64_t winner = -1;
  uint32_t words[kDraws];
  for (int64_t from = 0; from < n; from += kDraws) {
    const int64_t count = std::min<int64_t>(kDraws, n - from);
    philox_block(draw, from, words);
    for (int64_t i = 0; i < count; ++i) {
      // E is at least u: nothing scores above log(weight / u)
      if (!(weight[from + i] > 0 && weight[from + i] >= bar * uniform_of(words[i]))) {
        continue;
      }
      const double score = std::log(weight[from + i]) + gumbel_of(words[i]);
      if (score > best) {
        best = score;
        winner = from + i;
        bar = std::exp(best) * (1 - kMargin);
      }
    }
  }
  return winner;
}

// One request's verification.
template <class T>
class Round {
 public:
  Round(const AcceptSampled& args, int64_t b, Scratch& scratch)
      : args_(args),
        b_(b),
        vocab_(args.target_logits.size[2]),
        width_(args.candidates.size[1]),
        weight_(scratch.take<double>(vocab_)),
        p_(scratch.take<double>(vocab_)),
        q_(scratch.take<double>(vocab_)),
        room_(scratch, vocab_),
        temperature_(float_at(args.temperature, b)),
        top_k_(args.top_k ? index_at(args.top_k, b) : 0),
        top_p_(args.top_p ? float_at(args.top_p, b) : 1.0),
        greedy_(temperature_ == 0),
        bad_(!(temperature_ >= 0) || std::isinf(temperature_) || (top_p_ != top_p_ && !greedy_)),
        limit_(limit_of(args.num_candidates, b, width_ - 1)) {}

  void run() {
    const bool given = limit_ >= 0 && index_at(args_.emission.budget, b_) > 0, live = given && !bad_;
    int64_t accepted = 0, correction = -1;
    int32_t flags = given && bad_ ? kBadParameter : 0;
    if (live) {
      accepted = greedy_ ? matched() : args_.block ? kept_of_block() : kept_one_by_one();
      correction = token_after();
      flags |= flags_;
    }
    args_.status.row<int32_t>(b_)[0] = flags;
    emit(args_.emission, b_, live, accepted, [&](int64_t j) { return j < accepted ? drawn(j) : correction; });
  }

 private:
  int64_t drawn(int64_t j) const { return index_at(args_.candidates, b_, j + 1); }
  bool proposed(int64_t j) const { return j < limit_ && drawn(j) >= 0 && drawn(j) < vocab_; }
  const T* logits(int64_t j) const { return row_of<T>(args_.target_logits, b_, j); }
  bool undecided(const RowTop& top) const {
    return std::isinf(top.value) && top.value < 0 ? true : !greedy_ && (top.has_nan || std::isinf(top.value));
  }

  int64_t matched() {
    for (int64_t j = 0;; ++j) {
      const RowTop top = top_of(logits(j), vocab_);
      flags_ |= top.has_nan ? kNanLogits : 0;
      best_ = undecided(top) ? -1 : first_equal(logits(j), vocab_, top.value);
      if (!proposed(j) || drawn(j) != best_) {
        return j;
      }
    }
  }

  // p_j into p_; false where the row decides nothing.
  bool load_target(int64_t j) {
    const T* x = logits(j);
    const RowTop top = top_of(x, vocab_);
    if (undecided(top)) {
      row_flags_ = kUndecided | (top.has_nan ? kNanLogits : 0);
      return false;
    }
    row_flags_ = 0;
    weights(x, vocab_, top.value, temperature_, weight_);
    if (filters(vocab_, top_k_, top_p_)) {
      const auto cut = cut_of(x, weight_, vocab_, top_k_, top_p_, room_);
      for (int64_t i = 0; i < vocab_; ++i) {
        weight_[i] = cut.keeps(x[i], i) ? weight_[i] : -std::numeric_limits<double>::infinity();
      }
    }
    exps(weight_, vocab_, p_);
    const double total = sum_of(vocab_, [&](int64_t i) { return p_[i]; });
    for (int64_t i = 0; i < vocab_; ++i) {
      p_[i] /= total;
    }
    return true;
  }

  // q_j into q_; false where it is no distribution.
  bool load_draft(int64_t j) {
    if (!args_.draft_probs) {
      std::fill(q_, q_ + vocab_, 0.0);
      q_[drawn(j)] = 1;
      return true;
    }
    double total;
    bool negative = false;
    if (args_.draft_ids) {
      const int64_t listed = args_.draft_ids.size[2];
      std::fill(q_, q_ + vocab_, 0.0);
      total = 0;
      for (int64_t i = 0; i < listed; ++i) {
        const int64_t id = id_at(args_.draft_ids, b_, j, i);
        if (id >= vocab_) {
          return false;
        }
        if (id >= 0) {
          double value;
          widen_entry(j, i, &value);
          negative |= value < 0;
          total += value;
          q_[id] += value;
        }
      }
    } else {
      widen_row(args_.draft_probs, b_, j, vocab_, q_);
      total = sum_of(vocab_, [&](int64_t i) { return q_[i]; });
      for (int64_t i = 0; i < vocab_; ++i) {
        negative |= q_[i] < 0;
      }
    }
    if (!std::isfinite(total) || total <= 0 || negative) {
      return false;
    }
    for (int64_t i = 0; i < vocab_; ++i) {
      q_[i] /= total;
    }
    return true;
  }

  void widen_entry(int64_t j, int64_t i, double* value) const {
    Tensor shifted = args_.draft_probs;
    const int64_t bytes = shifted.dtype == DType::f64 ? 8 : shifted.dtype == DType::f32 ? 4 : 2;
    shifted.data = static_cast<char*>(shifted.data) + i * bytes;
    widen_row(shifted, b_, j, 1, value);
  }

  // Loads row j and its draft; false where the candidate cannot be judged, with flags for a prefix that ends here.
  bool usable(int64_t j) {
    const bool decided = load_target(j);
    if (!proposed(j)) {
      return false;
    }
    const bool drafted = load_draft(j);
    row_flags_ |= drafted ? 0 : kBadDraft;
    return decided && drafted;
  }

  double uniform(int64_t j) const {
    uint32_t words[4];
    philox(DrawKey(index_at(args_.seed, b_), index_at(args_.position, b_), kAcceptStream), static_cast<uint32_t>(j / 4),
           words);
    return uniform_of(words[j % 4]);
  }

  int64_t kept_one_by_one() {
    int64_t j = 0;
    for (; usable(j); ++j) {
      const double p = p_[drawn(j)], q = q_[drawn(j)];
      // no division: u < p / q; a candidate that q says cannot be drawn is refused
      if (!(uniform(j) * q < p && q > 0)) {
        refused_ = true;
        break;
      }
    }
    return j;
  }

  int64_t kept_of_block() {
    int64_t kept = 0, j = 0;
    double weight = 1;
    while (usable(j)) {
      // the row of candidate i = j tells how likely a prefix of j is to be kept when longer ones are not
      if (j > 0) {
        keep_if(uniform(j - 1) < chance_of(weight), j, weight, kept);
      }
      const double p = p_[drawn(j)], q = q_[drawn(j)];
      weight = std::min(weight * (q > 0 ? p / q : 0.0), 1.0);
      ++j;
    }
    if (j > 0) {
      keep_if(uniform(j - 1) < weight, j, weight, kept);
    }
    refused_ = kept < j;
    if (refused_) {
      usable(kept);
    }
    return kept;
  }

  void keep_if(bool longer, int64_t j, double weight, int64_t& kept) {
    if (longer) {
      kept = j;
      scale_ = weight;
    }
  }

  double chance_of(double weight) const {
    const double surplus = sum_of(vocab_, [&](int64_t i) { return std::max(weight * p_[i] - q_[i], 0.0); });
    const double below = surplus + 1.0 - weight;
    return below > 0 ? surplus / below : 1.0;
  }

  // The correction or bonus, from the rows that the decision loaded last; -1 where the row decides nothing.
  int64_t token_after() {
    if (greedy_) {
      flags_ |= best_ < 0 ? kUndecided : 0;
      return best_;
    }
    flags_ = row_flags_;
    if (row_flags_ & kUndecided) {
      return -1;
    }
    if (refused_) {
      bool any = false;
      for (int64_t i = 0; i < vocab_; ++i) {
        weight_[i] = std::max(scale_ * p_[i] - q_[i], 0.0);
        any |= weight_[i] > 0;
      }
      // rounding alone can refuse a candidate where p and q agree, and leave no surplus
      refused_ = any;
    }
    const DrawKey draw(index_at(args_.seed, b_), index_at(args_.position, b_), kResidualStream);
    return race(refused_ ? weight_ : p_, vocab_, draw);
  }

  const AcceptSampled& args_;
  const int64_t b_, vocab_, width_;
  double *weight_, *p_, *q_;
  CutRoom<KeyOf<T>> room_;
  const double temperature_;
  const int64_t top_k_;
  const double top_p_;
  const bool greedy_, bad_;
  const int64_t limit_;
  int32_t flags_ = 0, row_flags_ = 0;
  int64_t best_ = -1;
  double scale_ = 1;
  bool refused_ = false;
};

template <class T>
void all_requests(const AcceptSampled& args) {
  args.parallel(args.candidates.size[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      Scratch scratch;
      Round<T>(args, b, scratch).run();
    }
  });
}

}  // namespace

void accept_sampled(const AcceptSampled& args) {
  switch (args.target_logits.dtype) {
    case DType::f64:
      return all_requests<double>(args);
    case DType::f32:
      return all_requests<float>(args);
    case DType::bf16:
      return all_requests<Bf16>(args);
    default:
      return all_requests<Fp16>(args);
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
