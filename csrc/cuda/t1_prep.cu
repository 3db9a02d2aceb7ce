#include <algorithm>

#include "cuda/launchers.h"
#include "cuda/t1_block.cuh"
#include "cuda/t1_select.cuh"

namespace dmtp::cuda {
namespace {

__device__ __host__ inline int64_t prepared_items(const T1Launch& a) {
  return a.batch * (a.prep.fusion != T1Fusion::none ? 2 : a.select ? 1 : 0);
}

// States as the screen and the rescoring read them, and the hidden half of the streams, which does not wait for T1.
__device__ void prepare(const T1Launch& a) {
  int turn = 0;
  for (int64_t item = (a.select ? 0 : a.batch) + blockIdx.x; item < prepared_items(a); item += gridDim.x) {
    if (item < a.batch) {
      prepare_state(turn, a, item);
      continue;
    }
    const bool finite = put_hidden(turn, a, item - a.batch);
    if (threadIdx.x == 0) {
      a.finite[item - a.batch] = finite;
    }
  }
}

// All of it, its phases apart by a barrier of the grid.
template <int kTiles>
__global__ void __launch_bounds__(kPrepThreads, kPrepBlocks) t1_prep_kernel(const __grid_constant__ T1Launch a) {
  DMTP_SHARED(Staged, staged);
  const bool fused = a.prep.fusion != T1Fusion::none;
  if (a.select || fused) {
    prepare(a);
    DMTP_WAIT_FOR_GRID(a.barrier);
  }
  if (a.select) {
    if (!a.scan) {
      screen<kTiles>(a, staged);
      DMTP_WAIT_FOR_GRID(a.barrier);
    }
    rescore(a);
    DMTP_WAIT_FOR_GRID(a.barrier);
  }
  place(a);
  for (bool last = !given(a.prep.up); fused; last = true) {
    DMTP_WAIT_FOR_GRID(a.barrier);
    project<kTiles>(a, staged, last);
    if (last) {
      return;
    }
  }
}

__global__ void __launch_bounds__(kPrepThreads) t1_prepare_kernel(const __grid_constant__ T1Launch a) {
  DMTP_AFTER_LAST_KERNEL();
  prepare(a);
}

template <int kTiles>
__global__ void __launch_bounds__(kPrepThreads, kPrepBlocks) t1_screen_kernel(const __grid_constant__ T1Launch a) {
  DMTP_SHARED(Staged, staged);
  DMTP_AFTER_LAST_KERNEL();
  screen<kTiles>(a, staged);
}

__global__ void __launch_bounds__(kPrepThreads) t1_rescore_kernel(const __grid_constant__ T1Launch a) {
  DMTP_AFTER_LAST_KERNEL();
  rescore(a);
}

__global__ void __launch_bounds__(kPrepThreads) t1_place_kernel(const __grid_constant__ T1Launch a) {
  DMTP_AFTER_LAST_KERNEL();
  place(a);
}

template <int kTiles>
__global__ void __launch_bounds__(kPrepThreads) t1_project_kernel(const __grid_constant__ T1Launch a, bool last) {
  DMTP_SHARED(Staged, staged);
  DMTP_AFTER_LAST_KERNEL();
  project<kTiles>(a, staged, last);
}

// Hands out scratch memory; with no memory it counts the bytes.
class Scratch {
 public:
  explicit Scratch(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    const int64_t at = used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(memory_ == nullptr ? nullptr : memory_ + at);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

Rows rows_of(const Tensor& matrix, int64_t skipped, int64_t count) {
  const int64_t item = size_of(matrix.dtype);
  const char* first = static_cast<const char*>(matrix.data) + skipped * item;
  const int64_t stride = matrix.stride[0] * item;
  return {first, stride, (matrix.size[1] - skipped) * item, count,
          (reinterpret_cast<uintptr_t>(first) | static_cast<uintptr_t>(stride)) % 16 == 0};
}

Operand operand_for(const Rows& rows, Multiply how, int64_t item) {
  return {nullptr, (rows.bytes + kChunk - 1) / kChunk * kChunk / item, static_cast<int>(item), how};
}

// fp32 blocks take FMAs, since sums of tensor cores are not as exact; so do matrices that they do not take as they are.
Multiply projected(const Tensor& matrix, DType block) {
  return matrix.dtype == DType::bf16 && block != DType::f32 ? Multiply::parts : Multiply::plain;
}

Multiply screened(const LMHead& head, DType state) {
  const DType row = head.weight.dtype;
  return head.format == ScreenFormat::int8            ? Multiply::digits
         : row == DType::bf16 && state == DType::bf16 ? Multiply::bf16
         : row == DType::f16 && state == DType::f16   ? Multiply::fp16
                                                      : Multiply::plain;
}

void skip_rows(Tensor& t, int64_t rows) {
  if (t) {
    t.data = static_cast<char*>(t.data) + rows * t.stride[0] * size_of(t.dtype);
  }
}

void put_head(T1Launch& a, Scratch& scratch) {
  const LMHead& head = a.head;
  const int64_t size = a.h_mtp.size[1];
  const bool coded = head.format == ScreenFormat::int8;
  a.scan = head.format != ScreenFormat::dense && !coded;
  a.groups = (head.num_valid + kTileRows - 1) / kTileRows;
  a.wide_stride = (size + 255) / 256 * 256;
  a.wide = scratch.take<float>(a.batch * a.wide_stride);
  a.key = scratch.take<long long>(a.batch);
  a.best = scratch.take<int32_t>(a.batch);
  a.prep.token = {};
  a.prep.token.data = a.key;
  a.prep.token.dtype = DType::i64;
  a.prep.token.stride[0] = 1;
  if (!a.scan) {
    const Tensor& rows = coded ? head.codes : head.weight;
    a.screen_rows = rows_of(rows, 0, head.num_valid);
    a.states = operand_for(a.screen_rows, screened(head, a.h_mtp.dtype), size_of(rows.dtype));
    a.states.data = scratch.take<char>(operand_bytes(a.states, a.batch));
    a.length = scratch.take<float>(a.batch);
    a.step = scratch.take<float>(a.batch);
    a.upper = scratch.take<int32_t>(a.batch * a.groups);
  }
}

// The launch for requests `from` and up to 16 more; their scratch memory lies in `scratch`.
T1Launch launch_for(const T1Call& call, int64_t from, Scratch& scratch) {
  T1Launch a{};
  a.prep = call.prep;
  a.head = call.head;
  a.h_mtp = call.hidden;
  T1Prep& p = a.prep;
  for (Tensor* t :
       {&p.anchor_ids, &p.token, &p.status, &p.hidden, &a.h_mtp, &p.t1, &p.block_ids, &p.block_embeds, &p.certified}) {
    skip_rows(*t, from);
  }
  a.batch = std::min<int64_t>(p.anchor_ids.size[0] - from, kMostStates);
  a.width = p.embedding.size[1];
  a.slots = p.anchors + p.num_masks;
  a.select = static_cast<bool>(call.head.weight);
  a.keys = a.select || p.status;
  a.bf16_logits = call.bf16_logits;
  if (a.select) {
    put_head(a, scratch);
  }
  if (p.fusion != T1Fusion::none) {
    const DType block = p.embedding.dtype;
    a.first_rows = rows_of(p.first, p.folded ? a.width : 0, p.first.size[0]);
    a.streams = operand_for(a.first_rows, projected(p.first, block), size_of(p.first.dtype));
    a.streams.data = scratch.take<char>(operand_bytes(a.streams, a.batch));
    a.finite = scratch.take<int32_t>(a.batch);
    if (p.up) {
      a.up_rows = rows_of(p.up, 0, p.up.size[0]);
      a.low = operand_for(a.up_rows, projected(p.up, block), size_of(p.up.dtype));
      a.low.data = scratch.take<char>(operand_bytes(a.low, a.batch));
    }
  }
  return a;
}

int64_t tiles_of(int64_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

int64_t rescore_blocks(const T1Launch& a) {
  return a.batch * ((a.groups + kLanes - 1) / kLanes);
}

int64_t screen_blocks(const T1Launch& a) {
  return (a.groups + kPrepWarps - 1) / kPrepWarps;
}

template <auto kKernel>
int64_t blocks_for(int64_t work) {
  return std::max<int64_t>(1, std::min(work, resident_blocks<kKernel>(kPrepThreads)));
}

template <int kTiles>
const char* launch_one(const T1Launch& a, void* stream) {
  int64_t work = std::max({a.batch * a.slots, 2 * a.batch, tiles_of(a.width)});
  if (a.select) {
    work = std::max({work, rescore_blocks(a), screen_blocks(a)});
  }
  const int64_t blocks = blocks_for<t1_prep_kernel<kTiles>>(work);
  return launch_resident(t1_prep_kernel<kTiles>, blocks, kPrepThreads, stream, a);
}

template <int kTiles>
const char* launch_phases(const T1Launch& a, void* stream) {
  const char* error = nullptr;
  const auto run = [&](auto kernel, int64_t blocks, auto... rest) {
    error = error != nullptr ? error : launch_early(kernel, blocks, kPrepThreads, stream, a, rest...);
  };
  if (prepared_items(a) > 0) {
    run(t1_prepare_kernel, blocks_for<t1_prepare_kernel>(2 * a.batch));
  }
  if (a.select) {
    if (!a.scan) {
      run(t1_screen_kernel<kTiles>, blocks_for<t1_screen_kernel<kTiles>>(screen_blocks(a)));
    }
    run(t1_rescore_kernel, blocks_for<t1_rescore_kernel>(rescore_blocks(a)));
  }
  run(t1_place_kernel, blocks_for<t1_place_kernel>(a.batch * a.slots));
  if (a.prep.fusion != T1Fusion::none) {
    if (a.prep.up) {
      run(t1_project_kernel<kTiles>, blocks_for<t1_project_kernel<kTiles>>(tiles_of(a.low.padded)), false);
    }
    run(t1_project_kernel<kTiles>, blocks_for<t1_project_kernel<kTiles>>(tiles_of(a.width)), true);
  }
  return error;
}

template <int kTiles>
const char* launch_some(const T1Launch& a, bool one_launch, void* stream) {
  return one_launch && cooperates() ? launch_one<kTiles>(a, stream) : launch_phases<kTiles>(a, stream);
}

bool takes(const T1Call& call) {
  const T1Prep& p = call.prep;
  for (const Tensor* t : {&p.hidden, &p.embedding, &p.mask_embed, &p.folded, &p.first, &p.up, &p.norm_e, &p.norm_m,
                          &call.head.weight, &call.hidden}) {
    if (t->dtype == DType::f64) {
      return false;
    }
  }
  if (p.embedding.size[1] == 0 || p.hidden.size[1] == 0 || (p.embedding.size[1] > 1 && p.block_embeds.stride[2] != 1)) {
    return false;
  }
  const LMHead& head = call.head;
  if (!head.weight) {
    return true;
  }
  const bool screened = head.format == ScreenFormat::dense || head.format == ScreenFormat::int8;
  const bool scanned =
      head.full_scan && (head.format == ScreenFormat::int4_g32 || head.format == ScreenFormat::low_rank);
  return (screened || scanned) && call.hidden.size[1] > 0 && call.hidden.size[1] <= kMaxScreenColumns;
}

}  // namespace

int64_t t1_prep_bytes(const T1Call& call) {
  if (!takes(call)) {
    return -1;
  }
  Scratch count(nullptr);
  launch_for(call, 0, count);
  return count.used();
}

const char* t1_prep(const T1Call& call, void* scratch, void* barrier, void* stream) {
  const char* error = nullptr;
  for (int64_t from = 0; error == nullptr && from < call.prep.anchor_ids.size[0]; from += kMostStates) {
    Scratch own(scratch);
    T1Launch a = launch_for(call, from, own);
    a.barrier = static_cast<GridBarrier*>(barrier);
    error = a.batch <= kTileStates ? launch_some<1>(a, call.one_launch, stream)
                                   : launch_some<2>(a, call.one_launch, stream);
  }
  return error;
}

}  // namespace dmtp::cuda
