// Kernels that show what the harness of csrc/testing finds in memory that blocks share, and what it records.
#include "cuda/cluster.cuh"
#include "cuda/convert.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/mma.cuh"

namespace {

struct Values {
  int of[256];
};

struct Pieces {
  uint4 of[32];
};

struct alignas(16) Rows {
  uint16_t of[32][8];
};

// r[i] of each lane, plain and transposed, of rows that lie `skipped` bytes on, or in memory that is not shared
__global__ void matrices_kernel(const uint16_t* in, uint32_t* out, int skipped, bool from_shared) {
  DMTP_SHARED(Rows, s);
  const int lane = static_cast<int>(threadIdx.x);
  for (int column = 0; column < 8; ++column) {
    s.of[lane][column] = in[8 * lane + column];
  }
  const char* row = reinterpret_cast<const char*>(from_shared ? s.of[lane] : in + 8 * lane) + skipped;
  uint32_t plain[4], transposed[4];
  dmtp::cuda::load_matrices(plain, row);
  dmtp::cuda::load_transposed(transposed, row);
  for (int i = 0; i < 4; ++i) {
    out[4 * lane + i] = plain[i];
    out[128 + 4 * lane + i] = transposed[i];
  }
}

// out of each block: what the next block of its cluster made of what this one left, and of what that one left itself
__global__ void cluster_kernel(const int* in, int* out) {
  DMTP_DYNAMIC_SHARED(Values, s);
  DMTP_SHARED(Values, written);
  const int i = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  const int rank = dmtp::cuda::cluster_rank(), blocks = dmtp::host::kMostCluster, at = blockIdx.x * n + i;
  s.of[i] = in[at];
  DMTP_WAIT_FOR_CLUSTER();
  const Values* second = dmtp::cuda::of_block(&s, (rank + 2) % blocks);
  const int theirs = dmtp::cuda::of_block(&s, (rank + 1) % blocks)->of[(i + 1) % n];
  dmtp::cuda::of_block(&written, (rank + 1) % blocks)->of[i] = 1000 * rank + theirs;
  DMTP_WAIT_FOR_CLUSTER();
  out[at] = 1000 * written.of[i] + second->of[i];
  DMTP_WAIT_FOR_CLUSTER();
}

// Some threads return before the others meet, in each block; one of the last block's does not come where `late`.
__global__ void stragglers_kernel(int* out, bool late) {
  DMTP_SHARED(Values, s);
  const int i = static_cast<int>(threadIdx.x), rank = dmtp::cuda::cluster_rank();
  if (i % 3 == 1) {
    return;
  }
  s.of[i] = 10 * rank + i;
  if (late && rank + 1 == dmtp::host::kMostCluster && i == 0) {
    __syncthreads();
  } else {
    DMTP_WAIT_FOR_CLUSTER();
  }
  out[blockIdx.x * blockDim.x + i] = dmtp::cuda::of_block(s.of, rank ^ 1)[i];
  DMTP_WAIT_FOR_CLUSTER();
}

// Reaches for the block `rank` of the cluster at an address that is no variable, or writes at `at` of its own memory.
__global__ void reach_kernel(int* global, int rank, int at) {
  DMTP_DYNAMIC_SHARED(char, s);
  DMTP_SHARED(Values, fixed);
  fixed.of[0] = 0;
  if (rank >= 0) {
    dmtp::cuda::of_block(global == nullptr ? fixed.of : global, rank);
  }
  (&s)[at] = 1;
}

// to[i] = from[i] by each of the ways that are recorded
__global__ void accesses_kernel(dmtp::Tensor from, dmtp::Tensor to, const uint4* in, uint4* out, int bytes) {
  DMTP_SHARED(Pieces, s);
  const int i = static_cast<int>(threadIdx.x);
  const int64_t at = blockIdx.x * blockDim.x + i;
  if (from.dtype == dmtp::DType::i32 || from.dtype == dmtp::DType::i64) {
    dmtp::cuda::set_index(to, at, dmtp::cuda::index_of(from, at));
  } else {
    dmtp::cuda::store_as(to.dtype, to.data, at, dmtp::cuda::load_as<float>(from.dtype, from.data, at));
  }
  dmtp::cuda::copy_async(&s.of[i], in + at, bytes);
  dmtp::cuda::commit_copies();
  DMTP_WAIT_COPIES(0);
  dmtp::cuda::store_global(out + at, s.of[i]);
}

}  // namespace

extern "C" {
const char* probe_matrices(const void* in, void* out, int skipped, int from_shared) {
  return dmtp::cuda::launch(matrices_kernel, 1, 32, nullptr, static_cast<const uint16_t*>(in),
                            static_cast<uint32_t*>(out), skipped, from_shared != 0);
}
const char* probe_cluster(const int* in, int* out, int blocks, int cluster, int threads, int64_t shared_bytes) {
  return dmtp::cuda::launch_clusters(cluster_kernel, blocks, cluster, threads, shared_bytes, nullptr, in, out);
}
const char* probe_stragglers(int* out, int blocks, int threads, int late) {
  return dmtp::cuda::launch_clusters(stragglers_kernel, blocks, 8, threads, 0, nullptr, out, late != 0);
}
const char* probe_reach(int* global, int rank, int at, int cluster, int64_t shared_bytes) {
  return dmtp::cuda::launch_clusters(reach_kernel, cluster, cluster, 1, shared_bytes, nullptr, global, rank, at);
}
const char* probe_accesses(int dtype, const void* from, void* to, const void* in, void* out, int blocks, int bytes) {
  dmtp::Tensor read{}, written{};
  read.data = const_cast<void*>(from);
  written.data = to;
  read.dtype = written.dtype = static_cast<dmtp::DType>(dtype);
  read.stride[0] = written.stride[0] = 1;
  return dmtp::cuda::launch(accesses_kernel, blocks, 32, nullptr, read, written, static_cast<const uint4*>(in),
                            static_cast<uint4*>(out), bytes);
}
int probe_device(int64_t* shared) {
  *shared = dmtp::cuda::shared_limit();
  return dmtp::cuda::processors();
}
}
