"""With `install()` the interpreter computes what a GPU computes; without it most of these fail."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl

from dmtp_kernels.testing import interpreter
from tests.testing import kernels

interpreter.install()
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype) if dtype.is_floating_point else (x * 40).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def bit_patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)


def hard_fp32() -> torch.Tensor:
    """Random bits, and the ties, carries, subnormals and largest numbers around every bf16."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)
    near = (np.arange(0, 65536, 17, dtype=np.uint32)[:, None] << 16) + np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)
    return torch.from_numpy(np.concatenate([bits, near.ravel()]).view(np.float32))


CASTS = {
    "bf16 to fp32": (bit_patterns(BF16), F32),
    "bf16 copied": (bit_patterns(BF16), BF16),
    "fp16 to fp32": (bit_patterns(F16), F32),
    "fp32 to bf16": (hard_fp32(), BF16),
    "fp32 to fp16": (hard_fp32(), F16),
    "fp64 to bf16": (random(4096, dtype=F64), BF16),
    "fp16 to bf16": (bit_patterns(F16), BF16),
    "bf16 to fp16": (random(512, dtype=BF16), F16),
    "int8 to bf16": (torch.arange(-128, 128, dtype=torch.int8), BF16),
    "int64 to bf16": (torch.arange(-3000, 3000), BF16),
    "bf16 to int32": (random(512, dtype=BF16) * 90, torch.int32),
    "int64 to fp32": (torch.arange(2**40, 2**40 + 999), F32),
    "fp32 to int8": (random(512) * 30, torch.int8),
    "int32 to int8": (torch.arange(-999, 999, dtype=torch.int32), torch.int8),
    "bool to fp32": (torch.tensor([True, False, True]), F32),
    "int32 to bool": (torch.tensor([0, 1, 7, -1], dtype=torch.int32), torch.bool),
}


@pytest.mark.parametrize("name", CASTS)
def test_loads_stores_and_casts_round_like_torch(name: str) -> None:
    x, dtype = CASTS[name]
    y = torch.zeros(x.numel(), dtype=dtype)
    kernels.convert_kernel[(1,)](x, y, x.numel(), B=1 << (x.numel() - 1).bit_length())
    same(y, x.to(dtype))


