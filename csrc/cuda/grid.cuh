#pragma once

#include <atomic>

#include "cuda/device.cuh"

// Grids whose blocks are all resident, a barrier for them, and kernels that start before the one in front has ended.
namespace dmtp::cuda {

// Zero before the first launch that uses it; each leaves it fit for the next, of whatever size.
struct GridBarrier {
  unsigned arrived, generation;
};

__device__ inline void wait_for_grid(GridBarrier* barrier) {
  // what the block wrote is written before its first thread says so
  __syncthreads();
  if (threadIdx.x == 0) {
    volatile unsigned* generation = &barrier->generation;
    const unsigned before = *generation;
    __threadfence();
    if (atomicAdd(&barrier->arrived, 1u) + 1 == gridDim.x) {
      atomicExch(&barrier->arrived, 0u);
      __threadfence();
      atomicAdd(&barrier->generation, 1u);
    } else {
      while (*generation == before) {
        __nanosleep(32);
      }
    }
    __threadfence();
  }
  __syncthreads();
}

#ifdef DMTP_CUDA_HOST

#define DMTP_WAIT_FOR_GRID(barrier) \
  (dmtp::host::skipped({__FILE__, __LINE__}) ? void() : dmtp::cuda::wait_for_grid(barrier))
#define DMTP_AFTER_LAST_KERNEL()

inline bool cooperates() {
  return true;
}

template <auto kKernel>
int64_t resident_blocks(int) {
  return host::resident_blocks();
}

template <class... Wanted, class... Given>
const char* launch_resident(void (*kernel)(Wanted...), int64_t blocks, int threads, void*, Given... arguments) {
  const host::Index grid{static_cast<unsigned>(blocks), 1, 1}, block{static_cast<unsigned>(threads), 1, 1};
  return host::run(grid, block, true, [=] { kernel(static_cast<Wanted>(arguments)...); });
}

template <class... Wanted, class... Given>
const char* launch_early(void (*kernel)(Wanted...), int64_t blocks, int threads, void* stream, Given... arguments) {
  return launch(kernel, blocks, threads, stream, arguments...);
}

#else

#define DMTP_WAIT_FOR_GRID(barrier) dmtp::cuda::wait_for_grid(barrier)

// First in a kernel of `launch_early`: lets the next one start, and waits until all before it have ended.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DMTP_AFTER_LAST_KERNEL()               \
  do {                                         \
    cudaTriggerProgrammaticLaunchCompletion(); \
    cudaGridDependencySynchronize();           \
  } while (false)
#else
#define DMTP_AFTER_LAST_KERNEL()
#endif

inline bool cooperates() {
  return device_has(cudaDevAttrCooperativeLaunch) != 0;
}

// Blocks that the current device holds at once; it is asked once.
template <auto kKernel>
int64_t resident_blocks(int threads) {
  constexpr int kDevices = 64;
  static std::atomic<int64_t> known[kDevices];
  int device = 0;
  cudaGetDevice(&device);
  std::atomic<int64_t>& blocks = known[device % kDevices];
  if (device >= kDevices || blocks == 0) {
    int each = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kKernel, threads, 0);
    blocks = static_cast<int64_t>(each) * device_has(cudaDevAttrMultiProcessorCount);
  }
  return blocks;
}

template <class... Wanted, class... Given>
const char* launch_as(cudaLaunchAttribute how, void (*kernel)(Wanted...), int64_t blocks, int threads, void* stream,
                      Given... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &how;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// All blocks at once, or an error.
template <class... Wanted, class... Given>
const char* launch_resident(void (*kernel)(Wanted...), int64_t blocks, int threads, void* stream, Given... arguments) {
  cudaLaunchAttribute how{};
  how.id = cudaLaunchAttributeCooperative;
  how.val.cooperative = 1;
  return launch_as(how, kernel, blocks, threads, stream, arguments...);
}

// May start before the kernel in front has ended, where the device can (sm_90 and later).
template <class... Wanted, class... Given>
const char* launch_early(void (*kernel)(Wanted...), int64_t blocks, int threads, void* stream, Given... arguments) {
  if (device_has(cudaDevAttrComputeCapabilityMajor) < 9) {
    return launch(kernel, blocks, threads, stream, arguments...);
  }
  cudaLaunchAttribute how{};
  how.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  how.val.programmaticStreamSerializationAllowed = 1;
  return launch_as(how, kernel, blocks, threads, stream, arguments...);
}

#endif

}  // namespace dmtp::cuda
