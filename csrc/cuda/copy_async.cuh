#pragma once

#include "cuda/device.cuh"

// Copies from global to shared memory that run while a thread goes on, sm_80 and later.
namespace dmtp::cuda {

#ifdef DMTP_CUDA_HOST

using host::commit_copies;
using host::copy_async;
#define DMTP_WAIT_COPIES(groups) dmtp::host::wait_copies({__FILE__, __LINE__}, groups)
#define DMTP_WAIT_COPIES_BUT(groups) DMTP_WAIT_COPIES(groups)

#else

// 16 bytes, of which the first `bytes` come from memory and the rest are zero; both addresses are multiples of 16.
__device__ inline void copy_async(void* to, const void* from, int bytes) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}

__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kGroups>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Until no more than the last `groups` committed groups of this thread are on their way.
#define DMTP_WAIT_COPIES(groups) dmtp::cuda::wait_copies<groups>()

// The same for 0, 1 or 2 groups, known at run time.
__device__ inline void wait_copies_but(int groups) {
  if (groups == 0) {
    wait_copies<0>();
  } else if (groups == 1) {
    wait_copies<1>();
  } else {
    wait_copies<2>();
  }
}
#define DMTP_WAIT_COPIES_BUT(groups) dmtp::cuda::wait_copies_but(groups)

#endif

}  // namespace dmtp::cuda
