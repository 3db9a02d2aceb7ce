#include <cmath>

#include "lm_head_passes.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int64_t kRangeBytes = 1 << 19;
constexpr int64_t kLeadBytes = 1 << 15;  // rows are fetched at least so far ahead
constexpr float kTiny = 0x1p-125f;       // what products lose to underflow
constexpr float kHuge = 0x1p100f;        // below this radius no order of summation can overflow

// Both ends of the intervals of a block. A row that does not count has none: -inf.
struct Intervals {
  alignas(64) float lower[kBlock], upper[kBlock];

  Intervals(const float* scores, const float* bound, Scorer::Reach reach, const int32_t* counts) {
    for (int i = 0; i < kBlock; ++i) {
      const float product = bound[i] * reach.length + reach.extra, radius = product < kHuge ? product : kInfinity;
      const float low = scores[i] - radius, high = scores[i] + radius;
      lower[i] = counts[i] != 0 && low < kInfinity ? low : -kInfinity;
      upper[i] = counts[i] == 0 ? -kInfinity : high == high ? high : kInfinity;
    }
  }
};

// The rows of one block: who counts, and the bounds.
struct BlockRows {
  alignas(64) int32_t counts[kBlock];
  alignas(64) float bound[kBlock];
  uint32_t named;

  BlockRows(const LMHead& head, int64_t first, int rows) : named(named_rows(head, first, rows)) {
    for (int i = 0; i < kBlock; ++i) {
      counts[i] = named >> i & 1;
      bound[i] = head.bound && i < rows ? head.bound.row<const float>(first)[i] : 0.0f;
    }
  }
};

void group_maxima(const float* values, bool rounded, float* out) {
  for (int g = 0; g < kBlockGroups; ++g) {
    const float* v = values + g * kGroup;
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    out[g] = a > b ? a : b;
  }
  if (rounded) {
    for (int g = 0; g < kBlockGroups; ++g) {
      out[g] = bf16_rounded(out[g]);
    }
  }
}

bool any_reaching(const float* values, float least) {
  int reaching = 0;
  for (int i = 0; i < kBlock; ++i) {
    reaching |= values[i] >= least;
  }
  return reaching != 0;
}

// What one block says about every state.
struct Pass {
  const LMHead& head;
  const Scorer& scorer;
  const States& states;
  int64_t k, groups;
  bool rounded, certified;
  float* upper;   // [n, groups]
  float* lowest;  // [workers, n, k], the greatest lower ends

  void close(int64_t first, int rows, int worker, const float* scores) const {
    const BlockRows block(head, first, rows);
    for (int64_t s = 0; s < states.count; ++s) {
      const float* of_state = scores + s * kBlock;
      float* out = upper + s * groups + first / kGroup;
      if (!certified) {
        alignas(64) float values[kBlock];
        for (int i = 0; i < kBlock; ++i) {
          values[i] = block.counts[i] != 0 && of_state[i] == of_state[i] ? of_state[i] : -kInfinity;
        }
        group_maxima(values, false, out);
        continue;
      }
      const Intervals ends(of_state, block.bound, scorer.reach(states.length[s]), block.counts);
      Best<float> best(lowest + (worker * states.count + s) * k, k);
      if (any_reaching(ends.lower, best.least())) {
        for (const float end : ends.lower) {
          best.offer(end);
        }
      }
      group_maxima(ends.upper, rounded, out);
    }
  }
};

// The `count`-th greatest of `size` values, -inf when there are no more than `count`; `spare` has room for them all.
float kth_greatest(const float* values, int64_t size, int64_t count, float* spare) {
  if (size <= count) {
    return -kInfinity;
  }
  constexpr int64_t kWidth = 16, kStrip = 8 * kWidth;
  // maxima of 8 values each: their count-th is a floor under the answer that few other values reach
  float floor = -kInfinity;
  const int64_t strips = size / kStrip;
  if (strips * kWidth > 2 * count) {
    for (int64_t strip = 0; strip < strips; ++strip) {
      float* greatest = spare + strip * kWidth;
      std::copy_n(values + strip * kStrip, kWidth, greatest);
      for (int64_t i = kWidth; i < kStrip; i += kWidth) {
        for (int64_t j = 0; j < kWidth; ++j) {
          const float value = values[strip * kStrip + i + j];
          greatest[j] = greatest[j] < value ? value : greatest[j];
        }
      }
    }
    std::nth_element(spare, spare + count - 1, spare + strips * kWidth, std::greater<>());
    floor = spare[count - 1];
  }
  int64_t kept = 0;
  const auto keep = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      spare[kept] = values[i];
      kept += values[i] >= floor;
    }
  };
  int64_t at = 0;
  for (; at + kBlock <= size; at += kBlock) {
    if (any_reaching(values + at, floor)) {
      keep(at, at + kBlock);
    }
  }
  keep(at, size);
  std::nth_element(spare, spare + count - 1, spare + kept, std::greater<>());
  return spare[count - 1];
}

}  // namespace

Screened screen(const LMHead& head, const Scorer& scorer, const States& states, int64_t k, bool bf16_logits,
                int workers, Scratch& scratch, const ParallelFor& parallel) {
  const int64_t n = states.count, groups = round_up(head.num_valid, 64) / kGroup;
  const bool certified = is_certified(head);
  // with fewer rows than k the lowest of them all is the bound
  const int64_t kept = std::min(k, head.num_valid);
  auto* upper = scratch.take<float>(n * groups);
  auto* lowest = scratch.fill<float>(certified ? workers * n * kept : 0, -kInfinity);
  auto* scores = scratch.fill<float>(workers * n * kBlock, 0.0f);
  const Pass pass{head, scorer, states, kept, groups, bf16_logits, certified, upper, lowest};
  Ranges ranges(head.num_valid, std::max<int64_t>(1, kRangeBytes / scorer.row_bytes() / kBlock) * kBlock);
  const int64_t lead = ceil_div(kLeadBytes, scorer.row_bytes() * kBlock) * kBlock;
  parallel(workers, 1, [&](int64_t begin, int64_t end) {
    scorer.enter();
    for (int64_t w = begin; w < end; ++w) {
      float* mine = scores + w * n * kBlock;
      int64_t now = ranges.take(), after = ranges.take();
      for (; now < head.num_valid; now = after, after = ranges.take()) {
        const int64_t last = ranges.end(now);
        for (int64_t first = now; first < last; first += kBlock) {
          const int rows = static_cast<int>(std::min<int64_t>(kBlock, last - first));
          const int64_t ahead = first + lead < last ? first + lead : after + (first + lead - last);
          scorer.score(first, rows, ahead < head.num_valid ? ahead : -1, static_cast<int>(w), mine);
          pass.close(first, rows, static_cast<int>(w), mine);
        }
      }
    }
    scorer.leave();
  });
  const int64_t real = ceil_div(head.num_valid, kBlock) * kBlockGroups;
  auto* threshold = scratch.take<float>(n);
  auto* lower = scratch.fill<float>(n, -kInfinity);
  auto* spare = scratch.take<float>(std::max<int64_t>(certified ? workers * kept : workers * groups, 1));
  const int64_t listed = std::max(head.capacity / kGroup, k);
  for (int64_t s = 0; s < n; ++s) {
    std::fill(upper + s * groups + real, upper + (s + 1) * groups, -kInfinity);
  }
  if (!certified) {
    const int64_t own = ceil_div(head.num_valid, kGroup);
    Ranges of_states(n, 1);
    parallel(std::min<int64_t>(workers, n), 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        for (int64_t s = of_states.take(); s < n; s = of_states.take()) {
          threshold[s] = kth_greatest(upper + s * groups, own, listed, spare + w * groups);
        }
      }
    });
    return {groups, upper, threshold, lower};
  }
  for (int64_t s = 0; s < n; ++s) {
    for (int w = 0; w < workers; ++w) {
      std::copy_n(lowest + (w * n + s) * kept, kept, spare + w * kept);
    }
    std::nth_element(spare, spare + kept - 1, spare + workers * kept, std::greater<>());
    lower[s] = spare[kept - 1] - kTiny;
    threshold[s] = bf16_logits ? bf16_rounded(lower[s]) : lower[s];
  }
  return {groups, upper, threshold, lower};
}

void list_rows(const LMHeadScreen& args, const Scorer& scorer, const States& states, const Screened& screened,
               int64_t first_state, int workers, Scratch& scratch) {
  const LMHead& head = args.head;
  const int64_t n = states.count, blocks = ceil_div(head.num_valid, kBlock);
  const bool certified = is_certified(head);
  auto* kept = scratch.take<uint32_t>(n * blocks);  // one bit a row
  auto* scores = scratch.fill<float>(workers * n * kBlock, 0.0f);
  Ranges ranges(blocks, 16);
  args.parallel(workers, 1, [&](int64_t begin, int64_t end) {
    scorer.enter();
    for (int64_t w = begin; w < end; ++w) {
      float* mine = scores + w * n * kBlock;
      for (int64_t now = ranges.take(); now < blocks; now = ranges.take()) {
        for (int64_t b = now; b < ranges.end(now); ++b) {
          const int64_t first = b * kBlock;
          const int rows = static_cast<int>(std::min<int64_t>(kBlock, head.num_valid - first));
          bool scored = false;
          const BlockRows block(head, first, rows);
          for (int64_t s = 0; s < n; ++s) {
            uint32_t bits = 0;
            for (int g = 0; g < kBlockGroups; ++g) {
              const float upper = screened.upper[s * screened.groups + b * kBlockGroups + g];
              bits |= upper < screened.threshold[s] ? 0 : uint32_t{15} << (g * kGroup);
            }
            bits &= block.named;
            if (certified && bits != 0) {
              if (!scored) {
                scorer.score(first, rows, -1, static_cast<int>(w), mine);
                scored = true;
              }
              const Intervals ends(mine + s * kBlock, block.bound, scorer.reach(states.length[s]), block.counts);
              for (int i = 0; i < kBlock; ++i) {
                bits &= ~(static_cast<uint32_t>(ends.upper[i] < screened.threshold[s]) << i);
              }
            }
            kept[s * blocks + b] = bits;
          }
        }
      }
    }
    scorer.leave();
  });
  for (int64_t s = 0; s < n; ++s) {
    const int64_t row = first_state + s;
    auto* ids = args.ids.row<int64_t>(row);
    const int64_t width = args.ids.size[1];
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      for (uint32_t bits = kept[s * blocks + b]; bits != 0; bits &= bits - 1, ++count) {
        if (count < width) {
          ids[count * args.ids.stride[1]] = b * kBlock + __builtin_ctz(bits) + head.id_offset;
        }
      }
    }
    for (int64_t i = count; i < width; ++i) {
      ids[i * args.ids.stride[1]] = -1;
    }
    *args.count.row<int32_t>(row) = static_cast<int32_t>(count);
    *args.lower_bound.row<float>(row) = screened.lower[s];
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
