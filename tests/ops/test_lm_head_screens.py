"""Screens: their scores bit by bit, their certificates, their shortlists, and factors of a low-rank head."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.lm_head import (
    UNCERTIFIED,
    canonical_dot,
    lm_head_screen,
    lm_head_select,
    pack_lm_head,
    reference,
)
from dmtp_kernels.ops.lm_head.digits import fixed_point, split_digits
from dmtp_kernels.ops.lm_head.formats import whole_rows
from tests.ops.lm_head_cases import CERTIFIED, always_screen, oracle, pack, random, tokens  # noqa: F401

KERNEL_OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")


@pytest.mark.parametrize("name", CERTIFIED)
def test_rows_that_are_not_finite_stay_undecided_alone(name: str) -> None:
    w, h = random(500, 64), random(5, 64, seed=1)
    w[7, 3], w[100, 5], w[101, 6] = float("nan"), float("inf"), float("-inf")
    head = pack(w, name)
    assert head.bound is not None and head.bound[[7, 100, 101]].isinf().all()
    assert head.scale is None or head.scale.isfinite().all()
    ids, count, _ = lm_head_screen(h, head)
    # always on the list, and the others' bounds still hold
    assert (count < 16).all() and all({7, 100, 101} <= set(row.tolist()) for row in ids)


def test_a_bound_too_small_is_noticed() -> None:
    # two rows closer than int8 can tell apart; the better one is lost without its bound
    w = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)) * 0.1
    h = torch.randn(200, 48, generator=torch.Generator().manual_seed(4))
    w[1:] = w[0] + 1e-3 * w[1:]
    head = pack(w, "int8", capacity=63)
    want = oracle(canonical_dot(h, w), 64)
    assert tokens(lm_head_select(h, head)[0]) == want
    loose = dataclasses.replace(head, bound=torch.zeros(64))
    assert tokens(lm_head_select(h, loose)[0]) != want


@pytest.mark.parametrize("name", ["int4_g32", "low_rank"])
def test_uncertified_formats_say_so(name: str) -> None:
    w, h = random(400, 64), random(9, 64, seed=1)
    head = pack(w, name, fallback="none", capacity=5)
    key, status = lm_head_select(h, head)
    assert (status == UNCERTIFIED).all()
    ids, count, lower = lm_head_screen(h, head)
    assert (count == 4).all() and (lower == -torch.inf).all()
    logits = canonical_dot(h, w)
    want = [[max(row[:4].tolist(), key=lambda i: (logits[r, i].item(), -i))] for r, row in enumerate(ids)]
    assert tokens(key) == want
    for n in (1, 2, 7):  # the shortlist must not depend on the batch either
        assert torch.equal(lm_head_screen(h[:n], head)[0], ids[:n])


@pytest.mark.parametrize("hidden", [64, 130])
def test_integer_scores_by_their_definition(hidden: int) -> None:
    # plain Python integers and one rounding at the end; any backend must reproduce these bits
    w, h = random(40, hidden), random(3, hidden, seed=1, dtype=torch.float32)
    h[1] *= 1e-20
    h[2, 0] = 1e6
    for name in ("int8", "int4_g32"):
        head = pack(w, name, fallback="full")
        assert head.codes is not None and head.scale is not None
        rows = whole_rows(head.codes, name, hidden).tolist()
        got = reference._scores(h, head.args())
        for r, state in enumerate(h.tolist()):
            exponent = math.floor(math.log2(max(abs(x) for x in state))) - 21
            q = [round(x * 2.0**-exponent) for x in state]
            for v, row in enumerate(rows):
                total = sum(a * b for a, b in zip(row, q, strict=True))
                assert got[r, v].item() == float(np.float32(total * 2.0**exponent * head.scale[v].item()))
        digits = split_digits(fixed_point(h)[0]).long()
        assert torch.equal(digits[:, 0] + 256 * digits[:, 1] + 65536 * digits[:, 2], fixed_point(h)[0].long())
    strange = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e38, 1.0], [1e-38, 0.0]])
    fixed, step = fixed_point(strange)
    assert (fixed == 0).all() and step[:, 0].isnan().tolist() == [False, True, True, True, True]


def test_shortlists_take_whole_groups_and_all_ties() -> None:
    w, h = torch.zeros(42, 4), torch.ones(1, 4)
    w[9], w[22], w[41], w[30] = 3.0, 2.0, 2.0, 1.0
    for capacity, want in ((4, [8, 9, 10, 11]), (8, [8, 9, 10, 11, 20, 21, 22, 23, 40, 41])):
        head = pack_lm_head(w, format="int4_g32", fallback="none", capacity=capacity)
        ids, count, _ = lm_head_screen(h, head)
        assert count.tolist() == [len(want)] and ids[0].tolist() == want[:capacity]
        assert tokens(lm_head_select(h, head)[0]) == [[9]]
