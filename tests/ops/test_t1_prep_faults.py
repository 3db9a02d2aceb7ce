"""Public bug reports whose kind T1 preparation could share, each as a test of ours."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.ops.lm_head import pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, check_mask_id, fused_t1_prep
from dmtp_kernels.ops.t1_prep.reference import rms_norm

KERNEL_OPS = ("fused_t1_prep",)
EVERY_CAPABILITY = True
V, MASK = 100, 99


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def fuse(
    table: torch.Tensor, hidden: torch.Tensor, fusion: Fusion, t1: list[int], anchors: int = 1
) -> tuple[torch.Tensor, ...]:
    anchor = torch.arange(len(t1))
    return fused_t1_prep(
        anchor, hidden, None, table, fusion, mask_id=MASK, anchors=anchors, t1_override=torch.tensor(t1)
    )


def test_row_030_concat_order_is_embedding_first() -> None:
    # mlx-lm#1469: [hidden, embedding] made a checkpoint agree 0 % of the time
    table, h = random(V, 8), random(2, 8, seed=1)
    norm_e, norm_m = torch.full((8,), 2.0), torch.full((8,), 0.5)
    eye, zero = torch.eye(8), torch.zeros(8, 8)
    first = fuse(table, h, Fusion.replace(torch.cat([eye, zero], 1), norm_e=norm_e, norm_m=norm_m), [5, 6])[2][:, 0]
    second = fuse(table, h, Fusion.replace(torch.cat([zero, eye], 1), norm_e=norm_e, norm_m=norm_m), [5, 6])[2][:, 0]
    torch.testing.assert_close(first.double(), truth(table[[5, 6]], norm_e), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(second.double(), truth(h, norm_m), rtol=1e-6, atol=1e-6)


def test_row_031_hidden_before_or_after_the_final_norm_is_the_callers() -> None:
    # LightLLM#1402: accept length 1.80 instead of 2.74 with the hidden of the wrong stage
    table, raw = random(V, 16), random(3, 16, seed=1)
    final = torch.linspace(0.1, 1.9, 16)
    normed = truth(raw, final).float()
    fusion = Fusion.residual(random(16, 16, seed=2), norm_m=torch.ones(16))
    head = pack_lm_head(random(V, 16, seed=3))
    anchor = torch.arange(3)
    a = fused_t1_prep(anchor, normed, head, table, fusion, mask_id=MASK)
    b = fused_t1_prep(anchor, normed, head, table, fusion, mask_id=MASK, fusion_hidden=raw)
    assert torch.equal(a[0], b[0])  # the head reads the same state
    assert (a[2] - b[2])[:, 1].norm() > 0.05 * a[2][:, 1].norm()
    assert torch.equal(b[2], fused_t1_prep(anchor, raw, None, table, fusion, mask_id=MASK, t1_override=b[0])[2])


def test_row_033_each_stream_gets_exactly_one_norm() -> None:
    # ATOM#1764: a second norm is not idempotent once its weight differs from one
    x, g = random(4, 64) * 3, torch.linspace(-0.07, 1.81, 64)
    table = random(V, 64, seed=1)
    zero, eye = torch.zeros(64, 64), torch.eye(64)
    for matrix, source in ((torch.cat([eye, zero], 1), table[:4]), (torch.cat([zero, eye], 1), x)):
        got = fuse(table, x, Fusion.replace(matrix, norm_e=g, norm_m=g), [0, 1, 2, 3])[2][:, 0].double()
        once, twice = truth(source, g), truth(truth(source, g), g)
        assert (got - once).norm() / once.norm() < 1e-6
        assert (got - twice).norm() / once.norm() > 0.1 and (got - source).norm() / once.norm() > 0.1


def test_row_034_the_hidden_that_predicted_t1() -> None:
    # vllm#36531: a stored hidden took the place of the MTP output
    table = random(V, 8)
    ramp = torch.arange(8.0)
    target, predictor, after = (ramp * f + f for f in (1.0, 2.0, 3.0))
    fusion = Fusion.residual(torch.eye(8), norm_m=torch.ones(8), eps_m=1.0)
    got = fuse(table, predictor[None], fusion, [4])[2][0, 0]
    torch.testing.assert_close(
        got.double(), table[4].double() + truth(predictor, torch.ones(8), 1.0), rtol=1e-6, atol=1e-6
    )
    for other in (target, after):
        assert not torch.allclose(got, fuse(table, other[None], fusion, [4])[2][0, 0])


def test_row_035_no_position_is_special() -> None:
    # vllm#33299: the embedding at position 0 was zeroed; the op knows no positions, row 0 is like row 5
    table, h = random(V, 8), random(1, 8, seed=1).expand(6, 8)
    out = fuse(table, h, Fusion.residual(random(8, 16), norm_m=torch.ones(8), norm_e=torch.ones(8)), [17] * 6)[2]
    assert torch.equal(out[0, 0], out[5, 0]) and (out[0, 0] != 0).all()
    assert torch.equal(fuse(table, h, Fusion(), [17] * 6)[2][0, 0], table[17])


@pytest.mark.parametrize("ranks", [1, 2])
def test_row_037_sentinels_never_reach_the_table(ranks: int) -> None:
    # vllm#53977: -1 and ids beyond the table were looked up
    around = torch.full((V + 20, 64), float("nan"))
    table = around[10 : 10 + V]
    table.copy_(random(V, 64))
    t1 = torch.tensor([5, -1, V - 1, V, 2**31 - 1])
    fusion = Fusion.residual(random(64, 128), norm_m=torch.ones(64), norm_e=torch.ones(64))
    plain, fused = torch.zeros(5, 8, 64), torch.zeros(5, 8, 64)
    for rank in range(ranks):
        rows = V // ranks
        part = table[rank * rows : (rank + 1) * rows]
        for total, kind in ((plain, Fusion()), (fused, fusion)):
            got, ids, embeds, certified = fused_t1_prep(
                torch.arange(5), random(5, 64, seed=1), None, part, kind, mask_id=MASK,
                t1_override=t1, embedding_start=rank * rows, num_embeddings=V,
            )  # fmt: skip
            total += embeds
            assert got.tolist() == [5, -1, V - 1, -1, -1] and ids[:, 1].tolist() == got.tolist()
            assert certified.tolist() == [True, False, True, False, False]
    assert torch.equal(plain[[0, 2], 1], table[[5, V - 1]]) and (plain[[1, 3, 4], 1] == 0).all()
    assert fused.isfinite().all() and (fused[[1, 3, 4], 1] == 0).all()
    anchor = torch.tensor([V, 2**31 - 1])
    _, ids, embeds, certified = fused_t1_prep(
        anchor, random(2, 64), None, table, Fusion(), mask_id=MASK, t1_override=torch.tensor([1, 2])
    )
    assert (ids[:, 0] == -1).all() and (embeds[:, 0] == 0).all() and not certified.any()


def test_row_038_head_wider_than_the_table() -> None:
    # vllm#35937: padded head rows beyond the embedding were clamped to the last token
    table, w, h = random(1000, 16), random(1024, 16, seed=1), random(200, 16, seed=2)
    w[1000:] *= 100
    anchor = torch.arange(200)
    with pytest.raises(ValueError, match="head: its real rows reach token id 1023"):
        fused_t1_prep(anchor, h, pack_lm_head(w), table, Fusion(), mask_id=999)
    t1, _, _, certified = fused_t1_prep(anchor, h, pack_lm_head(w, num_valid=1000), table, Fusion(), mask_id=999)
    assert (t1 < 1000).all() and (t1 >= 0).all() and certified.all()
    mapped = pack_lm_head(w, id_map=torch.arange(1024), id_map_mode="absolute")
    t1, ids, embeds, certified = fused_t1_prep(anchor, h, mapped, table, Fusion(), mask_id=999)
    lost = t1 == -1
    assert lost.any() and not certified[lost].any() and (ids[lost, 1] == -1).all() and (embeds[lost, 1] == 0).all()


@pytest.mark.parametrize("mask_id", [3, 4, V, V + 5, -1])
def test_row_039_mask_id_collides_or_is_outside(mask_id: int) -> None:
    # Automodel#2461: the mask fell back to padding, often the end of sequence
    with pytest.raises(ValueError, match=f"mask_id: is {mask_id}"):
        check_mask_id(mask_id, V, eos_ids=(3, 4))


def test_row_041_strides() -> None:
    # LightLLM#1467: a last stride other than 1 was honoured in one of two passes
    base = random(4, 256, seed=1)
    table = random(V, 64)
    weight = random(64, 128, seed=2)
    fusion = Fusion.residual(weight, norm_m=torch.ones(64), norm_e=torch.ones(64))
    for h in (base[:, :128:2], random(64, 4).t()):
        with pytest.raises(ValueError, match="h_mtp: last dimension has stride"):
            fuse(table, h, fusion, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="weight: last dimension has stride"):
        Fusion.residual(random(128, 64).t(), norm_m=torch.ones(64), norm_e=torch.ones(64))
    wide = torch.full((64, 200), float("nan"))
    wide[:, :128] = weight
    strided = Fusion.residual(wide[:, :128], norm_m=torch.ones(64), norm_e=torch.ones(64))
    want = fuse(table, base[:, :64].contiguous(), fusion, [1, 2, 3, 4])[2]
    assert torch.equal(fuse(table, base[:, :64], strided, [1, 2, 3, 4])[2], want)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 300.0), (torch.bfloat16, 1e16)])
def test_row_042_squares_beyond_fp16(dtype: torch.dtype, value: float) -> None:
    # onnxruntime#29034: 300 squared is inf in fp16, so every output became 0
    h = torch.full((1, 4096), value, dtype=dtype)
    fusion = Fusion.residual(torch.eye(4096)[:8].to(dtype), norm_m=torch.full((4096,), 1.5, dtype=dtype))
    _, _, embeds, certified = fuse(torch.zeros(V, 8, dtype=dtype), h, fusion, [1])
    assert (embeds[0, 0] == 1.5).all() and certified.all()


def test_row_042_squares_beyond_fp32_are_finite_and_flagged() -> None:
    h = torch.full((2, 4096), 1e19, dtype=torch.bfloat16)
    h[1] = 1.0
    fusion = Fusion.residual(torch.eye(4096)[:8].bfloat16(), norm_m=torch.ones(4096).bfloat16())
    _, _, embeds, certified = fuse(torch.zeros(V, 8).bfloat16(), h, fusion, [1, 2])
    assert embeds.isfinite().all() and certified.tolist() == [False, True]


def test_row_043_statistics_in_fp32() -> None:
    # sglang#27540: a bf16 sum of 4096 ones sticks at 256
    for h in (torch.ones(1, 4096), torch.cat([random(1, 5375), torch.full((1, 1), 800.0)], 1)):
        h = h.bfloat16()
        got, finite = rms_norm(h.float(), torch.ones(h.shape[1]).bfloat16(), 1e-6, 0.0)
        want = truth(h, torch.ones(h.shape[1]))
        assert ((got - want).norm() / want.norm()) < 1e-6 and finite.all()


@pytest.mark.parametrize("hidden", [2880, 5376, 96])
def test_row_045_hidden_of_any_size(hidden: int) -> None:
    # aiter#2329: 2880 is not a multiple of the block; the embedding here is narrower than the hidden state
    around = torch.full((4, hidden + 64), float("nan")).bfloat16()
    h = around[1:3, 32 : 32 + hidden]
    h.copy_(random(2, hidden, seed=1))
    width = 72
    table = random(V, width, dtype=torch.bfloat16)
    weight = random(width, width + hidden, seed=2, dtype=torch.bfloat16) * hidden**-0.5
    norm_e, norm_m = random(width, seed=3).bfloat16(), random(hidden, seed=4).bfloat16()
    got = fuse(table, h, Fusion.residual(weight, norm_m=norm_m, norm_e=norm_e), [4, 9])[2][:, 0]
    rows = table[[4, 9]]
    want = rows.double() + torch.cat([truth(rows, norm_e), truth(h, norm_m)], 1) @ weight.double().T
    torch.testing.assert_close(got, want.bfloat16(), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("batch", [1, 47, 48, 49, 257])
def test_row_046_every_row_is_done(batch: int) -> None:
    # vllm-ascend#5012: rows beyond a capped grid were never normalised
    table, h = random(V, 8), random(batch, 8, seed=1)
    weight = random(8, 8, seed=2)
    fusion = Fusion.residual(weight, norm_m=torch.ones(8))
    got = fuse(table, h, fusion, [i % V for i in range(batch)])[2]
    want = table[torch.arange(batch) % V].double() + truth(h, torch.ones(8)) @ weight.double().T
    torch.testing.assert_close(got[:, 0].double(), want, rtol=1e-5, atol=1e-5)


def test_row_047_quantised_projection_is_refused() -> None:
    # ATOM#755: a projection was read as fp8 with an uninitialised scale
    for dtype in (torch.float8_e4m3fn, torch.int8):
        with pytest.raises(TypeError, match=f"weight: dtype is {dtype}"):
            Fusion.residual(torch.zeros(8, 8).to(dtype), norm_m=torch.ones(8))
        with pytest.raises(TypeError, match=f"down: dtype is {dtype}"):
            Fusion.residual_low_rank(torch.zeros(4, 8).to(dtype), torch.zeros(8, 4), norm_m=torch.ones(8))


@pytest.mark.parametrize("mode", ["residual", "replace", "masks"])
@pytest.mark.parametrize("anchors", [1, 2])
def test_row_049_only_the_fused_slot_changes(mode: str, anchors: int) -> None:
    # vllm#47854: input preparation differed between backends
    table, h = random(V, 8, dtype=torch.bfloat16), random(5, 8, seed=1, dtype=torch.bfloat16)
    ones = torch.ones(8).bfloat16()
    wide = random(8, 16, seed=2, dtype=torch.bfloat16)
    fusion = {
        "residual": Fusion.residual(wide, norm_m=ones, norm_e=ones),
        "replace": Fusion.replace(wide, norm_e=ones, norm_m=ones),
        "masks": Fusion.residual(wide[:, :8], norm_m=ones, slots="masks"),
    }[mode]
    got, plain = (fuse(table, h, f, [9, 8, 7, 6, 5], anchors)[2] for f in (fusion, Fusion()))
    changed = (got.view(torch.int16) != plain.view(torch.int16)).any(2)
    slot = anchors - 1
    want = [i > slot if mode == "masks" else i == slot for i in range(anchors + 6)]
    assert changed.tolist() == [want] * 5


def test_row_050_row_offsets_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Liger-Kernel#803: program id times row stride wrapped; row 8 starts at element 2^31
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # or 4 GiB would be written
    base = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    h = base.as_strided((9, 64), (2**28, 1))
    h.copy_(random(9, 64, seed=1))
    table = random(V, 16, dtype=torch.bfloat16)
    fusion = Fusion.residual(random(16, 64, seed=2).bfloat16(), norm_m=torch.ones(64).bfloat16())
    head = pack_lm_head(random(V, 64, seed=3, dtype=torch.bfloat16))
    far = fused_t1_prep(torch.arange(9), h, head, table, fusion, mask_id=MASK)
    near = fused_t1_prep(torch.arange(9), h.contiguous(), head, table, fusion, mask_id=MASK)
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))


def test_row_051_every_call_updates() -> None:
    # ik_llama.cpp#1894: a size check skipped the update after the row count changed
    table, weight = random(V, 8), random(8, 8)
    fusion = Fusion.residual(weight, norm_m=torch.ones(8))
    for call, batch in enumerate((1, 8, 3)):
        h = random(batch, 8, seed=call)
        got = fuse(table, h, fusion, [call] * batch)[2][:, 0]
        want = table[call].double() + truth(h, torch.ones(8)) @ weight.double().T
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="h_mtp: dimension 0"):
        fused_t1_prep(torch.arange(3), random(2, 8), None, table, fusion, mask_id=MASK, t1_override=torch.arange(3))
