"""T1 preparation: selection, block layout, fusion modes, folding, shards, inert rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.lm_head import LMHead, combine_keys, decode_key, lm_head_select, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, check_mask_id, fold_fusion, fused_t1_prep
from dmtp_kernels.ops.t1_prep.op import FUSED_T1_PREP

KERNEL_OPS = ("fused_t1_prep",)
EVERY_CAPABILITY = True
V, E, H, R, MASK = 300, 40, 56, 8, 298


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_fusion(name: str, dtype: torch.dtype = torch.float32, width: int = E, hidden: int = H) -> Fusion:
    """Every shape a fusion can have; the two norms differ so that swapping them shows."""
    norm_e, norm_m = random(width, seed=2, dtype=dtype) + 1, random(hidden, seed=3, dtype=dtype) - 1
    eps: dict[str, Any] = {"eps_e": 1e-2, "eps_m": 1e-3, "offset_e": 1.0, "offset_m": 0.0}
    wide = random(width, width + hidden, seed=4, dtype=dtype) * 0.2
    if name == "residual":
        return Fusion.residual(wide, norm_m=norm_m, norm_e=norm_e, **eps)
    if name == "replace":
        return Fusion.replace(wide, norm_e=norm_e, norm_m=norm_m, **eps)
    if name == "low rank":
        return Fusion.residual_low_rank(
            wide[:R], random(width, R, seed=5, dtype=dtype), norm_m=norm_m, norm_e=norm_e, **eps
        )
    if name == "low rank alone":
        return Fusion.residual_low_rank(wide[:R, width:], random(width, R, seed=5, dtype=dtype), norm_m=norm_m, **eps)
    if name == "alone":
        return Fusion.residual(wide[:, width:], norm_m=norm_m, **eps)
    if name == "masks":
        return Fusion.residual(wide[:, width:], norm_m=norm_m, slots="masks", **eps)
    return Fusion.none()


FUSIONS = ("residual", "replace", "low rank", "low rank alone", "alone", "masks", "none")
CONCAT = ("residual", "replace", "low rank")


def make_head(dtype: torch.dtype = torch.float32) -> LMHead:
    return pack_lm_head(random(V, H, seed=6, dtype=dtype), num_valid=V - 4)


def oracle_block(
    anchor: int, t1: int, hidden: torch.Tensor, table: torch.Tensor, fusion: Fusion, anchors: int, masks: int = 6
) -> np.ndarray:
    """One request's block in float64, slot by slot."""
    table64 = table.double().numpy()

    def norm(x: np.ndarray, weight: torch.Tensor, eps: float, offset: float) -> np.ndarray:
        return x / np.sqrt((x * x).sum() / len(x) + eps) * (weight.double().numpy() + offset)

    slots = [table64[t].copy() for t in ([anchor, t1] if anchors == 2 else [t1]) + [MASK] * masks]
    if fusion.norm_m is None:
        return np.stack(slots)
    stream = norm(hidden.double().numpy(), fusion.norm_m, fusion.eps_m, fusion.offset_m)
    if fusion.norm_e is not None:
        stream = np.concatenate([norm(slots[anchors - 1], fusion.norm_e, fusion.eps_e, fusion.offset_e), stream])
    if fusion.weight is not None:
        delta = fusion.weight.double().numpy() @ stream
    else:
        assert fusion.up is not None and fusion.down is not None
        delta = fusion.up.double().numpy() @ (fusion.down.double().numpy() @ stream)
    if fusion.slots == "masks":
        slots[anchors:] = [s + delta for s in slots[anchors:]]
    else:
        slots[anchors - 1] = delta if fusion.mode == "replace" else slots[anchors - 1] + delta
    return np.stack(slots)


