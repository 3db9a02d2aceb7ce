#pragma once

#include <atomic>

#include "cuda/device.cuh"

// Blocks of a cluster, whose shared memory all of them reach: sm_90 and later. Elsewhere a cluster is one block. And
// shared memory whose size is the launch's.
namespace dmtp::cuda {

#ifdef DMTP_CUDA_HOST

#define DMTP_WAIT_FOR_CLUSTER() dmtp::host::cluster_barrier({__FILE__, __LINE__})

inline int cluster_rank() {
  return host::current->rank;
}

template <class T>
T* of_block(T* mine, int rank) {
  return static_cast<T*>(host::of_block(mine, rank));
}

template <auto kKernel>
int most_cluster(int, int64_t) {
  return host::kMostCluster;
}

inline int64_t shared_limit() {
  return host::kSharedLimit;
}

inline int processors() {
  return host::processors;
}

template <class... Wanted, class... Given>
const char* launch_clusters(void (*kernel)(Wanted...), int64_t blocks, int cluster, int threads, int64_t shared_bytes,
                            void*, Given... arguments) {
  if (blocks > kMostBlocks) {
    return kTooManyBlocks;
  }
  const host::Index grid{static_cast<unsigned>(blocks), 1, 1}, block{static_cast<unsigned>(threads), 1, 1};
  return host::run(grid, block, false, [=] { kernel(static_cast<Wanted>(arguments)...); }, {cluster, shared_bytes});
}

#else

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DMTP_HAS_CLUSTERS 1
#else
#define DMTP_HAS_CLUSTERS 0
#endif

// dynamic shared memory of the block; the type has no constructor, and the launch asks for its size or more
#define DMTP_DYNAMIC_SHARED(Type, name)                                 \
  extern __shared__ __align__(128) unsigned char dmtp_dynamic_shared[]; \
  Type& name = *reinterpret_cast<Type*>(dmtp_dynamic_shared)

// All threads of the cluster's blocks that have not returned; what they wrote to each other's shared memory before is
// seen behind it. Lanes of a warp need not come together.
#define DMTP_WAIT_FOR_CLUSTER() dmtp::cuda::wait_for_cluster()

__device__ inline void wait_for_cluster() {
#if DMTP_HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Of the block in its cluster.
__device__ inline int cluster_rank() {
#if DMTP_HAS_CLUSTERS
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// The same shared memory of another block of the cluster, which has begun and has not ended when it is touched: between
// two DMTP_WAIT_FOR_CLUSTER.
template <class T>
__device__ inline T* of_block(T* mine, int rank) {
#if DMTP_HAS_CLUSTERS
  uint64_t theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
  return reinterpret_cast<T*>(theirs);
#else
  return mine;
#endif
}

constexpr int kDevices = 64;

// What `ask` says of the current device; it is asked once.
template <class Ask>
int asked_once(Ask ask) {
  static std::atomic<int> known[kDevices];
  int device = 0;
  cudaGetDevice(&device);
  if (device >= kDevices) {
    return ask();
  }
  if (known[device] == 0) {
    known[device] = ask();
  }
  return known[device];
}

// Bytes of shared memory that a block may ask for, static variables among them.
inline int64_t shared_limit() {
  return asked_once([] { return device_has(cudaDevAttrMaxSharedMemoryPerBlockOptin); });
}

inline int processors() {
  return asked_once([] { return device_has(cudaDevAttrMultiProcessorCount); });
}

// Lets a kernel have this much dynamic shared memory.
inline cudaError_t allow_shared(const void* kernel, const cudaFuncAttributes& has, int64_t bytes) {
  if (bytes <= has.maxDynamicSharedSizeBytes) {
    return cudaSuccess;
  }
  // always the same number: another thread may launch the kernel with less
  const int64_t most = shared_limit() - static_cast<int64_t>(has.sharedSizeBytes);
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
}

// A launch by clusters of as many blocks as `how` is given.
inline cudaLaunchConfig_t clustered(cudaLaunchAttribute& how, int64_t blocks, int cluster, int threads,
                                    int64_t shared_bytes, void* stream) {
  how = {};
  how.id = cudaLaunchAttributeClusterDimension;
  how.val.clusterDim.x = static_cast<unsigned>(cluster);
  how.val.clusterDim.y = how.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &how;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return config;
}

// The most blocks that a cluster of the kernel has: one too where the device runs it as code of an older generation,
// compiled from its PTX, or where no eight of its blocks are ever there at once (a slice of a device).
template <auto kKernel>
int most_cluster(int threads, int64_t shared_bytes) {
  return asked_once([=] {
    constexpr int kMost = 8;
    const auto* function = reinterpret_cast<const void*>(kKernel);
    cudaFuncAttributes has{};
    cudaLaunchAttribute how;
    const cudaLaunchConfig_t config = clustered(how, kMost, kMost, threads, shared_bytes, nullptr);
    int fit = 0;
    const bool asked = cudaFuncGetAttributes(&has, function) == cudaSuccess && has.ptxVersion >= 90 &&
                       device_has(cudaDevAttrClusterLaunch) != 0 &&
                       allow_shared(function, has, shared_bytes) == cudaSuccess &&
                       cudaOccupancyMaxActiveClusters(&fit, kKernel, &config) == cudaSuccess;
    if (!asked) {
      cudaGetLastError();  // or the next one to look would find it
    }
    return asked && fit > 0 ? kMost : 1;
  });
}

// `blocks` is a multiple of `cluster`. Null, or what the runtime says of the launch.
template <class... Wanted, class... Given>
const char* launch_clusters(void (*kernel)(Wanted...), int64_t blocks, int cluster, int threads, int64_t shared_bytes,
                            void* stream, Given... arguments) {
  if (blocks > kMostBlocks) {
    return kTooManyBlocks;
  }
  const auto* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes has{};
  cudaError_t error = cudaFuncGetAttributes(&has, function);
  error = error == cudaSuccess ? allow_shared(function, has, shared_bytes) : error;
  if (error != cudaSuccess) {
    return cudaGetErrorString(error);
  }
  cudaLaunchAttribute how;
  const cudaLaunchConfig_t config = clustered(how, blocks, cluster, threads, shared_bytes, stream);
  error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

#endif

}  // namespace dmtp::cuda