def test_fp64_to_bf16_rounds_once() -> None:
    # just above a tie of bf16, where rounding through fp32 would land on the tie
    x = torch.tensor([1 + 2**-8 + 2**-30, 1 + 2**-8 - 2**-30, 1 + 2**-8], dtype=F64)
    y = torch.zeros(3, dtype=BF16)
    kernels.convert_kernel[(1,)](x, y, 3, B=4)
    assert y.tolist() == [1 + 2**-7, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_arithmetic_is_on_values(dtype: torch.dtype) -> None:
    n = 256
    x, y = random(n, dtype=dtype), random(n, dtype=dtype, seed=1)
    x[:4], y[:4] = torch.tensor([NAN, 1.0, 2.0, -0.0]), torch.tensor([1.0, NAN, 2.0, 0.0])
    out, flags = torch.zeros(8, n, dtype=dtype), torch.zeros(4, n, dtype=torch.bool)
    kernels.arithmetic_kernel[(1,)](x, y, out, flags, n)
    # fused: rounded once, from the exact value
    exact = x.numpy(force=True).astype(np.longdouble) if dtype != BF16 else x.double().numpy().astype(np.longdouble)
    fused = torch.from_numpy((exact * y.double().numpy() + exact).astype(np.float64)).to(dtype)
    # a GPU's maximum drops NaN
    truth = [x + y, x - y, x * y, 0 - x, fused, torch.fmax(x, y), torch.fmin(x, y), x * 1.5]
    for got, want in zip(out, truth, strict=True):
        same(got, want)
    for got_flag, want_flag in zip(flags, [x < y, x == y, ~(x >= y), x.isnan()], strict=True):
        same(got_flag, want_flag)


def test_fma_rounds_once() -> None:
    # x * y + x: a product rounded on its own loses the last term
    x, y = torch.full((4,), 1 + 2.0**-23), torch.full((4,), -1 + 2.0**-12)
    out, flags = torch.zeros(8, 4), torch.zeros(4, 4, dtype=torch.bool)
    kernels.arithmetic_kernel[(1,)](x, y, out, flags, 4)
    assert out[4].eq(2.0**-12 + 2.0**-35).all() and (x * y + x).eq(2.0**-12).all()


DOTS = {
    "bf16": (BF16, F32, tl.float32),
    "fp16": (F16, F32, tl.float32),
    "fp32": (F32, F32, tl.float32),
    "int8": (torch.int8, torch.int32, tl.int32),
}


@pytest.mark.parametrize("name", DOTS)
def test_dot_with_an_accumulator(name: str) -> None:
    dtype, accumulator, out = DOTS[name]
    a, b = random(16, 64, dtype=dtype), random(64, 32, dtype=dtype, seed=1)
    c, d = random(16, 32, dtype=accumulator, seed=2), torch.zeros(16, 32, dtype=accumulator)
    kernels.dot_kernel[(1,)](a, b, c, d, 16, 32, 64, out)
    truth = a.double() @ b.double() + c.double()
    torch.testing.assert_close(d.double(), truth, rtol=0, atol=0 if name == "int8" else 2e-5 * float(truth.abs().max()))


def test_int8_dot_wraps_at_32_bits() -> None:
    a, b = torch.full((16, 16), 127, dtype=torch.int8), torch.full((16, 16), 127, dtype=torch.int8)
    c, d = torch.full((16, 16), 2**31 - 1, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32)
    kernels.dot_kernel[(1,)](a, b, c, d, 16, 16, 16, tl.int32)
    assert d.eq(2**31 - 1 + 16 * 127 * 127 - 2**32).all()


@pytest.mark.parametrize("dtype", [BF16, F16, F32, torch.int32])
def test_reductions_and_sort(dtype: torch.dtype) -> None:
    x, out = random(64, dtype=dtype), torch.zeros(4)
    if dtype.is_floating_point:
        x[7] = NAN
        kernels.reduce_kernel[(1,)](x, out, 64)
        # NaN is no maximum
        assert out[1] == x[~x.isnan()].max() and out[2] == x[~x.isnan()].min() and out[0].isnan()
        x[7] = 0.5
    kernels.reduce_kernel[(1,)](x, out, 64)
    assert out[1] == x.max() and out[2] == x.min()
    ordered = x.double().sort().values
    tolerance = {BF16: 0.5, F16: 0.05, F32: 1e-4, torch.int32: 0}[dtype]
    assert abs(float(out[0]) - float(ordered.sum())) <= tolerance
    assert abs(float(out[3]) - float(ordered[:32].sum())) <= tolerance


def test_custom_reductions_and_scans() -> None:
    x = torch.randint(0, 5, (8, 64), generator=torch.Generator().manual_seed(0)).float()
    value, index, running = torch.zeros(8), torch.zeros(8, dtype=torch.int32), torch.zeros(8, 64)
    kernels.argmax_kernel[(1,)](x, value, index, running, 8, 64)
    same(value, x.amax(1))
    assert index.tolist() == [row.index(max(row)) for row in x.tolist()]
    same(running, x.cummax(1).values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_atomics(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    x = torch.randint(info.min // 32, info.max // 32, (64,), generator=torch.Generator().manual_seed(0), dtype=dtype)
    greatest, total = torch.full((4,), info.min, dtype=dtype), torch.zeros(4, dtype=dtype)
    kernels.atomic_kernel[(4,)](x, greatest, total, 16)
    same(greatest, x.reshape(-1, 4).amax(0))
    kept = x.reshape(4, 16)[:, :12].reshape(-1, 4)
    same(total, kept.sum(0).to(dtype))


def test_masked_lanes_touch_nothing() -> None:
    x, y = torch.full((1,), 3.0), torch.zeros(8)
    kernels.masked_kernel[(1,)](x, y, 1, 8)
    assert y.tolist() == [3.0, *[-7.0] * 7] and x.item() == 5.0


def test_scalar_arguments_have_device_types() -> None:
    out = torch.zeros(3)
    kernels.scalar_kernel[(1,)](out, 0.1, 3.0, True, 5)
    # fp32 times fp32, not a double rounded at the end
    assert out.tolist() == [float(np.float32(0.1) * np.float32(3.0)), 1.0, 5.0]


@pytest.mark.parametrize("wide", [False, True])
def test_loop_variables_wrap_at_their_width(wide: bool) -> None:
    out = torch.zeros(4, dtype=torch.int64)
    kernels.loop_kernel[(1,)](out, 64, 16, wide)
    exact = [i * 1000000 * 4096 for i in range(0, 64, 16)]
    assert out.tolist() == (exact if wide else [(e + 2**31) % 2**32 - 2**31 for e in exact])


def test_libdevice_rounds_half_to_even() -> None:
    x, y = torch.tensor([0.5, 1.5, 2.5, -0.5, 3.7, -2.5, 1e9, 8388609.0]), torch.zeros(8)
    kernels.round_kernel[(1,)](x, y, 8)
    same(y, x.round())


def test_shifts_of_packed_bytes() -> None:
    x, y = torch.arange(256, dtype=torch.int32).to(torch.uint8), torch.zeros(2, 256, dtype=torch.uint8)
    kernels.packed_shift_kernel[(1,)](x, y, 256)
    same(y, torch.stack([x >> 4, x << 2]))


def test_a_second_install_changes_nothing() -> None:
    from triton.runtime import interpreter as ti

    before: dict[str, Any] = dict(vars(ti.InterpreterBuilder))
    interpreter.install()
    assert dict(vars(ti.InterpreterBuilder)) == before
