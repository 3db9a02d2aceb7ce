#include "lm_head_passes.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int32_t kNoToken = 1, kUncertified = 2;
constexpr int64_t kBatchFloats = 1 << 24;  // of upper ends

// body(first, count) over batches of states whose upper ends take bounded memory
template <class Body>
void each_batch(int64_t n, int64_t rows, Body body) {
  const int64_t size = std::max<int64_t>(16, kBatchFloats / std::max<int64_t>(1, rows / kGroup) / 16 * 16);
  for (int64_t first = 0; first < n; first += size) {
    body(first, std::min(size, n - first));
  }
}

int64_t screen_bytes(const LMHead& head, int64_t states) {
  const Tensor& rows = head.up ? head.up : head.codes ? head.codes : head.weight;
  return head.num_valid * rows.size[1] * ceil_div(states, 8);
}

void list_nothing(const LMHeadScreen& args) {
  for (int64_t s = 0; s < args.hidden.size[0]; ++s) {
    for (int64_t i = 0; i < args.ids.size[1]; ++i) {
      args.ids.row<int64_t>(s)[i * args.ids.stride[1]] = -1;
    }
    *args.count.row<int32_t>(s) = 0;
    *args.lower_bound.row<float>(s) = -kInfinity;
  }
}

}  // namespace

void lm_head_select(const LMHeadSelect& args) {
  const LMHead& head = args.head;
  const bool certified = is_certified(head);
  each_batch(args.hidden.size[0], head.num_valid, [&](int64_t first, int64_t count) {
    Scratch scratch;
    const States states = make_states(args.hidden, first, count, scratch, args.parallel);
    const int workers = worker_count(args.parallel, screen_bytes(head, count));
    // a shortlist of as many rows as there are is all of them
    if (head.num_valid == 0 || (!certified && (head.full_scan || head.capacity >= head.num_valid))) {
      finish(args, states, nullptr, first, workers, scratch);
    } else {
      const auto scorer = make_scorer(head, args.hidden, states, first, workers, scratch, args.parallel);
      const Screened screened =
          screen(head, *scorer, states, args.k, args.bf16_logits && certified, workers, scratch, args.parallel);
      finish(args, states, &screened, first, workers, scratch);
    }
  });
  for (int64_t s = 0; s < args.hidden.size[0]; ++s) {
    *args.status.row<int32_t>(s) =
        (*args.key.row<int64_t>(s) == kNoKey ? kNoToken : 0) | (certified || head.full_scan ? 0 : kUncertified);
  }
}

void lm_head_screen(const LMHeadScreen& args) {
  const LMHead& head = args.head;
  if (head.num_valid == 0) {
    list_nothing(args);
    return;
  }
  each_batch(args.hidden.size[0], head.num_valid, [&](int64_t first, int64_t count) {
    Scratch scratch;
    const States states = make_states(args.hidden, first, count, scratch, args.parallel);
    const int workers = worker_count(args.parallel, screen_bytes(head, count));
    const auto scorer = make_scorer(head, args.hidden, states, first, workers, scratch, args.parallel);
    const Screened screened = screen(head, *scorer, states, args.k, false, workers, scratch, args.parallel);
    list_rows(args, *scorer, states, screened, first, workers, scratch);
  });
}

void lm_head_rescore(const LMHeadRescore& args) {
  constexpr int64_t kPiece = 64;
  const int64_t n = args.hidden.size[0], width = args.ids.size[1], pieces = ceil_div(width, kPiece);
  Scratch scratch;
  const States states = make_states(args.hidden, 0, n, scratch, args.parallel);
  const int workers = worker_count(args.parallel, n * width * args.hidden.size[1]);
  auto* best = scratch.fill<int64_t>(workers * n * args.k, kNoKey);
  const auto integer = [](const Tensor& tensor, int64_t row, int64_t column) {
    const int64_t at = row * tensor.stride[0] + column * tensor.stride[1];
    return tensor.dtype == DType::i32 ? static_cast<const int32_t*>(tensor.data)[at]
                                      : static_cast<const int64_t*>(tensor.data)[at];
  };
  with_float_type(args.weight.dtype, [&]<class T>(const T*) {
    Ranges ranges(n * pieces, 1);
    args.parallel(workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        for (int64_t at = ranges.take(); at < n * pieces; at = ranges.take()) {
          const int64_t s = at / pieces, from = at % pieces * kPiece;
          const int64_t to = std::min({from + kPiece, width, integer(args.count, s, 0)});
          Best<int64_t> of_state(best + (w * n + s) * args.k, args.k);
          for (int64_t i = from; i < to; ++i) {
            const int64_t id = integer(args.ids, s, i);
            if (id >= args.id_offset && id - args.id_offset < args.num_valid) {
              const T* row = args.weight.row<const T>(id - args.id_offset);
              const float logit = canonical_dot(states.row(s), row, states.width);
              offer_logit(logit, id, args.bf16_logits, of_state);
            }
          }
        }
      }
    });
  });
  merge_keys(best, workers, n, args.k, args.key, 0, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY
