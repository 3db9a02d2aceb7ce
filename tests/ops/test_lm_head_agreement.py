"""One answer: the same keys, bit for bit, from every format, batch, shard, backend and instruction set."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops.lm_head import (
    NO_TOKEN,
    UNCERTIFIED,
    LMHead,
    combine_keys,
    lm_head_rescore,
    lm_head_screen,
    lm_head_select,
    pack_lm_head,
)
from tests.ops.conftest import INTERPRETED
from tests.ops.lm_head_adversarial import ADVERSARIAL, Pair, plain
from tests.ops.lm_head_cases import FORMAT_NAMES, always_screen, random  # noqa: F401
from tests.ops.lm_head_oracle import NO_KEY, best_keys

KERNEL_OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")
EVERY_CAPABILITY = True

FP32 = torch.float32
SCREENS = (*FORMAT_NAMES, "low_rank_int8")
STATES = {1: 1, 2: 1, 7: 1, 8: 4, 32: 1, 64: 2, 192: 1}
"""Batch size -> shards: around the kernels' blocks of 2, 4, 8 and 16 states, and past every one of them."""


def test_runs_where_its_name_says(request: pytest.FixtureRequest) -> None:
    name, _, capability = request.node.callspec.params["backend"].partition("-")
    assert [backends.choose(op, torch.device("cpu")) for op in KERNEL_OPS] == [name] * 3
    assert not capability or backends.compiled().capability() == capability


def packed(weight: torch.Tensor, screen: str, **options: Any) -> LMHead:
    name = screen.removesuffix("_int8")
    if screen in ("low_rank", "low_rank_int8"):
        factors = random(5, weight.shape[1], seed=8, dtype=FP32), random(weight.shape[0], 5, seed=9, dtype=FP32)
        options |= {"factors": factors, "up_format": "int8" if name != screen else "same"}
    elif name == "deflated":
        options |= {"calibration": random(32, weight.shape[1], seed=8, dtype=FP32), "rank": min(4, weight.shape[1])}
    return pack_lm_head(weight, format=name if name in FORMAT_NAMES else screen, **options)


