"""Small kernels that stand for what the ops' kernels do, for the tests of the interpreter and of the profilers."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def convert_kernel(x, y, n, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, tl.load(x + o, mask=o < n).to(y.dtype.element_ty), mask=o < n)


@triton.jit
def arithmetic_kernel(a, b, out, flags, N: tl.constexpr):
    """Rows of `out` [8, N] and `flags` [4, N]: one operation each."""
    o = tl.arange(0, N)
    x, y = tl.load(a + o), tl.load(b + o)
    tl.store(out + o, x + y)
    tl.store(out + N + o, x - y)
    tl.store(out + 2 * N + o, x * y)
    tl.store(out + 3 * N + o, -x)
    tl.store(out + 4 * N + o, tl.fma(x, y, x))
    tl.store(out + 5 * N + o, tl.maximum(x, y))
    tl.store(out + 6 * N + o, tl.minimum(x, y))
    tl.store(out + 7 * N + o, x * 1.5)
    tl.store(flags + o, x < y)
    tl.store(flags + N + o, x == y)
    tl.store(flags + 2 * N + o, ~(x >= y))
    tl.store(flags + 3 * N + o, x != x)


@triton.jit
def dot_kernel(a, b, c, d, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    at = m[:, None] * N + n[None, :]
    tl.store(d + at, tl.dot(x, y, tl.load(c + at), input_precision="ieee", out_dtype=OUT))


@triton.jit
def reduce_kernel(x, out, N: tl.constexpr):
    """`out` [4] fp32: sum, max, min and sum of the sorted first half."""
    v = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(v).to(tl.float32))
    tl.store(out + 1, tl.max(v).to(tl.float32))
    tl.store(out + 2, tl.min(v).to(tl.float32))
    half, _ = tl.split(tl.trans(tl.reshape(tl.sort(v), [2, N // 2])))
    tl.store(out + 3, tl.sum(half.to(tl.float32)))


@triton.jit
def _first_greatest(value, index, other, other_index):
    keep = (value > other) | ((value == other) & (index < other_index))
    return tl.where(keep, value, other), tl.where(keep, index, other_index)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def argmax_kernel(x, value, index, running, ROWS: tl.constexpr, N: tl.constexpr):
    r, o = tl.arange(0, ROWS), tl.arange(0, N)
    v = tl.load(x + r[:, None] * N + o[None, :])
    best, at = tl.reduce((v, tl.broadcast_to(o[None, :], [ROWS, N])), 1, _first_greatest)
    tl.store(value + r, best)
    tl.store(index + r, at)
    tl.store(running + r[:, None] * N + o[None, :], tl.associative_scan(v, 1, _greater))


@triton.jit
def atomic_kernel(x, greatest, total, N: tl.constexpr):
    o = tl.arange(0, N)
    v = tl.load(x + tl.program_id(0) * N + o)
    tl.atomic_max(greatest + o % 4, v)
    tl.atomic_add(total + o % 4, v, mask=o < N - 4)


@triton.jit
def masked_kernel(x, y, n, N: tl.constexpr):
    """Masked-off lanes point 2^40 elements away."""
    o = tl.arange(0, N)
    far = o.to(tl.int64) << 40
    tl.store(y + o, tl.load(x + far, mask=o < n, other=-7.0))
    tl.store(x + far, tl.load(x + far, mask=o < n) + 1, mask=o < n)
    tl.atomic_add(x + far, 1.0, mask=o < n)


@triton.jit
def scalar_kernel(out, eps, scale, flag, n):
    tl.store(out, eps.to(tl.float32) * scale)
    tl.store(out + 1, tl.cast(flag, tl.float32))
    tl.store(out + 2, n.to(tl.float32))


@triton.jit
def loop_kernel(out, n, STEP: tl.constexpr, WIDE: tl.constexpr):
    for i in range(0, n, STEP):
        at = i.to(tl.int64) if WIDE else i
        tl.store(out + i // STEP, at * 1000000 * 4096)


@triton.jit
def round_kernel(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, libdevice.rint(tl.load(x + o)))


@triton.jit
def packed_shift_kernel(x, y, N: tl.constexpr):
    """High and low nibbles of bytes, four bytes a shift."""
    o = tl.arange(0, N)
    v = tl.load(x + o)
    high = tl.inline_asm_elementwise("shr.b32 $0, $1, 4;", "=r,r", [v], dtype=tl.uint8, is_pure=True, pack=4)
    tl.store(y + o, high & 15)
    low = tl.inline_asm_elementwise("shl.b32 $0, $1, 2;", "=r,r", [v], dtype=tl.uint8, is_pure=True, pack=4)
    tl.store(y + N + o, low & 0xFC)


@triton.jit
def row_sum_kernel(w, h, y, rows, stride, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y[v] = w[v] . h, `ROWS` rows a program."""
    v = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS], tl.float32)
    for start in range(0, H, BLOCK):
        o = start + tl.arange(0, BLOCK)
        at = v.to(tl.int64)[:, None] * stride + o[None, :]
        row = tl.load(w + at, mask=(v < rows)[:, None] & (o < H)[None, :], other=0.0)
        acc += tl.sum(row.to(tl.float32) * tl.load(h + o, mask=o < H, other=0.0).to(tl.float32)[None, :], axis=1)
    tl.store(y + v, acc, mask=v < rows)


@triton.jit
def two_pass_kernel(w, y, rows, stride, H: tl.constexpr, BLOCK: tl.constexpr):
    """Reads each row twice: for its mean, then for its distance from it."""
    row = w + tl.program_id(0).to(tl.int64) * stride
    mean = 0.0
    for start in range(0, H, BLOCK):
        mean += tl.sum(tl.load(row + start + tl.arange(0, BLOCK)).to(tl.float32)) / H
    distance = 0.0
    for start in range(0, H, BLOCK):
        distance += tl.sum(tl.abs(tl.load(row + start + tl.arange(0, BLOCK)).to(tl.float32) - mean))
    tl.store(y + tl.program_id(0), distance)


@triton.jit
def column_kernel(w, y, stride, rows, ROWS: tl.constexpr):
    """Sums one column a program: a few bytes of each sector."""
    r = tl.arange(0, ROWS)
    value = tl.load(w + r.to(tl.int64) * stride + tl.program_id(0), mask=r < rows, other=0.0)
    tl.store(y + tl.program_id(0), tl.sum(value.to(tl.float32)))


@triton.jit
def over_read_kernel(w, y, rows, stride, H: tl.constexpr, BLOCK: tl.constexpr):
    """Reads past the end of a row and multiplies by zero: the result is right, the access is not."""
    o = tl.arange(0, BLOCK)
    row = tl.load(w + tl.program_id(0).to(tl.int64) * stride + o)
    tl.store(y + tl.program_id(0), tl.sum(tl.where(o < H, row, 0.0).to(tl.float32)))


@triton.jit
def narrow_offset_kernel(x, y, stride, N: tl.constexpr):
    """A row offset in 32 bits."""
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o * stride))


@triton.jit
def table_kernel(table, y, N: tl.constexpr):
    """Pointers read from memory."""
    o = tl.arange(0, N)
    p = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.bfloat16))
    tl.store(y + tl.program_id(0) * N + o, tl.load(p + o).to(tl.float32))


@triton.jit
def ordered_kernel(x):
    """Each program adds what the one before it wrote."""
    i = tl.program_id(0)
    tl.store(x + i + 1, tl.load(x + i) + 1)


@triton.jit
def capability_kernel(y):
    if tl.target_info.cuda_capability_geq(8, 9):
        tl.store(y, 89)
    else:
        tl.store(y, 80)
