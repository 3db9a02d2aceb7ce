"""Public bug reports whose kind a vocabulary head could share, each as a test of ours."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.ops.lm_head import (
    NO_TOKEN,
    LMHead,
    combine_keys,
    decode_key,
    lm_head_rescore,
    lm_head_screen,
    lm_head_select,
    pack_lm_head,
)
from tests.ops.lm_head_cases import FORMAT_NAMES, always_screen, extras, logits_head, random, select  # noqa: F401

KERNEL_OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_row_001_vocabulary_padding(name: str) -> None:
    # mirage#751: zero padding rows win whenever every real logit is negative, and would fill a shortlist of 16
    generator = torch.Generator().manual_seed(0)
    target = -1.5 - 3.5 * torch.rand(1000, generator=generator)
    target[417] = -1.0
    w = torch.zeros(1024, 64)
    w[:1000, 0] = target
    w[:1000, 1:] = torch.randn(1000, 63, generator=generator) * 1e-3
    h = torch.zeros(1, 64)
    h[0, 0] = 1.0
    w, h = w.bfloat16(), h.bfloat16()
    options = extras(name, 64)
    head = pack_lm_head(w, format=name, num_valid=1000, **options)
    ids, count, _ = lm_head_screen(h, head, 16)
    assert (ids < 1000).all() and (count <= 1000).all()
    assert select(h, w, num_valid=1000, format=name, **options) == [417]
    assert select(h, w, ranks=4, num_valid=1000, format=name, **options) == [417]
    if name == "low_rank":
        trained = (torch.eye(16, 64).bfloat16(), w[:, :16].contiguous())
        short = pack_lm_head(w, format=name, num_valid=1000, factors=trained, fallback="none", capacity=16)
        assert decode_key(lm_head_select(h, short)[0])[0].tolist() == [[417]]


def test_row_002_nan_row_gives_the_sentinel() -> None:
    # vllm#21876: a row of NaN came out as a padding lane
    logits = torch.zeros(2, 100)
    logits[1, 42] = 3.0
    w, h = logits_head(logits)
    h[0] = float("nan")
    key, status = lm_head_select(h, pack_lm_head(torch.nn.functional.pad(w, (0, 0, 0, 28)), num_valid=100))
    assert decode_key(key)[0].tolist() == [[-1], [42]] and status.tolist() == [NO_TOKEN, 0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["dense", "int8", "int4_g32"])
def test_row_003_nan_is_never_laundered_into_a_token(name: str, ranks: int) -> None:
    # vllm#53029: an all-NaN row became token 8191; NaN in some rows only leaves the best of the others
    w = torch.zeros(20000, 2)
    w[:8192, 1] = float("nan")
    w[12345] = 3.0
    h = torch.tensor([[float("nan"), 0.0], [0.0, 1.0]])
    assert select(h, w, ranks=ranks, format=name) == [-1, 12345]


def test_row_005_ids_never_pass_through_floats() -> None:
    # sglang#37106: a packed bf16 id turns 248319 into 247808
    w = torch.zeros(248320, 8)
    w[248319, 0], w[0, 1] = 7.0, 7.0
    h = torch.eye(8)[:2]
    assert select(h, w, ranks=4) == [248319, 0]


def test_row_006_ties_to_the_lowest_id() -> None:
    # lattice#280: one path broke ties to the last index
    w, h = logits_head(torch.tensor([[1.0, 5, 5, 2]]))
    assert select(h, w) == [1]
    logits = torch.zeros(1, 1024)
    logits[0, 511] = logits[0, 512] = 5.0
    w, h = logits_head(logits)
    assert select(h, w, ranks=2) == [511]
    assert decode_key(lm_head_rescore(h, w, torch.tensor([[512, 511]]), torch.tensor([2])))[0].tolist() == [[511]]


def test_row_007_oracle_of_ties_is_explicit() -> None:
    # b12x#217: small integers tie on nearly every row, and argmax on a device promises no index
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-1, 2, (2048, 8), generator=generator).bfloat16()
    h = torch.randint(-1, 2, (500, 8), generator=generator).bfloat16()
    logits = h.double() @ w.double().T
    best = logits.amax(1, keepdim=True)
    want = torch.where(logits == best, torch.arange(2048), 2048).amin(1)
    assert ((logits == best).sum(1) > 1).double().mean() > 0.8
    assert select(h, w, format="int8") == want.tolist()


def test_row_009_nan_never_takes_a_shortlist_slot() -> None:
    # pytorch#16762: topk ranks NaN above everything
    logits = random(1, 1000, dtype=torch.float32)
    logits[0, 77], logits[0, 500] = 8.0, 3.0
    w, h = logits_head(logits)
    up = w.clone()
    up[[3, 500, 999]] = float("nan")
    up[5] = 9.0  # the exact winner is second by the cheap score
    head = pack_lm_head(w, format="low_rank", factors=(torch.ones(1, 1), up), capacity=8, fallback="none")
    ids, _, _ = lm_head_screen(h, head)
    # the two best groups of four, those of rows 5 and 77; a NaN score puts no group on the list
    assert ids[0].tolist() == [4, 5, 6, 7, 76, 77, 78, 79]
    assert decode_key(lm_head_select(h, head)[0])[0].tolist() == [[77]]


@pytest.mark.parametrize("name", ["dense", "int8", "int6_g64", "int4_g32"])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("ranks", [1, 4])
def test_row_010_logit_dtype_is_a_contract(name: str, rows: int, ranks: int) -> None:
    # vllm-rbln#630: 23.50 and 23.53 tie in bf16 and not in fp32
    w = torch.zeros(1000, 64)
    w[7, 0], w[900, 0] = 23.50, 23.53
    h = torch.zeros(rows, 64)
    h[:, 0] = 1.0
    assert select(h, w, ranks=ranks, format=name) == [900] * rows
    assert select(h, w, ranks=ranks, format=name, logit_dtype="bfloat16") == [7] * rows


def test_row_011_batch_invariance() -> None:
    # vllm#54506: the verify batch and the decode batch picked different tokens
    w, h = random(700, 192, dtype=torch.float32), random(64, 192, seed=1, dtype=torch.float32)
    w[350:] = w[:350] * (1 + 1e-7)  # near ties everywhere
    head = pack_lm_head(w)
    first = lm_head_select(h[:1], head)[0]
    for n in (2, 7, 8, 33, 64):
        assert torch.equal(lm_head_select(h[:n], head)[0][:1], first)


def test_row_013_row_offsets_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # ml-cross-entropy#37: vocabulary times hidden above 2^31; 64-bit offsets reach row 262200
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # or 4 GiB would be written
    w = torch.empty(262208, 8192, dtype=torch.bfloat16)
    w[0], w[262200] = 1.0, 2.0
    h = torch.ones(1, 8192, dtype=torch.bfloat16)
    key = lm_head_rescore(h, w, torch.tensor([[0, 262200]]), torch.tensor([2]))
    assert decode_key(key)[0].tolist() == [[262200]] and decode_key(key)[1].tolist() == [[16384.0]]


@pytest.mark.parametrize("stride", [2**30, 2**29])
def test_row_014_row_strides_beyond_32_bits(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # megablocks#186: offset times columns wrapped; the smaller stride is the control that passes with the fault
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    base = torch.empty(2 * stride + 4096, dtype=torch.int8)
    codes = base.as_strided((3, 64), (stride, 1))
    w = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 64).bfloat16().contiguous()
    packed = pack_lm_head(w)
    assert packed.codes is not None
    codes.copy_(packed.codes)
    head = LMHead(w, "int8", 3, 1, codes=codes, scale=packed.scale, bound=packed.bound)
    h = torch.ones(1, 64, dtype=torch.bfloat16)
    assert decode_key(lm_head_select(h, head)[0])[0].tolist() == [[2]]
    wide = base.view(torch.bfloat16).as_strided((3, 64), (stride // 2, 1))
    wide.copy_(w)
    assert decode_key(lm_head_rescore(h, wide, torch.tensor([[0, 1, 2]]), torch.tensor([3])))[0].tolist() == [[2]]


def test_row_015_each_rank_rescores_its_own_ids() -> None:
    # sglang#4328: global ids indexed a local shard
    logits = torch.zeros(1, 1000)
    logits[0, [3, 499, 500, 999]] = torch.tensor([1.0, 2, 3, 4])
    w, h = logits_head(logits)
    ids, count = torch.tensor([[3, 499, 500, 999]]), torch.tensor([4])
    parts = [lm_head_rescore(h, w[r * 500 : r * 500 + 500], ids, count, 1, r * 500) for r in (0, 1)]
    assert [decode_key(p)[0].item() for p in parts] == [499, 999]
    assert torch.equal(combine_keys(parts), lm_head_rescore(h, w, ids, count))


@pytest.mark.parametrize("rows", [1, 7])
def test_row_027_ids_stay_below_the_vocabulary(rows: int) -> None:
    # llama.cpp#28158: id 248320 of a 248,320-token vocabulary, memory behind it holding +inf
    around = torch.full((248320 + 64, 4), float("inf")).bfloat16()
    w = around[:248320]
    w.copy_(random(248320, 4))
    h = random(rows, 4, seed=1)
    got = select(h, w)
    logits = h.float() @ w.float().T
    assert [logits[i, t].item() for i, t in enumerate(got)] == pytest.approx(logits.amax(1).tolist(), rel=1e-6)
    assert all(0 <= t < 248320 for t in got)


def test_row_029_logits_beyond_fp16() -> None:
    # unsloth-zoo#598: true logits of 6.5e6 are both inf in fp16
    w = torch.zeros(16, 4096, dtype=torch.float16)
    w[3], w[8] = 40.0, 41.0
    h = torch.full((1, 4096), 40.0, dtype=torch.float16)
    for name in ("dense", "int8"):
        key, _ = lm_head_select(h, pack_lm_head(w, format=name, capacity=4))
        assert decode_key(key)[0].item() == 8 and decode_key(key)[1].item() == 4096 * 40 * 41
