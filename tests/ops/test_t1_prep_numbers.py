"""The numbers of T1 preparation: error budget, memory that must not be read or written, rows far apart, threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.t1_prep import Fusion, fold_fusion, fused_t1_prep
from dmtp_kernels.ops.t1_prep.op import FUSED_T1_PREP
from dmtp_kernels.testing.poison import guarded
from dmtp_kernels.testing.tolerance import assert_within_budget

KERNEL_OPS = ("fused_t1_prep",)
EVERY_CAPABILITY = True
V, MASK = 50, 47
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def surrounded(x: torch.Tensor, gap: int = 21) -> torch.Tensor:
    """The same values as a view with NaN before, behind and between the rows."""
    wide = x.new_full((x.shape[0] + 2, x.shape[1] + 2 * gap), float("nan"))
    view = wide[1:-1, gap : gap + x.shape[1]]
    view.copy_(x)
    return view


def make_fusion(mode: str, width: int, hidden: int, dtype: torch.dtype, rank: int = 19) -> Fusion:
    norm_e, norm_m = random(width, seed=2, dtype=dtype) + 1, random(hidden, seed=3, dtype=dtype) + 1
    reads = width + hidden
    if mode == "residual_low_rank":
        down = surrounded(random(rank, reads, seed=4, dtype=dtype, scale=reads**-0.5))
        return Fusion.residual_low_rank(
            down, surrounded(random(width, rank, seed=5, dtype=dtype, scale=rank**-0.5)), norm_m=norm_m, norm_e=norm_e
        )
    weight = surrounded(random(width, reads, seed=4, dtype=dtype, scale=reads**-0.5))
    if mode == "masks":
        return Fusion.residual(weight[:, width:], norm_m=norm_m, slots="masks", offset_m=1.0)
    if mode == "replace":
        return Fusion.replace(weight, norm_e=norm_e, norm_m=norm_m, offset_e=1.0)
    return Fusion.residual(weight, norm_m=norm_m, norm_e=norm_e)


def plain_torch(rows: torch.Tensor, hidden: torch.Tensor, fusion: Fusion, dtype: torch.dtype) -> torch.Tensor:
    """The fused slot as PyTorch code gives it at `dtype`, norms in fp32 as models do; float64 is the truth."""

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(dtype, torch.float32))
        wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.to(wide.dtype) + offset)
        return wide.to(dtype)

    rows, hidden = rows.to(dtype), hidden.to(dtype)
    assert fusion.norm_m is not None
    stream = norm(hidden, fusion.norm_m, fusion.eps_m, fusion.offset_m)
    if fusion.norm_e is not None:
        stream = torch.cat([norm(rows, fusion.norm_e, fusion.eps_e, fusion.offset_e), stream], 1)
    matrices = [m.to(dtype) for m in (fusion.weight, fusion.down, fusion.up) if m is not None]
    for matrix in matrices:
        stream = stream @ matrix.T
    return stream if fusion.mode == "replace" else rows + stream


@pytest.mark.parametrize("mode", ["residual", "residual_low_rank", "replace", "masks"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 75])  # whole vectors, and a tail
def test_error_budget(mode: str, dtype: torch.dtype, width: int) -> None:
    batch, hidden = 9, 131
    table = surrounded(random(V, width, seed=0, dtype=dtype))
    h = surrounded(random(batch, hidden, seed=1, dtype=dtype))
    fusion = make_fusion(mode, width, hidden, dtype)
    t1 = torch.arange(batch) * 5
    got = fused_t1_prep(t1, h, None, table, fusion, mask_id=MASK, t1_override=t1)[2]
    fused = got[:, 2:] if mode == "masks" else got[:, 1:2]
    rows = table[torch.full_like(t1, MASK)] if mode == "masks" else table[t1]
    truth, eager = (plain_torch(rows, h, fusion, d) for d in (torch.float64, dtype))
    for slot in range(fused.shape[1]):
        assert_within_budget(fused[:, slot], truth, eager)


@pytest.mark.parametrize("hidden", [2880, 5120, 5376, 7168, 2048, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_045_hidden_of_any_size_between_poison(hidden: int, dtype: torch.dtype) -> None:
    # aiter#2329: only multiples of 1024 bytes worked; the embedding here is narrower than the hidden state
    width, batch = 24, 3
    table, h = (surrounded(random(*s, seed=i, dtype=dtype)) for i, s in enumerate([(V, width), (batch, hidden)]))
    norms = surrounded(random(2, hidden, seed=5, dtype=dtype))
    weight = surrounded(random(width, width + hidden, seed=4, dtype=dtype, scale=hidden**-0.5))
    fusion = Fusion.residual(weight, norm_m=norms[0], norm_e=norms[1, :width])
    t1 = torch.tensor([0, V - 1, 9])
    got = fused_t1_prep(t1, h, None, table, fusion, mask_id=MASK, t1_override=t1)[2][:, 1]
    truth, eager = (plain_torch(table[t1], h, fusion, d) for d in (torch.float64, dtype))
    assert_within_budget(got, truth, eager)


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1], (torch.bfloat16, torch.float32, torch.float16)])
@pytest.mark.parametrize("fold", [None, *DTYPES])
@pytest.mark.parametrize("mode", ["residual", "replace"])
def test_every_tensor_may_have_its_own_dtype(
    dtypes: tuple[torch.dtype, ...], fold: torch.dtype | None, mode: str
) -> None:
    one, two, three = dtypes
    table, h = random(V, 33, seed=0, dtype=one), random(4, 40, seed=1, dtype=two)
    norm_e, norm_m = random(33, seed=2, dtype=three) + 1, random(40, seed=3, dtype=one) + 1
    weight = random(33, 73, seed=4, dtype=two, scale=0.1)
    fusion = Fusion(mode=mode, weight=weight, norm_e=norm_e, norm_m=norm_m)
    folded = None if fold is None else fold_fusion(table, fusion, dtype=fold)
    t1, mask = torch.tensor([3, 4, 5, 49]), random(33, seed=6, dtype=three)
    got = fused_t1_prep(
        t1, h, None, table, fusion, mask_id=MASK, t1_override=t1, folded=folded, mask_embed=mask, embed_scale=1.0
    )[2]
    coarse = min((d for d in (one, fold) if d is not None), key=lambda d: -torch.finfo(d).eps)
    want = plain_torch(table[t1], h, fusion, torch.float64)
    tolerance = 2 * torch.finfo(coarse).eps
    torch.testing.assert_close(got[:, 1].double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    assert torch.equal(got[:, 2:], mask.to(one).expand(4, 6, 33)) and torch.equal(got[:, 0], table[t1])


@pytest.mark.parametrize("batch", [1, 47, 48, 49, 257])
@pytest.mark.parametrize("mode", ["residual", "none"])
def test_row_046_every_row_is_done_and_no_other_memory(batch: int, mode: str) -> None:
    # vllm-ascend#5012: rows beyond a capped grid were never normalised
    width, hidden, slots = 17, 18, 8
    table, h = random(V, width, seed=0), random(batch, hidden, seed=1)
    fusion = Fusion() if mode == "none" else make_fusion(mode, width, hidden, torch.float32)
    ids = torch.arange(batch) % V
    outs = {
        "t1": guarded((batch,), torch.int64),
        "block_ids": guarded((batch, slots), torch.int64, row_gap=3),
        "block_embeds": guarded((batch, slots, width), torch.float32, row_gap=5),
        "certified": guarded((batch,), torch.bool),
    }
    tensors = (ids, h, table, None, ids.flip(0), None, None, *(None,) * 7, *fusion.tensors())
    scalars = ("dense", 0, 0, "none", 1, True, *fusion.args()[5:], 2, MASK, 6, 1.0, 0, V, "float32")
    FUSED_T1_PREP.out(*tensors, *scalars, **{name: g.tensor for name, g in outs.items()})
    for buffer in outs.values():
        buffer.check()
    want = fused_t1_prep(ids, h, None, table, fusion, mask_id=MASK, t1_override=ids.flip(0))
    for buffer, wanted in zip(outs.values(), want, strict=True):
        assert torch.equal(buffer.tensor, wanted)
    truth = table[ids.flip(0)].double()
    if mode != "none":
        truth = plain_torch(truth, h, fusion, torch.float64)
    torch.testing.assert_close(want[2][:, 1].double(), truth, rtol=1e-5, atol=1e-5)


def far(rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The same rows 2^28 elements apart, so that row 8 starts at element 2^31; the memory between is never touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # or all of it would be written
    base = torch.empty((rows.shape[0] - 1) * 2**28 + rows.shape[1], dtype=rows.dtype)
    return base.as_strided(rows.shape, (2**28, 1)).copy_(rows)


@pytest.mark.parametrize("what", ["table", "weight", "up", "folded", "hidden"])
def test_rows_014_050_offsets_beyond_32_bits(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # megablocks#186, Liger-Kernel#803: row times stride was computed in 32 bits
    dtype, width, hidden = torch.bfloat16, 9, 24
    tensors = {
        "table": random(9, width, seed=0, dtype=dtype),
        "hidden": random(9, hidden, seed=1, dtype=dtype),
        "weight": random(width, width + hidden, seed=4, dtype=dtype),
        "up": random(width, 9, seed=5, dtype=dtype),
    }

    def run(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        norms = {"norm_m": torch.ones(hidden), "norm_e": torch.ones(width)}
        fusion = Fusion.residual(tensors["weight"], **norms)
        if what == "up":
            fusion = Fusion.residual_low_rank(tensors["weight"], tensors["up"], **norms)
        options: dict[str, Any] = {"mask_id": 8, "t1_override": torch.arange(9), "folded": tensors.get("folded")}
        return fused_t1_prep(torch.arange(9), tensors["hidden"], None, tensors["table"], fusion, **options)[2]

    if what == "folded":
        tensors["folded"] = random(9, width, seed=7, dtype=dtype)
    near = run(tensors)
    assert torch.equal(run({**tensors, what: far(tensors[what], monkeypatch)}), near)


@pytest.mark.parametrize("mode", ["residual", "residual_low_rank", "masks", "none"])
def test_threads_and_batches_change_no_bit(mode: str) -> None:
    width, hidden, dtype = 272, 260, torch.bfloat16
    table, h = random(V, width, seed=0, dtype=dtype), random(37, hidden, seed=1, dtype=dtype)
    fusion = Fusion() if mode == "none" else make_fusion(mode, width, hidden, dtype, rank=70)
    ids = torch.arange(37)
    before, found = torch.get_num_threads(), []
    try:
        for threads, batch in ((1, 37), (2, 37), (3, 37), (3, 1), (2, 8)):
            torch.set_num_threads(threads)
            found.append(
                fused_t1_prep(ids[:batch], h[:batch], None, table, fusion, mask_id=MASK, t1_override=ids[:batch])
            )
    finally:
        torch.set_num_threads(before)
    for part in found[1:]:
        batch = part[0].shape[0]
        assert all(torch.equal(a, b[:batch]) for a, b in zip(part, found[0], strict=True))


@pytest.mark.parametrize("mode", ["residual", "residual_low_rank"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_call_left_behind_is_not_read(mode: str, dtype: torch.dtype) -> None:
    # scratch memory is kept: a longer row full of NaN first, then rows that end inside a vector
    ids = torch.arange(3)

    def run(width: int, hidden: int, rank: int, fill: float | None) -> torch.Tensor:
        table, h = random(V, width, seed=0, dtype=dtype), random(3, hidden, seed=1, dtype=dtype)
        if fill is not None:
            table.fill_(fill)
            h.fill_(fill)
        fusion = make_fusion(mode, width, hidden, dtype, rank=rank)
        return fused_t1_prep(ids, h, None, table, fusion, mask_id=MASK, t1_override=ids)[2]

    run(90, 170, 50, float("nan"))
    first = run(33, 34, 19, None)
    assert first.isfinite().all() and not torch.equal(first[:, 1], random(V, 33, seed=0, dtype=dtype)[ids])
    run(90, 170, 50, 1.0)
    assert torch.equal(run(33, 34, 19, None), first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_edges_of_the_formats(dtype: torch.dtype) -> None:
    # ties and overflow of the last rounding: the residual is exact, so the slot is the rounded sum of two numbers
    tiny, top = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    eps = torch.finfo(dtype).eps
    plain = torch.tensor([1.0, 1.0 + eps, top, -top, tiny, tiny * eps, 0.0, -0.0, float("inf"), float("nan")]).to(dtype)
    delta = torch.tensor([eps / 2, eps / 2, top * eps / 4, -top * eps, -tiny / 2, tiny * eps / 2, -0.0, 0.0, 1.0, 1.0])
    table = torch.zeros(V, 10, dtype=dtype)
    table[3] = plain
    # one hidden of mean square 1, a norm that passes it on, and the residual as the matrix's only column
    fusion = Fusion.residual(delta[:, None].contiguous(), norm_m=torch.ones(1), eps_m=0.0)
    got = fused_t1_prep(
        torch.tensor([3]), torch.ones(1, 1), None, table, fusion, mask_id=MASK, t1_override=torch.tensor([3])
    )[2][0, 1]
    want = torch.where(delta != 0, (plain.float() + delta).to(dtype), plain)
    raw = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    same = (got.view(raw) == want.view(raw)) | (got.isnan() & want.isnan())
    assert same.all(), (got, want)
