// Kernels that show what the harness of csrc/testing finds.
#include "cuda/copy_async.cuh"
#include "cuda/grid.cuh"
#include "cuda/mma.cuh"

namespace {

using dmtp::cuda::kAllLanes;

struct Values {
  int of[256];
};

// out[i] = in[(i + 1) % n] + in[(i + 2) % n], twice over the same memory
__global__ void neighbours_kernel(const int* in, int* out, int n) {
  DMTP_SHARED(Values, s);
  const int i = static_cast<int>(threadIdx.x);
  s.of[i] = in[blockIdx.x * n + i];
  __syncthreads();
  const int next = s.of[(i + 1) % n];
  __syncthreads();
  s.of[i] = next;
  __syncthreads();
  out[blockIdx.x * n + i] = next + s.of[(i + 1) % n];
}

// of each warp: out[lane] = the value of lane - 1, by memory
__global__ void warp_kernel(const int* in, int* out) {
  DMTP_SHARED(Values, s);
  const int i = static_cast<int>(threadIdx.x);
  s.of[i] = in[i];
  __syncwarp();
  out[i] = s.of[(i & ~31) | ((i + 31) & 31)];
}

// votes, shuffles and matches of lanes that leave at different times
__global__ void lanes_kernel(const int* in, int64_t* out, int n) {
  const int i = static_cast<int>(threadIdx.x);
  const unsigned active = __ballot_sync(kAllLanes, i < n);
  if (i >= n) {
    return;
  }
  const int value = in[i];
  int sum = value;
  for (int step = 16; step > 0; step /= 2) {
    const int other = __shfl_xor_sync(active, sum, step);
    sum += (active >> (i ^ step) & 1) != 0 ? other : 0;
  }
  out[8 * i] = sum;
  out[8 * i + 1] = __shfl_sync(active, static_cast<long long>(value) << 33, 3);
  out[8 * i + 2] = __ballot_sync(active, value % 3 == 0);
  out[8 * i + 3] = __match_any_sync(active, value % 5);
  out[8 * i + 4] = __any_sync(active, value == 7) + 2 * __all_sync(active, value < 64);
  out[8 * i + 5] = __shfl_up_sync(active, value, 2);
  out[8 * i + 6] = __shfl_down_sync(active, value, 1);
  out[8 * i + 7] = __popc(active) + 100 * __ffs(static_cast<int>(active)) + 10000 * __clz(i);
}

// every thread counts itself; the last block to end writes the sum of what all left
__global__ void grid_kernel(const int* in, int* partial, int* count, int* out) {
  const int i = static_cast<int>(threadIdx.x);
  DMTP_SHARED(Values, s);
  if (i == 0) {
    s.of[0] = 0;
  }
  __syncthreads();
  atomicAdd(&s.of[0], in[blockIdx.x * blockDim.x + i]);
  __syncthreads();
  if (i == 0) {
    partial[blockIdx.x] = s.of[0];
    __threadfence();
    atomicAdd(count, 1);
    // a barrier of the grid
    while (atomicAdd(count, 0) < static_cast<int>(gridDim.x)) {
      __nanosleep(20);
    }
    int sum = 0;
    for (unsigned block = 0; block < gridDim.x; ++block) {
      sum += partial[block];
    }
    out[blockIdx.x] = sum;
  }
}

__global__ void divergent_kernel() {
  if (threadIdx.x < 7) {
    __syncwarp();
  } else {
    __ballot_sync(kAllLanes, 1);
  }
}

__global__ void write_kernel(char* to, int64_t at) {
  to[at + threadIdx.x] = 1;
}

// c[16 x 8] += a[16 x 32 bytes] b[8 x 32 bytes]^T, rows of A and columns of B in memory one after another
template <class Mma>
__global__ void mma_kernel(const uint32_t* a, const uint32_t* b, typename Mma::Sum* c) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  dmtp::cuda::FragmentA left;
  dmtp::cuda::FragmentB right;
  for (int i = 0; i < 4; ++i) {
    left.of[i] = a[(g + i % 2 * 8) * 8 + t + i / 2 * 4];
  }
  for (int i = 0; i < 2; ++i) {
    right.of[i] = b[g * 8 + t + i * 4];
  }
  typename Mma::Sum sums[4];
  for (int i = 0; i < 4; ++i) {
    sums[i] = c[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  }
  dmtp::cuda::mma(Mma{}, sums, left, right);
  for (int i = 0; i < 4; ++i) {
    c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
  }
}

struct Pieces {
  uint4 of[2][32];
};

// Each lane copies two pieces, the second cut to `bytes`, and writes those of the lane before it once they are there.
__global__ void copies_kernel(const uint4* in, uint4* out, int bytes) {
  DMTP_SHARED(Pieces, s);
  const int lane = static_cast<int>(threadIdx.x);
  dmtp::cuda::copy_async(&s.of[0][lane], in + lane, 16);
  dmtp::cuda::commit_copies();
  dmtp::cuda::copy_async(&s.of[1][lane], in + 32 + lane, bytes);
  dmtp::cuda::commit_copies();
  DMTP_WAIT_COPIES(1);
  __syncwarp();
  out[lane] = s.of[0][(lane + 31) % 32];
  DMTP_WAIT_COPIES(0);
  __syncwarp();
  out[32 + lane] = s.of[1][(lane + 31) % 32];
}

// out[i] = the sum of what all blocks left, twice: the second time of what was made of it
__global__ void phases_kernel(int* values, int* out, dmtp::cuda::GridBarrier* barrier) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int n = static_cast<int>(gridDim.x * blockDim.x);
  for (int turn = 0; turn < 2; ++turn) {
    out[i] = 0;
    for (int j = 0; j < n; ++j) {
      out[i] += values[j];
    }
    DMTP_WAIT_FOR_GRID(barrier);
    values[i] = out[i] + i;
    DMTP_WAIT_FOR_GRID(barrier);
  }
}