def sharded(weight: torch.Tensor, hidden: torch.Tensor, screen: str, ranks: int, valid: int, k: int) -> torch.Tensor:
    size = -(-weight.shape[0] // ranks)
    parts = []
    for rank in range(ranks):
        shard, first = weight[rank * size : (rank + 1) * size], rank * size
        real = max(0, min(shard.shape[0], valid - first))
        key, status = lm_head_select(hidden, packed(shard, screen, id_offset=first, num_valid=real), k)
        assert torch.equal(status, torch.where(key[:, 0] == NO_KEY, NO_TOKEN, 0).int())
        parts.append(key)
    return combine_keys(parts)


@cache
def random_case(rows: int) -> tuple[Pair, torch.Tensor]:
    # V and H multiples of nothing, more than one block of lanes, padding rows that would win
    weight, hidden = random(rows, 267), random(192, 267, seed=1)
    weight[rows - 12 :] *= 100
    return (weight, hidden), best_keys(hidden, weight, 16, num_valid=rows - 12)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize(("n", "ranks"), list(STATES.items()))
def test_random_heads(screen: str, n: int, ranks: int) -> None:
    if INTERPRETED and n not in (1, 8) and screen not in ("dense", "int8", "int4_g32"):
        pytest.skip("interpreted kernels are slow: every batch with three formats, every format with two batches")
    rows = 149 if INTERPRETED and n > 8 else 613
    (weight, hidden), want = random_case(rows)
    # the last states of the batch, so that a result that depends on the place in it is seen
    for k in (1, 16) if n == 8 else (1,):
        got = sharded(weight, hidden[192 - n :], screen, ranks, rows - 12, k)
        assert torch.equal(got, want[192 - n :, :k])


@cache
def adversarial_case(case: str) -> tuple[Pair, torch.Tensor]:
    weight, hidden = ADVERSARIAL[case]()
    return (weight, hidden), best_keys(hidden, weight, 3)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("case", list(ADVERSARIAL))
def test_adversarial_heads(screen: str, case: str) -> None:
    if INTERPRETED and (list(ADVERSARIAL).index(case) + SCREENS.index(screen)) % 3:
        pytest.skip("interpreted kernels are slow: every case with a third of the formats")
    (weight, hidden), want = adversarial_case(case)
    rows = weight.shape[0]
    assert torch.equal(sharded(weight, hidden, screen, 1, rows, 3), want)
    assert torch.equal(sharded(weight, hidden, screen, min(4, rows), rows, 1), want[:, :1])


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("mode", ["offset", "absolute"])
def test_maps_strides_and_rounded_logits(screen: str, mode: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = random(190, 80, seed=4)[:, :75]  # rows further apart than they are long
    hidden = random(6, 100, seed=5)[:, 9:84]
    table = torch.randperm(400, generator=generator)[:190].int()
    if mode == "absolute":
        table[::7] = -1
    head = packed(weight, screen, id_map=table, id_map_mode=mode, num_valid=171)
    tokens = table if mode == "absolute" else table + torch.arange(190)
    for logit_dtype in ("float32", "bfloat16"):
        want = best_keys(hidden, weight, 5, num_valid=171, tokens=tokens, logit_dtype=logit_dtype)
        assert torch.equal(lm_head_select(hidden, head, 5, logit_dtype)[0], want)


@pytest.mark.parametrize("screen", ["int4_g32", "low_rank", "low_rank_int8"])
@pytest.mark.parametrize("capacity", [1, 6, 40, 300])
def test_shortlists_are_the_references(screen: str, capacity: int) -> None:
    if INTERPRETED and capacity in (1, 300):
        pytest.skip("interpreted kernels are slow")
    cases: list[Pair] = [adversarial_case(c)[0] for c in ("small_integers", "all_equal", "nan_and_inf_states")]
    random_rows, states = (190, 4) if INTERPRETED else (517, 21)
    for weight, hidden in [*cases, (random(random_rows, 130), random(states, 130, seed=1))]:
        table = torch.arange(weight.shape[0])
        table[40:45] = -1
        head = packed(
            weight,
            screen,
            capacity=capacity,
            fallback="none",
            num_valid=weight.shape[0] - 2,
            id_map=table,
            id_map_mode="absolute",
        )
        k = min(3, capacity)
        with use_backend("reference", *KERNEL_OPS):
            ids, count, _ = lm_head_screen(hidden, head, k=k)
            key, status = lm_head_select(hidden, head, k)
        got_ids, got_count, lower = lm_head_screen(hidden, head, k=k)
        assert torch.equal(got_count, count) and (lower == -torch.inf).all()
        whole = count <= capacity
        assert torch.equal(got_ids[whole], ids[whole])
        got_key, got_status = lm_head_select(hidden, head, k)
        assert torch.equal(got_key, key) and torch.equal(got_status, status)
        assert (got_status & UNCERTIFIED == UNCERTIFIED).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rescored_lists(index: torch.dtype) -> None:
    weight, hidden = random(90, 267), random(9, 267, seed=1)
    ids = torch.stack([torch.randperm(130, generator=torch.Generator().manual_seed(i))[:70] for i in range(9)]) + 990
    count = torch.tensor([70, 0, 1, -3, 64, 65, 700, 33, 2])
    key = lm_head_rescore(hidden, weight, ids.to(index), count.to(index), 4, 1000, num_valid=80)
    for row in range(9):
        listed = ids[row, : max(0, int(count[row]))] - 1000
        rows = listed[(listed >= 0) & (listed < 80)]
        assert torch.equal(key[row : row + 1], best_keys(hidden[row : row + 1], weight[rows], 4, tokens=rows + 1000))


def test_nothing_to_select() -> None:
    weight, hidden = plain()
    for screen in SCREENS:
        key, status = lm_head_select(hidden, packed(weight, screen, num_valid=0, capacity=4), 2)
        assert (key == NO_KEY).all() and (status == NO_TOKEN).all()
        ids, count, lower = lm_head_screen(hidden, packed(weight, screen, num_valid=0, capacity=4))
        assert (ids == -1).all() and (count == 0).all() and (lower == -torch.inf).all()
        assert lm_head_select(hidden[:0], packed(weight, screen))[0].shape == (0, 1)
        assert lm_head_screen(hidden[:0], packed(weight, screen, capacity=4))[0].shape == (0, 4)
    assert (lm_head_rescore(hidden, weight, torch.zeros(3, 0).long(), torch.zeros(3).long()) == NO_KEY).all()
