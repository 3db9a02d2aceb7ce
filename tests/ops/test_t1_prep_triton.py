"""The Triton kernels of T1 preparation as a GPU would launch them: tiles, launches, order of programs, edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops._variant import Variant
from dmtp_kernels.ops.lm_head import pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, config, fused_t1_prep
from dmtp_kernels.testing import watch
from dmtp_kernels.testing.capture import capture_safe
from dmtp_kernels.testing.poison import guarded
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.ops.conftest import INTERPRETED

kernels = pytest.importorskip("dmtp_kernels.ops.t1_prep.kernels", reason="triton is not installed")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
V, MASK = 50, 47
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    with use_backend("triton", "fused_t1_prep"), planned_for(132):
        yield


def random(*shape: int, seed: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def make_fusion(width: int, hidden: int, dtype: torch.dtype, mode: str = "residual", rank: int = 19) -> Fusion:
    norm_e, norm_m = random(width, seed=2, dtype=dtype) + 1, random(hidden, seed=3, dtype=dtype) + 1
    wide = random(width, width + hidden, seed=4, dtype=dtype, scale=(width + hidden) ** -0.5)
    if mode == "residual_low_rank":
        up = random(width, rank, seed=5, dtype=dtype, scale=rank**-0.5)
        return Fusion.residual_low_rank(
            random(rank, width + hidden, seed=4, dtype=dtype, scale=0.1), up, norm_m=norm_m, norm_e=norm_e
        )
    if mode == "masks":
        return Fusion.residual(wide[:, width:], norm_m=norm_m, slots="masks")
    return Fusion(mode=mode, weight=wide, norm_e=norm_e, norm_m=norm_m)


def run(
    hidden: torch.Tensor, table: torch.Tensor, fusion: Fusion, t1: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, ...]:
    t1 = torch.arange(hidden.shape[0]) % V if t1 is None else t1
    return fused_t1_prep(t1.flip(0), hidden, None, table, fusion, mask_id=MASK, t1_override=t1, **options)


def reference(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    with use_backend("reference", "fused_t1_prep"):
        return run(*args, **options)


def bits(outputs: tuple[torch.Tensor, ...]) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in outputs]


def truth(hidden: torch.Tensor, table: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    """The block in float64, through the reference."""
    wide = {n: t.double() for n, t in fusion.__dict__.items() if isinstance(t, torch.Tensor)}
    return reference(hidden.double(), table.double(), Fusion(**fusion.__dict__ | wide))[2]


# one below, on and above: the matrix rows of a program (16, 4 for fp32), a step along each stream (512 or 256, 256 for
# fp32); and widths of models
SIZES = [
    *(
        (BF16, *size)
        for size in [(15, 96), (16, 255), (17, 257), (24, 2880), (24, 5120), (511, 40), (512, 512), (513, 24)]
    ),
    *((FP16, *size) for size in [(17, 257), (24, 513), (512, 512)]),
    *(
        (FP32, *size)
        for size in [(3, 96), (4, 255), (5, 257), (24, 2880), (12, 5120), (255, 40), (256, 256), (257, 24)]
    ),
]


@interpreted
@pytest.mark.parametrize(("dtype", "width", "hidden"), SIZES)
def test_sizes_around_the_tiles(dtype: torch.dtype, width: int, hidden: int) -> None:
    table, h = random(V, width, seed=0, dtype=dtype), random(3, hidden, seed=1, dtype=dtype)
    fusion = make_fusion(width, hidden, dtype)
    got, eager = run(h, table, fusion), reference(h, table, fusion)
    assert_within_budget(got[2], truth(h, table, fusion), eager[2])
    assert all(torch.equal(g, e) for g, e in zip((*got[:2], got[3]), (*eager[:2], eager[3]), strict=True))


@interpreted
@pytest.mark.parametrize(
    ("dtype", "rank"), [*((BF16, r) for r in (1, 15, 16, 17, 256, 257)), *((FP32, r) for r in (1, 3, 4, 5, 17))]
)
def test_ranks_around_the_tiles(rank: int, dtype: torch.dtype) -> None:
    table, h = random(V, 40, seed=0, dtype=dtype), random(9, 72, seed=1, dtype=dtype)
    fusion = make_fusion(40, 72, dtype, "residual_low_rank", rank)
    assert_within_budget(run(h, table, fusion)[2], truth(h, table, fusion), reference(h, table, fusion)[2])


@interpreted
@pytest.mark.parametrize("mode", ["residual", "replace", "masks", "residual_low_rank", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_bits_of_a_row_at_every_batch(mode: str, dtype: torch.dtype) -> None:
    width = 20 if dtype == BF16 else 6
    table, h = random(V, width, seed=0, dtype=dtype), random(17, 300, seed=1, dtype=dtype)
    fusion = Fusion() if mode == "none" else make_fusion(width, 300, dtype, mode, 5)
    t1 = torch.arange(17) * 2
    whole = run(h, table, fusion, t1)[2][:, 1:]
    for batch in (1, 7, 8, 9):
        assert bits((run(h[:batch], table, fusion, t1[:batch])[2][:, 1:],)) == bits((whole[:batch],))
    order = torch.arange(17).roll(5)  # every request in another place of its program
    assert bits((run(h[order], table, fusion, t1[order])[2][:, 1:],)) == bits((whole[order],))


@interpreted
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_whole_tiles_and_cut_ones_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    table, h = random(V, 32, seed=0, dtype=dtype), random(3, 1024, seed=1, dtype=dtype)
    fusion = make_fusion(32, 1024, dtype, "masks")
    whole = run(h, table, fusion)
    monkeypatch.setattr(config.TailConfig, "whole", lambda *_: False)
    assert bits(run(h, table, fusion)) == bits(whole)


@interpreted
@pytest.mark.parametrize("mode", ["residual", "residual_low_rank"])
def test_order_of_the_programs_changes_nothing(mode: str) -> None:
    table, h = random(V, 70, seed=0, dtype=BF16), random(17, 48, seed=1, dtype=BF16)
    fusion = make_fusion(70, 48, BF16, mode)
    want = bits(run(h, table, fusion))
    for seed in (1, 2, 3):
        with watch.shuffled_programs(seed):
            assert bits(run(h, table, fusion)) == want


def launches(*arguments: Any, **options: Any) -> list[str]:
    seen: list[watch.Launch] = []

    def watcher(access: watch.Access) -> None:
        if access.launch not in seen:
            seen.append(access.launch)

    with watch.watch(watcher):
        fused_t1_prep(*arguments, **options)
    return [launch.kernel for launch in seen]


@interpreted
def test_launches_of_the_tail() -> None:
    table, h, ids = random(V, 40, seed=0, dtype=BF16), random(9, 72, seed=1, dtype=BF16), torch.arange(9)
    given: dict[str, Any] = {"mask_id": MASK, "t1_override": ids}
    for mode in ("residual", "replace", "masks"):
        assert launches(ids, h, None, table, make_fusion(40, 72, BF16, mode), **given) == ["t1_prep_tail_kernel"]
    assert launches(ids, h, None, table, Fusion(), **given) == ["t1_prep_tail_kernel"]
    low_rank = make_fusion(40, 72, BF16, "residual_low_rank")
    assert launches(ids, h, None, table, low_rank, **given) == ["t1_prep_down_kernel", "t1_prep_tail_kernel"]
    none = torch.zeros(0, dtype=torch.int64)
    assert launches(none, h[:0], None, table, low_rank, mask_id=MASK, t1_override=none) == []


@interpreted
@pytest.mark.parametrize("format", ["dense", "int8", "int4_g32"])
def test_at_most_four_launches(format: str) -> None:
    reason = backends.unavailable("lm_head_select", "triton", torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
    head = pack_lm_head(random(V, 72, seed=6, dtype=BF16), format=format)
    table, h = random(V, 40, seed=0, dtype=BF16), random(9, 72, seed=1, dtype=BF16)
    with use_backend("triton"):
        seen = launches(torch.arange(9), h, head, table, make_fusion(40, 72, BF16), mask_id=MASK)
    assert len(seen) <= 4 and seen[-1] == "t1_prep_tail_kernel", seen


@interpreted
def test_an_unproved_token_is_not_certified() -> None:
    weight, table, h = (random(*shape, seed=i, dtype=BF16) for i, shape in enumerate([(V, 72), (V, 40), (9, 72)]))
    for fallback in ("full", "none"):
        head = pack_lm_head(weight, format="int4_g32", fallback=fallback)
        got = fused_t1_prep(torch.arange(9), h, head, table, make_fusion(40, 72, BF16), mask_id=MASK)
        assert (got[0] >= 0).all() and got[3].tolist() == [fallback == "full"] * 9


@interpreted
@pytest.mark.parametrize("mode", ["residual", "residual_low_rank", "none"])
@pytest.mark.parametrize("batch", [1, 8, 9])
def test_outputs_and_nothing_else_are_written_without_allocating(mode: str, batch: int) -> None:
    width = 37
    table, h = random(V, width, seed=0, dtype=BF16), random(batch, 24, seed=1, dtype=BF16)
    fusion = Fusion() if mode == "none" else make_fusion(width, 24, BF16, mode)
    ids = torch.arange(batch)
    outs = {
        "t1": guarded((batch,), torch.int64),
        "block_ids": guarded((batch, 8), torch.int64, row_gap=3),
        "block_embeds": guarded((batch, 8, width), BF16, row_gap=5),
        "certified": guarded((batch,), torch.bool),
    }
    tensors = (ids, h, table, None, ids.flip(0), None, None, *(None,) * 7, *fusion.tensors())
    scalars = ("dense", 0, 0, "none", 1, True, *fusion.args()[5:], 2, MASK, 6, 1.0, 0, V, "float32")
    implementation = backends.implementation("fused_t1_prep", ids.device)
    for _ in range(2):
        with capture_safe(allocations=_ == 0):
            implementation(*tensors, *scalars, *(g.tensor for g in outs.values()))
    for buffer in outs.values():
        buffer.check()
    want = run(h, table, fusion, ids.flip(0))
    assert bits(tuple(g.tensor for g in outs.values())) == bits(want)


@interpreted
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_values_that_are_large_or_not_finite(dtype: torch.dtype) -> None:
    table, h = random(V, 20, seed=0, dtype=dtype), random(8, 600, seed=1, dtype=dtype)
    h[0], h[1, 5], h[2, 599], h[3] = 3e38, 3e38, float("inf"), 1e16
    h[4, 7], h[5], h[6] = float("nan"), 0.0, 1e-30
    table[:, 3] = -0.0
    table[2, 4], table[3, 5] = 3e38, float("-inf")
    for mode in ("residual", "replace", "masks", "residual_low_rank"):
        fusion = make_fusion(20, 600, dtype, mode)
        matrix = fusion.weight if fusion.down is None else fusion.down
        assert matrix is not None
        matrix[0] = 1.0  # sums of large values overflow
        got, want = run(h, table, fusion), reference(h, table, fusion)
        torch.testing.assert_close(got[2], want[2], rtol=2 * torch.finfo(dtype).eps, atol=1e-5, equal_nan=True)
        assert torch.equal(got[3], want[3]) and not got[3][:3].any()
        plain = run(h, table, Fusion())[2]
        # a state with an infinite or missing value leaves every element as it was
        for row in (2, 4):
            assert bits((got[2][row],)) == bits((plain[row],))


@interpreted
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_both_parts_of_a_value_reach_the_tensor_cores(dtype: torch.dtype) -> None:
    # what remains is in the second part alone
    h = torch.zeros(1, 40)
    h[0, :2] = torch.tensor([1 + 2.0**-12, 1.0])
    weight = torch.zeros(17, 40, dtype=dtype)
    weight[:, 0], weight[:, 1] = 1.0, -1.0
    if dtype == FP16:
        weight[:, :2] *= 1 + 2.0**-10  # so has the weight
    fusion = Fusion.residual(weight, norm_m=torch.ones(40))
    got = run(h, torch.zeros(V, 17, dtype=dtype), fusion)[2][0, 1].double()
    want = (weight.double() @ (h[0] / h[0].square().mean().add(1e-6).sqrt()).double()).to(dtype).double()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)


@interpreted
def test_every_input_may_be_far_apart_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # element offsets beyond 2^31 in each operand that has rows
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    base = torch.empty(2**31 + 2**28, dtype=BF16)

    def far(x: torch.Tensor) -> torch.Tensor:
        view = base.as_strided(x.shape, (2**28 + 64, 1), 0)
        return view.copy_(x)

    width, hidden = 9, 24
    for place in range(3):
        table, h = random(9, width, seed=0, dtype=BF16), random(9, hidden, seed=1, dtype=BF16)
        weight = random(width, width + hidden, seed=4, dtype=BF16)
        norms = {"norm_m": torch.ones(hidden), "norm_e": torch.ones(width)}
        near = fused_t1_prep(
            torch.arange(9), h, None, table, Fusion.residual(weight, **norms), mask_id=8, t1_override=torch.arange(9)
        )
        table, h, weight = (far(x) if i == place else x for i, x in enumerate((table, h, weight)))
        got = fused_t1_prep(
            torch.arange(9), h, None, table, Fusion.residual(weight, **norms), mask_id=8, t1_override=torch.arange(9)
        )
        assert bits(got) == bits(near), place


@pytest.mark.parametrize("variant", config.variants(), ids=lambda v: v.name)
def test_variants_name_every_argument(variant: Variant) -> None:
    kernel = getattr(kernels, variant.kernel.partition(":")[2])
    assert sorted([*variant.signature, *variant.constants]) == sorted(kernel.arg_names)
    assert set(variant.aligned) <= set(variant.signature) and set(variant.streams) <= set(variant.signature)


def test_variant_names_differ() -> None:
    names = [v.name for v in config.variants()]
    assert len(set(names)) == len(names)