template <class... Wanted, class... Given>
const char* together(void (*kernel)(Wanted...), unsigned blocks, unsigned threads, Given... arguments) {
  return dmtp::host::run({blocks, 1, 1}, {threads, 1, 1}, true, [=] { kernel(arguments...); });
}

}  // namespace

extern "C" {
const char* probe_neighbours(const int* in, int* out, int blocks, int n) {
  return dmtp::cuda::launch(neighbours_kernel, blocks, n, nullptr, in, out, n);
}
const char* probe_warp(const int* in, int* out, int n) {
  return dmtp::cuda::launch(warp_kernel, 1, n, nullptr, in, out);
}
const char* probe_lanes(const int* in, int64_t* out, int n) {
  return dmtp::cuda::launch(lanes_kernel, 1, 32, nullptr, in, out, n);
}
const char* probe_grid(const int* in, int* partial, int* count, int* out, int blocks, int n) {
  return together(grid_kernel, blocks, n, in, partial, count, out);
}
const char* probe_divergent() {
  return dmtp::cuda::launch(divergent_kernel, 1, 32, nullptr);
}
const char* probe_write(char* to, int64_t at, int threads) {
  return dmtp::cuda::launch(write_kernel, 1, threads, nullptr, to, at);
}
const char* probe_mma(int type, const void* a, const void* b, void* c) {
  const auto* left = static_cast<const uint32_t*>(a);
  const auto* right = static_cast<const uint32_t*>(b);
  using namespace dmtp::cuda;
  return type == 0   ? launch(mma_kernel<Bf16Mma>, 1, 32, nullptr, left, right, static_cast<float*>(c))
         : type == 1 ? launch(mma_kernel<Fp16Mma>, 1, 32, nullptr, left, right, static_cast<float*>(c))
                     : launch(mma_kernel<Int8Mma>, 1, 32, nullptr, left, right, static_cast<int32_t*>(c));
}
const char* probe_mma_of(int threads, const void* a, const void* b, void* c) {
  return dmtp::cuda::launch(mma_kernel<dmtp::cuda::Int8Mma>, 1, threads, nullptr, static_cast<const uint32_t*>(a),
                            static_cast<const uint32_t*>(b), static_cast<int32_t*>(c));
}
const char* probe_copies(const void* in, void* out, int bytes) {
  return dmtp::cuda::launch(copies_kernel, 1, 32, nullptr, static_cast<const uint4*>(in), static_cast<uint4*>(out),
                            bytes);
}
const char* probe_phases(int* values, int* out, void* barrier, int blocks, int threads) {
  return dmtp::cuda::launch_resident(phases_kernel, blocks, threads, nullptr, values, out,
                                     static_cast<dmtp::cuda::GridBarrier*>(barrier));
}
}
