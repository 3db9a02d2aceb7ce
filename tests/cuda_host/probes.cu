// Kernels that show what the harness of csrc/testing finds.
#include "cuda/device.cuh"

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
}