@pytest.mark.parametrize("name", FUSIONS)
@pytest.mark.parametrize("anchors", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_block_against_the_oracle(name: str, anchors: int, dtype: torch.dtype) -> None:
    table, h, anchor = random(V, E, dtype=dtype), random(5, H, seed=1, dtype=dtype), torch.tensor([3, 0, 299, 17, 3])
    head, fusion = make_head(dtype), make_fusion(name, dtype)
    t1, ids, embeds, certified = fused_t1_prep(anchor, h, head, table, fusion, mask_id=MASK, anchors=anchors)
    key, _ = lm_head_select(h, head)
    assert t1.tolist() == decode_key(key)[0][:, 0].tolist() and certified.all()
    tol = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    for b in range(5):
        want_ids = ([anchor[b].item()] if anchors == 2 else []) + [t1[b].item()] + [MASK] * 6
        assert ids[b].tolist() == want_ids
        want = oracle_block(int(anchor[b]), int(t1[b]), h[b], table, fusion, anchors)
        np.testing.assert_allclose(embeds[b].double().numpy(), want, rtol=tol, atol=tol * np.abs(want).max())
    assert embeds.dtype == dtype


@pytest.mark.parametrize("name", FUSIONS)
def test_batch_invariance(name: str) -> None:
    table, h = random(V, E), random(33, H, seed=1)
    anchor = torch.randint(0, V, (33,), generator=torch.Generator().manual_seed(0))
    head, fusion = make_head(), make_fusion(name)
    whole = fused_t1_prep(anchor, h, head, table, fusion, mask_id=MASK)
    for n in (1, 2, 7, 32):
        for part, full in zip(fused_t1_prep(anchor[:n], h[:n], head, table, fusion, mask_id=MASK), whole, strict=True):
            torch.testing.assert_close(part, full[:n], rtol=0, atol=0)
    order = torch.arange(33).flip(0)
    turned = fused_t1_prep(anchor[order], h[order], head, table, fusion, mask_id=MASK)
    torch.testing.assert_close(turned[2], whole[2][order], rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n in FUSIONS if n not in ("replace", "none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_projection_is_the_plain_block_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    table, h = random(V, E, dtype=dtype), random(4, H, seed=1, dtype=dtype)
    table[:, ::3] = -0.0  # x + 0.0 would lose this sign
    table[:, 1] = float("nan")
    h[2, 5] = float("inf")
    h[3] = float("nan")
    fusion = make_fusion(name, dtype)
    for matrix in (fusion.weight, fusion.up):
        if matrix is not None:
            matrix.zero_()
    anchor, t1 = torch.tensor([1, 2, 3, 4]), torch.tensor([9, 8, 7, 6])
    got = fused_t1_prep(anchor, h, None, table, fusion, mask_id=MASK, t1_override=t1)
    plain = fused_t1_prep(anchor, h, None, table, Fusion(), mask_id=MASK, t1_override=t1)
    raw = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(got[2].view(raw), plain[2].view(raw))
    assert torch.equal(plain[2].view(raw), table[plain[1]].view(raw))
    assert plain[3].all() and not got[3][2:].any()  # statistics that are not finite are flagged


@pytest.mark.parametrize("name", CONCAT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folded_table_differs_by_rounding_only(name: str, dtype: torch.dtype) -> None:
    table, h, anchor = random(V, E, dtype=dtype), random(5, H, seed=1, dtype=dtype), torch.tensor([3, 0, 299, 17, -1])
    head, fusion = make_head(dtype), make_fusion(name, dtype)
    folded = fold_fusion(table, fusion, embed_scale=1.5)
    assert folded.dtype == dtype and folded.shape == (V, E)
    options: dict[str, Any] = {"mask_id": MASK, "embed_scale": 1.5}
    a = fused_t1_prep(anchor, h, head, table, fusion, **options)
    b = fused_t1_prep(anchor, h, head, table, fusion, folded=folded, **options)
    assert torch.equal(a[1], b[1])
    tol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(b[2], a[2], rtol=tol, atol=tol * a[2].abs().max().item())
    wide = fold_fusion(table, fusion, embed_scale=1.5, dtype=torch.float32)
    c = fused_t1_prep(anchor, h, head, table, fusion, folded=wide, **options)
    if dtype == torch.bfloat16:  # an fp32 table leaves one rounding, the unfolded sum's own
        assert (c[2] != a[2]).double().mean() < 0.01 < (b[2] != a[2]).double().mean()
    others = [0, *range(2, 8)]
    assert torch.equal(b[2][:, others], a[2][:, others])


def test_fold_of_a_zero_matrix_is_the_table() -> None:
    table = random(V, E)
    table[5] = -0.0
    fusion = make_fusion("residual")
    assert fusion.weight is not None
    fusion.weight.zero_()
    assert torch.equal(fold_fusion(table, fusion).view(torch.int32), table.view(torch.int32))
    with pytest.raises(ValueError, match="reads no embedding stream"):
        fold_fusion(table, make_fusion("alone"))
    with pytest.raises(ValueError, match="folded: is given"):
        fused_t1_prep(torch.zeros(1).long(), random(1, H), make_head(), table, Fusion(), mask_id=MASK, folded=table)


@pytest.mark.parametrize("name", FUSIONS)
def test_shards_of_the_table_add_up(name: str) -> None:
    table, h, anchor = random(V, E), random(6, H, seed=1), torch.tensor([3, 149, 150, 299, 7, -1])
    head, fusion = make_head(), make_fusion(name)
    options: dict[str, Any] = {"mask_id": MASK, "mask_embed": random(E, seed=9), "embed_scale": 2.0}
    whole = fused_t1_prep(anchor, h, head, table, fusion, **options)
    total = torch.zeros_like(whole[2])
    for start, stop in ((0, 150), (150, V)):
        shard = table[start:stop]
        part = fused_t1_prep(anchor, h, head, shard, fusion, embedding_start=start, num_embeddings=V, **options)
        assert torch.equal(part[0], whole[0]) and torch.equal(part[1], whole[1])
        total += part[2]
    assert torch.equal(total, whole[2])


def test_t1_from_shards_of_the_head() -> None:
    # tensor parallelism: one maximum over keys, then every rank prepares the same block
    w, h, anchor, table = random(V, H, seed=6), random(9, H, seed=1), torch.arange(9), random(V, E)
    keys = [lm_head_select(h, pack_lm_head(w[r : r + 75], id_offset=r))[0] for r in range(0, V, 75)]
    t1 = decode_key(combine_keys(keys))[0][:, 0]
    a = fused_t1_prep(anchor, h, None, table, make_fusion("residual"), mask_id=MASK, t1_override=t1)
    b = fused_t1_prep(anchor, h, pack_lm_head(w), table, make_fusion("residual"), mask_id=MASK)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", FUSIONS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_inert_rows_are_finite_and_alone(name: str, index: torch.dtype) -> None:
    table, h = random(V, E), random(4, H, seed=1)
    h[1] = float("nan")
    anchor = torch.tensor([5, -1, -(2**31), 8]).to(index)
    head, fusion = make_head(), make_fusion(name)
    t1, ids, embeds, certified = fused_t1_prep(anchor, h, head, table, fusion, mask_id=MASK)
    assert t1[1:3].tolist() == [-1, -1] and (ids[1:3] == -1).all()
    assert (embeds[1:3] == 0).all() and certified.tolist() == [True, False, False, True]
    alone = fused_t1_prep(anchor[[0, 3]], h[[0, 3]], head, table, fusion, mask_id=MASK)
    assert torch.equal(alone[2], embeds[[0, 3]])


def test_an_unproved_screen_certifies_nothing() -> None:
    table, h, w = random(V, E), random(4, H, seed=1), random(V, H, seed=6)
    for fallback, proved in (("none", False), ("full", True)):
        head = pack_lm_head(w, format="low_rank", calibration=h, rank=4, fallback=fallback)
        t1, _, _, certified = fused_t1_prep(torch.arange(4), h, head, table, make_fusion("residual"), mask_id=MASK)
        assert (t1 >= 0).all() and certified.tolist() == [proved] * 4


def test_a_row_without_a_token_keeps_its_anchor_and_masks() -> None:
    table, h = random(V, E), random(2, H, seed=1)
    h[1] = float("nan")
    t1, ids, embeds, certified = fused_t1_prep(
        torch.tensor([5, 6]), h, make_head(), table, make_fusion("residual"), mask_id=MASK
    )
    assert t1[1] == -1 and ids[1].tolist() == [6, -1] + [MASK] * 6 and certified.tolist() == [True, False]
    assert torch.equal(embeds[1, 0], table[6]) and (embeds[1, 1] == 0).all() and torch.equal(embeds[1, 2], table[MASK])


def test_mask_vector_and_scale() -> None:
    table, h, mask = random(V, E, dtype=torch.bfloat16), random(2, H, seed=1), random(E, seed=9)
    options: dict[str, Any] = {"mask_id": MASK, "mask_embed": mask, "t1_override": torch.tensor([4, 5])}
    _, ids, embeds, _ = fused_t1_prep(torch.tensor([1, 2]), h, None, table, Fusion(), embed_scale=6.3, **options)
    want = (table.float() * 6.3).bfloat16()
    assert torch.equal(embeds[:, :2], want[ids[:, :2]])
    assert torch.equal(embeds[:, 2:], (mask.bfloat16().float() * 6.3).bfloat16().expand(2, 6, E))


def test_out_form_writes_its_buffers_only() -> None:
    table, h, anchor = random(V, E), random(3, H, seed=1), torch.tensor([1, -1, 3])
    want = fused_t1_prep(anchor, h, make_head(), table, make_fusion("residual"), mask_id=MASK)
    head, fusion = make_head(), make_fusion("residual")
    around = [torch.full((5,), 77), torch.full((5, 10), 77), torch.full((5, 10, E + 2), 77.0), torch.full((5,), True)]
    inside = [around[0][1:4], around[1][1:4, 1:9], around[2][1:4, 1:9, 1 : E + 1], around[3][1:4]]
    scalars = head.scalars() | fusion.scalars() | {"anchors": 2, "mask_id": MASK, "num_masks": 6, "embed_scale": 1.0}
    scalars |= {"head_format": scalars.pop("format"), "embedding_start": 0, "num_embeddings": V}
    scalars |= {"fusion_mode": scalars.pop("mode"), "fusion_slots": scalars.pop("slots")}
    buffers = dict(zip(("t1", "block_ids", "block_embeds", "certified"), inside, strict=True))
    tensors = (None, None, None, None, *head.tensors(), *fusion.tensors())
    FUSED_T1_PREP.out(anchor, h, table, *tensors, **scalars, **buffers)
    for got, wanted, buffer in zip(inside, want, around, strict=True):
        assert torch.equal(got, wanted)
        got.fill_(True if got.dtype == torch.bool else 77)
        assert (buffer == (True if got.dtype == torch.bool else 77)).all()


def test_buffers_of_inference_mode_serve_outside_it() -> None:
    table, h, anchor = random(V, E), random(13, H, seed=1), torch.arange(13)  # a batch size of its own
    with torch.inference_mode():
        inside = fused_t1_prep(anchor, h, make_head(), table, make_fusion("residual"), mask_id=MASK)
    outside = fused_t1_prep(anchor, h, make_head(), table, make_fusion("residual"), mask_id=MASK)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_e": None}, "norm_e: is missing"),
        ({"norm_m": None}, "norm_m: is missing"),
        ({"weight": None}, "weight: is missing"),
        ({"weight": random(E, E)}, "weight: dimension 1 is 40, must be E . H = 96 or H = 56"),
        ({"norm_e": random(E + 1)}, "norm_e: dimension 0"),
        ({"up": random(E, R)}, "up: is given"),
        ({"mode": "add"}, "mode: is 'add'"),
        ({"slots": "masks"}, "slots: is 'masks'"),
        ({"slots": "all"}, "slots: is 'all'"),
        ({"mode": "replace", "weight": random(E, H), "norm_e": None}, "must be E . H = 96$"),
        ({"mode": "none"}, "weight: is given"),
    ],
)
def test_fusions_that_do_not_fit_together(change: dict[str, Any], message: str) -> None:
    good = {"mode": "residual", "weight": random(E, E + H), "norm_e": random(E), "norm_m": random(H)}
    with pytest.raises(ValueError, match=message):
        Fusion(**{**good, **change})


def test_arguments_that_do_not_fit() -> None:
    anchor, h, table = torch.tensor([1]), random(1, H), random(V, E)

    def call(message: str, error: type[Exception] = ValueError, fusion: str = "residual", **change: Any) -> None:
        values: dict[str, Any] = {
            "anchor": anchor,
            "h": h,
            "head": make_head(),
            "table": table,
            "mask_id": MASK,
        } | change
        inputs = (values.pop("anchor"), values.pop("h"), values.pop("head"), values.pop("table"))
        with pytest.raises(error, match=message):
            fused_t1_prep(*inputs, make_fusion(fusion), **values)

    call("anchor_ids: dtype", TypeError, anchor=torch.tensor([1.0]))
    call("h_mtp: dimension 0", h=random(2, H))
    call("head: is None", head=None)
    call("anchors: is 3", anchors=3)
    call("mask_id: is 300", mask_id=V)
    call("embedding: last dimension", table=random(E, V).T)
    call("t1_override: dimension 0", t1_override=torch.zeros(2).long())
    call("mask_embed: dimension 0", mask_embed=random(E + 1))
    call("norm_m: dimension 0", fusion_hidden=random(1, H + 1))
    call("num_embeddings: is 200", num_embeddings=200)
    call("logit_dtype: is 'float16'", logit_dtype="float16")
    assert check_mask_id(7, 8, (1, 2)) == 7
