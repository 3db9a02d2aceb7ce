#pragma once

#include "cuda/device.cuh"
#ifdef DMTP_CUDA_HOST
#include "testing/mma.h"
#endif

// Matrix instructions of a warp, sm_80 and later: c[16 x 8] += a[16 x 32 bytes] b[32 bytes x 8]. Lane 4 g + t has, of
// rows g and g + 8 of a, and of column g of b, bytes 4 t .. 4 t + 3 and 16 more on, and of c columns 2 t and 2 t + 1.
namespace dmtp::cuda {

struct FragmentA {
  uint32_t of[4];  // row g, row g + 8, and both 16 bytes on
};
struct FragmentB {
  uint32_t of[2];
};

struct Bf16Mma {
  using Sum = float;
};
struct Fp16Mma {
  using Sum = float;
};
struct Int8Mma {
  using Sum = int32_t;
};

// bf16 and fp16: fp32 sums, in no order that is promised, of exact products (dmtp_kernels/ops/lm_head/README.md has
// their error); int8: exact.
#ifdef DMTP_CUDA_HOST
inline void mma(Bf16Mma, float (&c)[4], const FragmentA& a, const FragmentB& b) {
  host::mma(host::Half::bf16, c, a.of, b.of);
}
inline void mma(Fp16Mma, float (&c)[4], const FragmentA& a, const FragmentB& b) {
  host::mma(host::Half::fp16, c, a.of, b.of);
}
inline void mma(Int8Mma, int32_t (&c)[4], const FragmentA& a, const FragmentB& b) {
  host::mma(c, a.of, b.of);
}
inline void load_matrices(uint32_t (&r)[4], const void* row) {
  host::load_matrices(r, row, false);
}
inline void load_transposed(uint32_t (&r)[4], const void* row) {
  host::load_matrices(r, row, true);
}
#else
__device__ inline void mma(Bf16Mma, float (&c)[4], const FragmentA& a, const FragmentB& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b.of[0]), "r"(b.of[1]));
}
__device__ inline void mma(Fp16Mma, float (&c)[4], const FragmentA& a, const FragmentB& b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b.of[0]), "r"(b.of[1]));
}
__device__ inline void mma(Int8Mma, int32_t (&c)[4], const FragmentA& a, const FragmentB& b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b.of[0]), "r"(b.of[1]));
}

// Four matrices of 8 x 8 elements of 16 bits from shared memory: lane l gives row l % 8 of matrix l / 8, 16 bytes at a
// multiple of 16, and gets as r[i] of matrix i the elements in row l / 4, columns 2 (l % 4) and the next.
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
// The same of the transposed matrices: in column l / 4, rows 2 (l % 4) and the next.
__device__ inline void load_transposed(uint32_t (&r)[4], const void* row) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
#endif

}  // namespace dmtp::cuda
