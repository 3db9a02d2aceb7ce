#pragma once

#include <cstdint>

// Matrix instructions of a warp of fibers, with the fragments of the PTX ISA: of a row of 32 bytes of A, and a column
// of 32 bytes of B, four bytes belong to a lane at a time.
namespace dmtp::host {

enum class Half : uint8_t { bf16, fp16 };

// c[16 x 8] += a[16 x 16] b[16 x 8]. As arXiv:2512.07004 found sm_80 to do it: of eight products and what was summed
// before, each loses what lies more than 24 bits below the greatest, and so does their sum.
void mma(Half, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
// c[16 x 8] += a[16 x 32] b[32 x 8] of int8, exact until it wraps.
void mma(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
// r[i] of lane l: two 16-bit elements of matrix i, in row l / 4, columns 2 (l % 4) and the next; transposed, in column
// l / 4, rows 2 (l % 4) and the next. Lane l gives row l % 8 of matrix l / 8, 16 bytes of shared memory.
void load_matrices(uint32_t (&r)[4], const void* row, bool transposed);

}  // namespace dmtp::host
