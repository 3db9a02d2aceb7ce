"""The head: canonical dots, keys, certificates, and one answer for every format, batch and shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops import lm_head as family
from dmtp_kernels.ops.lm_head import (
    NO_KEY,
    NO_TOKEN,
    canonical_dot,
    combine_keys,
    decode_key,
    encode_key,
    lm_head_report,
    lm_head_rescore,
    lm_head_screen,
    lm_head_select,
    pack_lm_head,
)
from tests.ops.lm_head_cases import (  # noqa: F401
    CERTIFIED,
    FORMAT_NAMES,
    always_screen,
    oracle,
    pack,
    random,
    tokens,
)

KERNEL_OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")


def loop_dot(h: torch.Tensor, w: torch.Tensor) -> np.float32:
    """One canonical dot by its definition."""
    a, b = h.float().numpy(), w.float().numpy()
    lanes = np.zeros(256, np.float32)
    for i in range(a.shape[0]):
        lanes[i % 256] = np.float32(lanes[i % 256] + np.float32(a[i] * b[i]))
    while lanes.shape[0] > 1:
        lanes = lanes[0::2] + lanes[1::2]
    return lanes[0]


@pytest.mark.parametrize("hidden", [1, 7, 64, 192, 255, 256, 257, 600])  # around one block of lanes, masked tails
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_canonical_dot_equals_the_loop(hidden: int, dtype: torch.dtype) -> None:
    h, w = random(3, hidden, dtype=dtype), random(5, hidden, seed=1, dtype=dtype)
    got = canonical_dot(h, w)
    want = np.array([[loop_dot(a, b) for b in w] for a in h])
    np.testing.assert_array_equal(got.numpy(), want)
    own = canonical_dot(h, w.expand(3, 5, hidden))
    np.testing.assert_array_equal(own.numpy(), want)


def test_canonical_dot_in_float64_is_the_truth() -> None:
    h, w = random(4, 700, dtype=torch.float64), random(9, 700, seed=1)
    got = canonical_dot(h, w)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), h.numpy() @ w.double().numpy().T, rtol=1e-12, atol=1e-12)


def test_canonical_dot_does_not_depend_on_chunks_or_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    h, w = random(33, 300), random(97, 300, seed=1)
    whole = canonical_dot(h, w)
    monkeypatch.setattr("dmtp_kernels.ops.lm_head.canonical._CHUNK_ELEMENTS", 5 * 300)
    for n in (1, 2, 7):
        torch.testing.assert_close(canonical_dot(h[:n], w), whole[:n], rtol=0, atol=0)


def test_canonical_dot_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="rows: shape"):
        canonical_dot(random(2, 8), random(3, 9))
    with pytest.raises(ValueError, match="rows: dimension 0"):
        canonical_dot(random(2, 8), random(3, 4, 8))


def test_keys_order_like_logits_then_lowest_id() -> None:
    values = [-np.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, np.inf]
    logit = torch.tensor(values, dtype=torch.float32).repeat_interleave(3)
    ids = torch.tensor([0, 5, 2**31 - 1]).repeat(len(values))
    key = encode_key(logit, ids)
    for i in range(len(key)):
        for j in range(len(key)):
            better = (logit[i].item(), -ids[i].item()) > (logit[j].item(), -ids[j].item())
            assert (key[i] > key[j]).item() == better
    token, back = decode_key(key)
    assert token.tolist() == ids.tolist()
    torch.testing.assert_close(back, logit + 0.0, rtol=0, atol=0)
    assert not torch.signbit(back[logit == 0]).any()


def test_keys_of_no_token() -> None:
    key = encode_key(torch.tensor([float("nan"), 1.0]), torch.tensor([3, -1]))
    assert key.tolist() == [NO_KEY, NO_KEY]
    token, logit = decode_key(key)
    assert token.tolist() == [-1, -1] and logit.isnan().all()
    assert encode_key(torch.tensor(-torch.inf), torch.tensor(2**31 - 1)) > NO_KEY


def test_combine_keys_is_the_same_in_any_rank_order() -> None:
    keys = torch.randint(-50, 50, (4, 6, 3), generator=torch.Generator().manual_seed(0))
    want = [sorted(keys[:, i].flatten().tolist(), reverse=True)[:3] for i in range(6)]
    assert combine_keys(keys).tolist() == want
    assert combine_keys([keys[r] for r in (2, 0, 3, 1)]).tolist() == want
    assert combine_keys(keys[..., :1]).tolist() == keys[..., :1].amax(0).tolist()
    with pytest.raises(ValueError, match="keys"):
        combine_keys([])


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("logit_dtype", ["float32", "bfloat16"])
def test_one_answer_for_every_format_batch_and_shard(name: str, k: int, logit_dtype: str) -> None:
    w, h = random(613, 72), random(33, 72, seed=1)  # V and H multiples of nothing
    logits = canonical_dot(h, w)
    logits = logits.bfloat16().float() if logit_dtype == "bfloat16" else logits
    want = oracle(logits, 601, k)
    for n in (1, 2, 7, 33):
        key, status = lm_head_select(h[:n], pack(w, name, num_valid=601), k, logit_dtype)
        assert tokens(key) == want[:n] and not status.any()
    torch.testing.assert_close(decode_key(key)[1][:, 0], logits.gather(1, torch.tensor(want)[:, :1])[:, 0])
    for ranks in (2, 4):
        size = -(-613 // ranks)
        parts = []
        for r in range(ranks):
            shard = w[r * size : (r + 1) * size]
            head = pack(shard, name, id_offset=r * size, num_valid=min(len(shard), 601 - r * size))
            parts.append(lm_head_select(h, head, k, logit_dtype)[0])
        assert tokens(combine_keys(parts)) == want


def adversarial() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    w, h = random(130, 40, dtype=torch.float32), random(3, 40, seed=1, dtype=torch.float32)
    cases: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def edit(name: str, change: Any) -> None:
        a, b = w.clone(), h.clone()
        change(a, b)
        cases[name] = (a, b)

    edit("all equal", lambda a, b: a.copy_(a[:1].expand_as(a)))
    edit("duplicates", lambda a, b: a[65:].copy_(a[:65]))
    edit("zero hidden", lambda a, b: b.zero_())
    edit("negative zeros", lambda a, b: (a.fill_(-0.0), b.abs_()))
    edit("huge row", lambda a, b: a[77].mul_(1e30))
    edit("huge hidden", lambda a, b: b.mul_(1e38))
    edit("dots overflow", lambda a, b: (a.mul_(1e20), b.mul_(1e20)))
    # NaN by its canonical order, yet 4e37 if summed exactly: its interval must not rule the others out
    cancel = torch.tensor([1.0, 1.0, -0.9, -0.9]) * 1e19
    edit("partial sums overflow", lambda a, b: (a[50].zero_(), a[50, :4].copy_(cancel), b[:, :4].fill_(2e19)))
    edit("dots underflow", lambda a, b: (a.mul_(1e-25), b.mul_(1e-20)))
    edit("subnormal rows", lambda a, b: a.mul_(1e-40))
    edit("nan row", lambda a, b: a[3].fill_(float("nan")))
    edit("inf rows", lambda a, b: (a[5].fill_(float("inf")), a[9, 0].fill_(float("-inf"))))
    edit("nan hidden", lambda a, b: b[1].fill_(float("nan")))
    edit("inf hidden", lambda a, b: b[1, 7].fill_(float("inf")))
    edit("all negative", lambda a, b: (a.abs_().neg_(), b.abs_()))
    edit("zero rows", lambda a, b: a[::2].zero_())
    return cases


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("case", list(adversarial()))
def test_adversarial_heads(name: str, case: str) -> None:
    w, h = adversarial()[case]
    want = oracle(canonical_dot(h, w), 125)
    factors = {} if name != "low_rank" else {"calibration": None, "rank": None, "factors": (w[:4] * 0 + 1, w[:, :4])}
    head = pack(w, name, num_valid=125, **factors)
    key, status = lm_head_select(h, head)
    assert tokens(key) == want
    assert status.tolist() == [NO_TOKEN if t == [-1] else 0 for t in want]
    top3 = oracle(canonical_dot(h, w), 125, 3)
    assert tokens(lm_head_select(h, head, 3)[0]) == top3


def test_padding_rows_full_of_poison_change_nothing() -> None:
    w, h = random(200, 64), random(4, 64, seed=1)
    want = tokens(lm_head_select(h, pack(w, "int8", num_valid=150))[0])
    w[150:] = float("nan")
    assert tokens(lm_head_select(h, pack(w, "int8", num_valid=150))[0]) == want
    w[150:] = 1e30
    assert tokens(lm_head_select(h, pack(w, "int8", num_valid=150))[0]) == want


def test_screen_lists_every_row_that_can_win() -> None:
    w, h = random(500, 64), random(20, 64, seed=1)
    logits = canonical_dot(h, w)
    for name in CERTIFIED:
        ids, count, lower = lm_head_screen(h, pack(w, name, id_offset=100, num_valid=490), 40)
        assert ids.shape == (20, 40)
        for row in range(20):
            kept = ids[row, : count[row]]
            assert (ids[row, count[row] :] == -1).all() and (kept.diff() > 0).all()
            assert kept.min() >= 100 and kept.max() < 590
            assert logits[row, :490].argmax() + 100 in kept
            assert lower[row] <= logits[row, :490].max()
    ids3, _, lower3 = lm_head_screen(h, pack(w, "int8", num_valid=490), 40, k=3)
    assert all(set(logits[r, :490].topk(3).indices.tolist()) <= set(ids3[r].tolist()) for r in range(20))
    assert (lower3 <= logits[:, :490].topk(3).values[:, 2]).all()


def test_screen_reports_overflow_by_its_count() -> None:
    w = random(1, 64).expand(90, 64)
    ids, count, _ = lm_head_screen(random(2, 64, seed=1), pack(w, "int8"), 8)
    assert count.tolist() == [90, 90] and ids.tolist() == [list(range(8))] * 2


def test_rescore_outside_the_list_is_never_read() -> None:
    w, h = random(10, 32), random(2, 32, seed=1)
    guarded = torch.full((30, 32), float("nan"), dtype=w.dtype)
    guarded[10:20] = w
    ids = torch.tensor([[1009, -1, 2**31 - 1, -(2**63), 999, 1003, 1010], [1003, 1001, 1009, 1000, 1002, 1004, 1005]])
    key = lm_head_rescore(h, guarded[10:20], ids, torch.tensor([7, 2]), 3, 1000, num_valid=9)
    logits = canonical_dot(h, w)
    assert tokens(key)[0] == [1003, -1, -1]
    assert tokens(key)[1] == [1000 + i for i in sorted((1, 3), key=lambda i: -logits[1, i].item())] + [-1]
    for count in (-5, 0):
        none = lm_head_rescore(h, w, ids.int().clamp(min=-1), torch.tensor([count, count]).int(), 1, 1000)
        assert tokens(none) == [[-1], [-1]]


def test_products_that_underflow_round_before_they_are_added() -> None:
    # half of the least fp32 number rounds to 0, one and a half of it to two: a fused multiply-add gives another logit
    w, h = torch.zeros(2, 300, dtype=torch.bfloat16), torch.full((1, 300), 2.0**-75, dtype=torch.bfloat16)
    w[0, 0], w[0, 256] = 2.0**-74, 2.0**-75
    # and with random mantissas around the least number
    generator = torch.Generator().manual_seed(0)
    many = (torch.randn(64, 300, generator=generator) * 2.0**-70).bfloat16()
    w = torch.cat((w, many))
    key = lm_head_rescore(h, w, torch.arange(66)[None], torch.tensor([66]), 66)
    token, logit = decode_key(key[0])
    assert logit[token == 0].tolist() == [2.0**-149]
    assert torch.equal(logit[token.argsort()], canonical_dot(h, w)[0] + 0.0)


def test_out_form_writes_its_buffers_only() -> None:
    w, h = random(200, 64), random(5, 64, seed=1)
    head = pack(w, "int8")
    around = torch.full((7, 4), 77, dtype=torch.int64)
    flags = torch.full((7,), 77, dtype=torch.int32)
    family.LM_HEAD_SELECT.out(
        h, *head.tensors(), **head.scalars(), k=2, logit_dtype="float32", key=around[1:6, 1:3], status=flags[1:6]
    )
    assert torch.equal(around[1:6, 1:3], lm_head_select(h, head, 2)[0]) and (flags[1:6] == 0).all()
    around[1:6, 1:3] = 77
    assert (around == 77).all() and flags[0] == 77 == flags[6]


def test_report() -> None:
    w, h = random(400, 64), random(50, 64, seed=1)
    exact, best = lm_head_report(pack(w, "int8"), h), oracle(canonical_dot(h, w), 400)
    assert exact.recall == 1.0 and exact.overflow == 0.0 and 1 <= exact.survivors[0.5] <= exact.survivors[1.0] <= 16
    # hidden states that live in 8 directions: their principal directions shortlist perfectly
    flat = random(300, 8, seed=2, dtype=torch.float32) @ random(8, 64, seed=3, dtype=torch.float32)
    good = pack_lm_head(w, format="low_rank", calibration=flat[:200], rank=8, capacity=16)
    assert lm_head_report(good, flat[200:]).recall == 1.0
    poor = pack(w, "low_rank", capacity=4)
    assert lm_head_report(poor, h).recall < 1.0
    # what is kept is what the shortlist alone answers, and certified formats keep all even when their list is too short
    right = [a == b for a, b in zip(tokens(lm_head_select(h, replace(poor, full_scan=False))[0]), best, strict=True)]
    assert lm_head_report(poor, h).kept == sum(right) / 50 < 1.0
    short = lm_head_report(pack(w, "int6_g64", capacity=1), h)
    assert short.kept == exact.kept == 1.0 and short.overflow > 0
    assert [lm_head_report(pack(w, n), h).bytes_per_row for n in ("dense", "int8", "int4_g32")] == [132, 72, 52]
    with pytest.raises(ValueError, match="states"):
        lm_head_report(good, flat[:0])


def test_an_unpacked_head_is_named() -> None:
    weight = torch.randn(4, 8)
    for op in (lm_head_select, lm_head_screen):
        with pytest.raises(TypeError, match="head: is a Tensor, must be a LMHead"):
            op(torch.randn(1, 8), weight)  # type: ignore[arg-type]
