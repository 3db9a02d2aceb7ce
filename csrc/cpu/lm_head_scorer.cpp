#include "lm_head_scorer.h"

namespace dmtp::DMTP_CAPABILITY {

ByteRows byte_rows(const Tensor& matrix, int64_t count) {
  const int64_t size = matrix.dtype == DType::f32                                  ? 4
                       : matrix.dtype == DType::bf16 || matrix.dtype == DType::f16 ? 2
                                                                                   : 1;
  return {static_cast<const char*>(matrix.data), matrix.stride[0] * size, matrix.size[1] * size, count};
}

std::unique_ptr<Scorer> make_scorer(const LMHead& head, const Tensor& hidden, const States& states, int64_t first,
                                    int workers, Scratch& scratch, const ParallelFor& parallel) {
  const auto* row_scale = static_cast<const float*>(head.scale.data);
  if (head.format == ScreenFormat::dense) {
    return make_dense_scorer(head.weight, head.num_valid, hidden, first, states, workers, scratch);
  }
  if (head.format != ScreenFormat::low_rank) {
    const ByteRows codes = byte_rows(head.codes, head.num_valid);
    const Digits digits = make_digits(hidden, first, states.count, scratch, parallel);
    switch (head.format) {
      case ScreenFormat::int8:
        return make_row_scale_scorer(codes, row_scale, digits, workers, scratch);
      case ScreenFormat::int4_g32:
        return make_multiplier_scorer(codes, row_scale, digits, workers, scratch);
      default:
        return make_grouped_scorer(head.format, codes, head.scale, digits, workers, scratch);
    }
  }
  const int64_t rank = head.down.size[0];
  Tensor inner;  // z = down h
  auto* z = scratch.take<float>(states.count * rank);
  inner.data = z;
  inner.dtype = DType::f32;
  inner.size[0] = states.count;
  inner.size[1] = inner.stride[0] = rank;
  inner.stride[1] = 1;
  with_float_type(head.down.dtype, [&]<class T>(const T*) {
    parallel(rank, 8, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t s = 0; s < states.count; ++s) {
          z[s * rank + r] = canonical_dot(states.row(s), head.down.row<const T>(r), states.width);
        }
      }
    });
  });
  if (head.up.dtype == DType::i8) {
    return make_row_scale_scorer(byte_rows(head.up, head.num_valid), row_scale,
                                 make_digits(inner, 0, states.count, scratch, parallel), workers, scratch);
  }
  return make_canonical_scorer(head.up, head.num_valid, make_states(inner, 0, states.count, scratch, parallel));
}

}  // namespace dmtp::DMTP_CAPABILITY
