#include "lm_head_passes.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int kSet = 16;  // groups whose survivors are one word
constexpr int64_t kRangeGroups = 256;

uint16_t reaching(const float* upper, float threshold) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(upper), _mm512_set1_ps(threshold), _CMP_NLT_UQ);
#else
  uint32_t bits = 0;
  for (int i = 0; i < kSet; ++i) {
    bits |= static_cast<uint32_t>(!(upper[i] < threshold)) << i;
  }
  return static_cast<uint16_t>(bits);
#endif
}

void fetch(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + i, 0, 2);
  }
}

template <class T>
struct Finish {
  const LMHeadSelect& args;
  const States& states;
  const Screened* screened;
  int64_t groups;
  uint16_t* masks;  // [workers, kRangeGroups / kSet, n]
  int64_t* best;    // [workers, n, k]

  void range(int64_t begin, int64_t end, int64_t worker) const {
    const int64_t n = states.count;
    uint16_t* mine = masks + worker * (kRangeGroups / kSet) * n;
    int64_t list[kRangeGroups + 1], size = 0;
    for (int64_t at = begin; at < end; at += kSet) {
      uint16_t* of_set = mine + (at - begin) / kSet * n;
      uint32_t any = 0;
      for (int64_t s = 0; s < n; ++s) {
        of_set[s] = screened == nullptr ? uint16_t{0xffff}
                                        : reaching(screened->upper + s * screened->groups + at, screened->threshold[s]);
        any |= of_set[s];
      }
      any &= end - at < kSet ? (1u << (end - at)) - 1 : ~0u;
      for (; any != 0; any &= any - 1) {
        list[size++] = at + __builtin_ctz(any);
      }
    }
    for (int64_t i = 0; i < size; ++i) {
      if (i == 0) {
        fetch_group(list[0]);
      }
      if (i + 1 < size) {
        fetch_group(list[i + 1]);
      }
      const int64_t set = (list[i] - begin) / kSet;
      group(list[i], mine + set * n, static_cast<int>((list[i] - begin) % kSet), worker);
    }
  }

  int rows_of(int64_t g) const { return static_cast<int>(std::min<int64_t>(kGroup, args.head.num_valid - g * kGroup)); }

  void fetch_group(int64_t g) const {
    for (int i = 0; i < rows_of(g); ++i) {
      fetch(args.head.weight.row<const T>(g * kGroup + i), states.width * static_cast<int64_t>(sizeof(T)));
    }
  }

  void group(int64_t g, const uint16_t* masks_of_set, int bit, int64_t worker) const {
    int64_t token[kGroup];
    for (int i = 0; i < rows_of(g); ++i) {
      token[i] = token_of(args.head, g * kGroup + i);
    }
    for (int64_t s = 0; s < states.count; ++s) {
      if ((masks_of_set[s] >> bit & 1) == 0) {
        continue;
      }
      Best<int64_t> of_state(best + (worker * states.count + s) * args.k, args.k);
      for (int i = 0; i < rows_of(g); ++i) {
        if (token[i] >= 0) {
          const T* row = args.head.weight.row<const T>(g * kGroup + i);
          offer_logit(canonical_dot(states.row(s), row, states.width), token[i], args.bf16_logits, of_state);
        }
      }
    }
  }
};

}  // namespace

void finish(const LMHeadSelect& args, const States& states, const Screened* screened, int64_t first, int workers,
            Scratch& scratch) {
  const int64_t n = states.count, groups = ceil_div(args.head.num_valid, kGroup);
  auto* best = scratch.fill<int64_t>(workers * n * args.k, kNoKey);
  auto* masks = scratch.take<uint16_t>(workers * (kRangeGroups / kSet) * n);
  with_float_type(args.head.weight.dtype, [&]<class T>(const T*) {
    const Finish<T> work{args, states, screened, groups, masks, best};
    Ranges ranges(groups, kRangeGroups);
    args.parallel(workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        for (int64_t now = ranges.take(); now < groups; now = ranges.take()) {
          work.range(now, ranges.end(now), w);
        }
      }
    });
  });
  merge_keys(best, workers, n, args.k, args.key, first, scratch);
}

void merge_keys(const int64_t* best, int workers, int64_t n, int64_t k, const Tensor& key, int64_t first,
                Scratch& scratch) {
  auto* all = scratch.take<int64_t>(workers * k);
  for (int64_t s = 0; s < n; ++s) {
    for (int w = 0; w < workers; ++w) {
      std::copy_n(best + (w * n + s) * k, k, all + w * k);
    }
    std::partial_sort(all, all + k, all + workers * k, std::greater<>());
    for (int64_t i = 0; i < k; ++i) {
      key.row<int64_t>(first + s)[i * key.stride[1]] = all[i];
    }
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
