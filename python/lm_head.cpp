#include "cpu/lm_head.h"

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;

// The format without a kernel here is `deflated`.
std::optional<ScreenFormat> format_of(const std::string& name) {
  constexpr std::pair<const char*, ScreenFormat> kNames[] = {
      {"dense", ScreenFormat::dense},       {"int8", ScreenFormat::int8},         {"int8_g64", ScreenFormat::int8_g64},
      {"int6_g64", ScreenFormat::int6_g64}, {"int4_g32", ScreenFormat::int4_g32}, {"low_rank", ScreenFormat::low_rank}};
  for (const auto& [known, format] : kNames) {
    if (name == known) {
      return format;
    }
  }
  return std::nullopt;
}

bool kernel_takes(const Tensor& hidden, const LMHead& head) {
  for (const Tensor* t : {&hidden, &head.weight, &head.down, &head.up}) {
    if (t->dtype == DType::f64) {
      return false;
    }
  }
  return hidden.size[1] > 0 && hidden.size[1] <= kMaxScreenColumns &&
         (!head.up || head.up.size[1] <= kMaxScreenColumns);
}

// The head, when there are kernels for it.
std::optional<LMHead> head_of(const at::Tensor& hidden, const at::Tensor& weight, const Optional& codes,
                              const Optional& scale, const Optional& bound, const Optional& down, const Optional& up,
                              const Optional& id_map, const std::string& format, int64_t num_valid, int64_t id_offset,
                              const std::string& id_map_mode, int64_t capacity, bool full_scan) {
  const std::optional<ScreenFormat> known = format_of(format);
  if (!known) {
    return std::nullopt;
  }
  LMHead head{};
  head.weight = view(weight);
  head.codes = view(codes);
  head.scale = view(scale);
  head.bound = view(bound);
  head.down = view(down);
  head.up = view(up);
  head.id_map = view(id_map);
  head.format = *known;
  head.id_map_mode = id_map_mode == "none" ? IdMap::none : id_map_mode == "offset" ? IdMap::offset : IdMap::absolute;
  head.full_scan = full_scan;
  head.num_valid = num_valid;
  head.id_offset = id_offset;
  head.capacity = capacity;
  return kernel_takes(view(hidden), head) ? std::optional(head) : std::nullopt;
}

}  // namespace

void bind_lm_head(py::module_& m) {
  m.def(
      "lm_head_select",
      [](const at::Tensor& hidden, const at::Tensor& weight, const Optional& codes, const Optional& scale,
         const Optional& bound, const Optional& down, const Optional& up, const Optional& id_map,
         const std::string& format, int64_t num_valid, int64_t id_offset, const std::string& id_map_mode,
         int64_t capacity, bool full_scan, int64_t k, const std::string& logit_dtype, const at::Tensor& key,
         const at::Tensor& status) {
        const auto head = head_of(hidden, weight, codes, scale, bound, down, up, id_map, format, num_valid, id_offset,
                                  id_map_mode, capacity, full_scan);
        if (!head) {
          return false;
        }
        const bool rounded = logit_dtype == "bfloat16";
        const LMHeadSelect args{*head, view(hidden), k, rounded, view(key), view(status), parallel_for()};
        py::gil_scoped_release release;
        lm_head_select(args);
        return true;
      },
      "The k best keys; False, with nothing written, where there is no kernel for the head.");
  m.def(
      "lm_head_screen",
      [](const at::Tensor& hidden, const at::Tensor& weight, const Optional& codes, const Optional& scale,
         const Optional& bound, const Optional& down, const Optional& up, const Optional& id_map,
         const std::string& format, int64_t num_valid, int64_t id_offset, const std::string& id_map_mode,
         int64_t capacity, bool full_scan, int64_t k, const at::Tensor& ids, const at::Tensor& count,
         const at::Tensor& lower_bound) {
        const auto head = head_of(hidden, weight, codes, scale, bound, down, up, id_map, format, num_valid, id_offset,
                                  id_map_mode, capacity, full_scan);
        if (!head) {
          return false;
        }
        const LMHeadScreen args{*head, view(hidden), k, view(ids), view(count), view(lower_bound), parallel_for()};
        py::gil_scoped_release release;
        lm_head_screen(args);
        return true;
      },
      "The rows that still count; False, with nothing written, where there is no kernel for the head.");
  m.def(
      "lm_head_rescore",
      [](const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& ids, const at::Tensor& count, int64_t k,
         int64_t id_offset, int64_t num_valid, const std::string& logit_dtype, const at::Tensor& key) {
        LMHeadRescore args{};
        args.hidden = view(hidden);
        args.weight = view(weight);
        if (args.hidden.dtype == DType::f64 || args.weight.dtype == DType::f64) {
          return false;
        }
        args.ids = view(ids);
        args.count = view(count);
        args.k = k;
        args.id_offset = id_offset;
        args.num_valid = num_valid;
        args.bf16_logits = logit_dtype == "bfloat16";
        args.key = view(key);
        args.parallel = parallel_for();
        py::gil_scoped_release release;
        lm_head_rescore(args);
        return true;
      },
      "The k best keys of the listed rows; False, with nothing written, where a tensor is float64.");
}

}  // namespace dmtp
