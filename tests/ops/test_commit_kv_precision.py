"""commit_kv where rows are not copied bit for bit: fp8 codes, scales, the norm and the rotation of K rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.commit_kv import BAD_POSITION, commit_kv
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.ops.commit_kv_oracle import model, same
from tests.ops.conftest import INTERPRETED

KERNEL_OPS = ("commit_kv",)
EVERY_CAPABILITY = True
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def codes(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The nearest finite number of the format by search over all of them, ties to the even code."""
    table = torch.arange(128, dtype=torch.uint8).view(kind).double()
    table = table[table.isfinite()]
    size = values.double().abs()
    above = torch.searchsorted(table, size.clamp(max=float(table[-1]))).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - size, size - table[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)) | (size >= table[-1]), above, below)
    nearest = torch.where(values.signbit(), nearest + 128, nearest)
    return torch.where(values.isnan(), 0x7F, nearest).to(torch.uint8)


def place(rows: torch.Tensor, cache: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Commit rows[B, R, Hkv, D] as K and as V, one after the other; both caches after it."""
    batch, width = rows.shape[:2]
    caches = cache.clone(), cache.clone()
    dst = torch.arange(batch * width).view(batch, width)
    error = commit_kv([rows], [rows], [caches[0]], [caches[1]], torch.full((batch,), width), dst, **options)
    assert error.eq(0).all()
    return caches


@FP8
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_row_170_every_16_bit_value_becomes_the_nearest_code(kind: torch.dtype, dtype: torch.dtype) -> None:
    # https://github.com/triton-lang/triton/issues/8322: conversions differ between hardware, torch and interpreter
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    rows = values.view(1, 32, 8, 256)
    one = torch.ones(())
    for cache in place(rows, torch.zeros(32, 8, 256, dtype=kind), k_scale=one, v_scale=one):
        assert torch.equal(cache.view(torch.uint8).flatten(), codes(values, kind))


@FP8
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])
def test_ties_and_neighbours_of_ties(kind: torch.dtype, dtype: torch.dtype) -> None:
    table = torch.arange(128, dtype=torch.uint8).view(kind).float()
    table = table[table.isfinite()]
    ties = (table[1:] + table[:-1]) / 2
    infinity = torch.tensor(float("inf"))
    around = [table, ties, ties.nextafter(infinity), ties.nextafter(-infinity), table.nextafter(infinity)]
    values = torch.cat([*around, torch.tensor([1e30, float("inf"), float("nan"), 1e-45, 0.0])])
    values = torch.cat((values, -values)).to(dtype)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(1, -1, 2, 8)
    one = torch.ones(())
    for cache in place(rows, torch.zeros(rows.shape[1], 2, 8, dtype=kind), k_scale=one, v_scale=one):
        assert torch.equal(cache.view(torch.uint8).flatten(), codes(rows.flatten(), kind))


SCALES = {
    "scalar": torch.tensor(0.3),
    "one": torch.tensor([3.0]),
    "heads": torch.tensor([0.1, 7.0]),
    "requests": torch.tensor([[0.1, 7.0], [1e-9, 1e9], [float("inf"), 0.0]]),
}


@pytest.mark.parametrize("shape", SCALES)
@pytest.mark.parametrize("cached", [E4M3, BF16, FP64], ids=str)
def test_scales_divide_what_is_stored(shape: str, cached: torch.dtype) -> None:
    scale = SCALES[shape]
    rows = torch.randn(3, 4, 2, 16, generator=torch.Generator().manual_seed(1)) * 3
    factor = scale.reshape(1, 1, 1, 1) if scale.numel() == 1 else scale[..., None, :, None]
    for dtype in (BF16, FP32):
        given = rows.to(dtype)
        wide = FP64 if cached == FP64 else FP32
        divided = given.to(wide) / factor.to(wide)
        want = codes(divided, cached).view(cached) if cached == E4M3 else divided.to(cached)
        for cache in place(given, torch.zeros(12, 2, 16, dtype=cached), k_scale=scale, v_scale=scale):
            assert same(cache.view(3, 4, 2, 16), want)


def test_a_scale_for_each_layer_and_each_of_k_and_v() -> None:
    rows = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(2))
    caches = [torch.zeros(6, 2, 8, dtype=E4M3) for _ in range(6)]
    k_scale, v_scale = [torch.tensor(s) for s in (0.5, 1.0, 2.0)], torch.rand(1, 2).expand(2, 2) + 0.1
    dst = torch.arange(6).view(2, 3)
    commit_kv(
        [rows] * 3, [rows] * 3, caches[:3], caches[3:], torch.tensor([3, 3]), dst, k_scale=k_scale, v_scale=v_scale
    )
    for cache, scale in zip(caches[:3], k_scale, strict=True):
        assert same(cache, codes(rows / scale, E4M3).view(E4M3).view(6, 2, 8))
    for cache in caches[3:]:
        assert same(cache, codes(rows / v_scale[:, None, :, None], E4M3).view(E4M3).view(6, 2, 8))


@FP8
def test_the_promoted_row_is_a_copy_of_its_bits(kind: torch.dtype) -> None:
    # all codes, NaNs of both signs among them, whatever the scale, norm and rotation are now
    cache = torch.zeros(6, 2, 128, dtype=torch.uint8)
    cache[3] = torch.arange(256, dtype=torch.uint8).view(2, 128)
    caches = [cache.view(kind), cache.clone().view(kind)]
    rows = torch.ones(1, 1, 2, 128)
    error = commit_kv(
        [rows],
        [rows],
        caches[:1],
        caches[1:],
        torch.tensor([1]),
        torch.tensor([[0]]),
        pending_slot=torch.tensor([3]),
        promote_dst=torch.tensor([4]),
        k_scale=torch.tensor(0.01),
        v_scale=torch.tensor(0.01),
        k_norm=torch.ones(128),
        cos_sin=torch.ones(1, 64),
        positions=torch.zeros(1, 1, dtype=torch.int64),
    )
    assert error.tolist() == [0]
    for after in caches:
        assert torch.equal(after[4].view(torch.uint8).flatten(), torch.arange(256, dtype=torch.uint8))


def transformed(
    rows: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor | None, table: torch.Tensor | None, offset: float
) -> torch.Tensor:
    """Written as models are: a norm, then halves that are swapped; at the dtype of `rows`."""
    x = rows
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (offset + norm.to(x.dtype))
    if table is not None:
        angles = table.to(x.dtype)[positions][:, :, None]
        cos, sin = (part.repeat(1, 1, 1, 2) for part in angles.chunk(2, dim=-1))
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        x = torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)
    return x


def rotary_table(rows: int, rotary: int) -> torch.Tensor:
    angle = torch.arange(rows)[:, None] * 10000.0 ** -(torch.arange(0, rotary, 2) / rotary)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


@pytest.mark.parametrize(("norm", "rotary"), [(True, 0), (False, 16), (True, 16), (True, 6)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_and_rotation_within_the_budget(norm: bool, rotary: int, dtype: torch.dtype, offset: float) -> None:
    # rows at odd strides; V rows of the same numbers are copied
    generator = torch.Generator().manual_seed(rotary)
    rows = torch.randn(3, 5, 4, 20, generator=generator).to(dtype)[:, :, ::2, :16] * 5
    weight = (torch.randn(16, generator=generator) * 0.3 + (1 - offset)).to(dtype) if norm else None
    table = rotary_table(1000, rotary).to(FP64 if dtype == FP64 else FP32) if rotary else None
    positions = torch.randint(0, 1000, (3, 5), generator=generator)
    options: dict[str, Any] = {"k_norm": weight, "k_norm_offset": offset}
    if table is not None:
        options |= {"cos_sin": table, "positions": positions.to(torch.int32)}
    k, v = place(rows, torch.zeros(15, 2, 16, dtype=dtype), **options)
    assert torch.equal(v.view(rows.shape), rows)
    truth = transformed(rows.double(), positions, weight, table, offset)
    eager = transformed(rows, positions, weight, table, offset)
    if dtype == FP64:
        # no truth is above it
        torch.testing.assert_close(k.view(rows.shape), truth, rtol=0, atol=1e-13)
        return
    assert_within_budget(k.view(rows.shape), truth, eager)


def test_each_layer_has_its_norm() -> None:
    rows = torch.full((1, 1, 1, 8), 3.0)
    weights = [torch.full((8,), w) for w in (1.0, 2.0)]
    caches = [torch.zeros(1, 1, 8) for _ in range(4)]
    zero = torch.zeros(1, 1, dtype=torch.int64)
    commit_kv([rows] * 2, [rows] * 2, caches[:2], caches[2:], torch.tensor([1]), zero, k_norm=weights)
    for cache, value in zip(caches, (1.0, 2.0, 3.0, 3.0), strict=True):
        torch.testing.assert_close(cache, torch.full((1, 1, 8), value), rtol=1e-6, atol=0)


def test_norm_rotation_and_scale_round_once_to_fp8() -> None:
    # quarter turns and rows of one magnitude: everything before the rounding is exact
    rows = torch.where(torch.rand(2, 4, 2, 16, generator=torch.Generator().manual_seed(3)) < 0.5, -2.0, 2.0)
    table = torch.tensor([[0.0] * 8 + [1.0] * 8])
    positions = torch.zeros(2, 4, dtype=torch.int64)
    options: dict[str, Any] = {"k_norm": torch.full((16,), 3.0), "k_norm_eps": 0.0, "cos_sin": table}
    scale = torch.tensor(0.7)
    k, _ = place(rows, torch.zeros(8, 2, 16, dtype=E4M3), k_scale=scale, v_scale=scale, positions=positions, **options)
    turned = torch.cat((-rows[..., 8:], rows[..., :8]), dim=-1) * 1.5
    assert same(k.view(2, 4, 2, 16), codes(turned / scale, E4M3).view(E4M3))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_positions_outside_the_table_are_clamped_and_flagged(index: torch.dtype) -> None:
    # rows that go nowhere, and dead requests, may name any position
    rows = torch.ones(4, 2, 1, 4)
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0]])
    info = torch.iinfo(index)
    positions = torch.tensor([[1, info.max], [-1, 1], [0, info.max], [info.min, 9]], dtype=index)
    cache = torch.zeros(8, 1, 4)
    error = commit_kv(
        [rows],
        [rows],
        [cache],
        [cache.clone()],
        torch.tensor([1, 2, 2, 2]),
        torch.arange(8).view(4, 2),
        live=torch.tensor([True, True, True, False]),
        cos_sin=table,
        positions=positions,
    )
    assert error.tolist() == [0, BAD_POSITION, BAD_POSITION, 0]
    assert cache[:, 0, 0].tolist() == [2, 0, 1, 2, 1, 4, 0, 0]


def test_what_is_not_rotated_keeps_its_infinities() -> None:
    rows = torch.tensor([1.0, 2.0, float("inf"), float("-inf")]).view(1, 1, 1, 4)
    table = torch.tensor([[0.0, 1.0]])
    zero = torch.zeros(1, 1, dtype=torch.int64)
    k, v = place(rows, torch.zeros(1, 1, 4), cos_sin=table, positions=zero)
    assert k.flatten().tolist() == [-2.0, 1.0, float("inf"), float("-inf")] and torch.equal(v.view_as(rows), rows)


@pytest.mark.parametrize("cached", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_every_pair_of_dtypes_rounds_as_torch_does(dtype: torch.dtype, cached: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    exponent = torch.randint(-30, 30, (2, 3, 2, 10), generator=generator)
    rows = (torch.randn(2, 3, 2, 10, generator=generator, dtype=FP64) * 2.0**exponent).to(dtype)
    rows[0, 0, 0, :5] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 0.0], dtype=dtype)
    for cache in place(rows, torch.zeros(6, 2, 10, dtype=cached)):
        assert same(cache.view(rows.shape), rows.to(cached))
        assert torch.equal(cache.view(rows.shape).signbit()[0, 0, 0, 3:5], torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"k_caches": [torch.zeros(9, 2, 4, dtype=E4M3)]}, ValueError, "k_scale: is None, must be given for caches of"),
        ({"v_caches": [torch.zeros(9, 2, 4, dtype=E5M2)]}, ValueError, "v_scale: is None"),
        ({"rows_k": [torch.zeros(2, 3, 2, 4, dtype=E4M3)]}, TypeError, "rows_k: dtype is torch.float8_e4m3fn"),
        (
            {"k_scale": torch.ones(3)},
            ValueError,
            r"k_scale\[0\]: shape is \(3,\), must be \[\], \[1\], \[2\] or \[2, 2\]",
        ),
        ({"v_scale": torch.ones(2).half()}, TypeError, r"v_scale\[0\]: dtype is torch.float16"),
        ({"v_scale": [torch.ones(2)] * 2}, ValueError, "v_scale: has 2 tensors, must be 1 or the 1 of rows_k"),
        ({"k_norm": torch.ones(3)}, ValueError, r"k_norm\[0\]: dimension 0 \(Dk\) is 3, must be 4"),
        ({"k_norm": torch.ones(4, dtype=torch.int32)}, TypeError, "k_norm: dtype"),
        ({"k_norm": torch.ones(4), "k_norm_eps": -1.0}, ValueError, "k_norm_eps: is -1.0"),
        ({"cos_sin": torch.ones(5, 4)}, ValueError, "positions: is None, must be given together with cos_sin"),
        (
            {"cos_sin": torch.ones(5, 6), "positions": torch.zeros(2, 3, dtype=torch.int64)},
            ValueError,
            r"cos_sin: dimension 1 \(rotary_dim\) is 6, must be even and at most 4",
        ),
        (
            {"cos_sin": torch.ones(0, 4), "positions": torch.zeros(2, 3, dtype=torch.int64)},
            ValueError,
            "cos_sin: has no rows",
        ),
        (
            {"cos_sin": torch.ones(5, 4), "positions": torch.zeros(2, 2, dtype=torch.int64)},
            ValueError,
            r"positions: dimension 1 \(R\) is 2, must be 3",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    rows, cache = torch.zeros(2, 3, 2, 4), torch.zeros(9, 2, 4)
    arguments: dict[str, Any] = {"rows_k": [rows], "rows_v": [rows], "k_caches": [cache], "v_caches": [cache.clone()]}
    arguments |= {"valid": torch.tensor([1, 1]), "dst": torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(kind, match=message):
        commit_kv(**(arguments | change))


@pytest.mark.parametrize("seed", range(4 if INTERPRETED else 12))
def test_random_fp8_commits_equal_the_dictionary_model(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    batch, width, slots = int(whole(1, 5)), int(whole(1, 10)), int(whole(4, 40))
    kind = (E4M3, E5M2)[seed % 2]
    rows = torch.randn(batch, width, 3, 7, generator=generator).to((BF16, FP32)[seed // 2 % 2]) * 20
    cache = torch.randint(0, 256, (slots, 3, 7), generator=generator, dtype=torch.uint8).view(kind)
    scale = torch.rand(batch, 3, generator=generator) + 0.01
    stored = codes(rows.float() / scale[:, None, :, None], kind).view(kind)
    valid, dst, scratch = (
        whole(-1, width + 2, batch),
        whole(-1, slots + 1, batch, width),
        whole(-1, slots, batch, width),
    )
    pending, promote = whole(-1, slots, batch), whole(-1, slots, batch)
    want, errors = model(
        rows, cache, valid.tolist(), dst, pending=pending.tolist(), promote=promote.tolist(), scratch=scratch,
        placed=lambda b, j: stored[b, j],
    )  # fmt: skip
    got = cache.clone(), cache.clone()
    error = commit_kv(
        [rows], [rows], [got[0]], [got[1]], valid, dst, pending_slot=pending, promote_dst=promote, scratch_dst=scratch,
        k_scale=scale, v_scale=[scale],
    )  # fmt: skip
    assert error.tolist() == errors
    assert same(got[0], want) and same(got[1], want)
