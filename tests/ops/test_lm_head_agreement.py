"""One answer: the same keys, bit for bit, from every format, batch, shard, backend and instruction set."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.ops.lm_head_cases import FORMAT_NAMES, always_screen, random  # noqa: F401
from tests.ops.lm_head_oracle import NO_KEY, best_keys

KERNEL_OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")
EVERY_CAPABILITY = True

Pair = tuple[torch.Tensor, torch.Tensor]  # weight, hidden
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
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
def random_case() -> tuple[Pair, torch.Tensor]:
    # V and H multiples of nothing, more than one block of lanes, padding rows that would win
    weight, hidden = random(613, 267), random(192, 267, seed=1)
    weight[601:] *= 100
    return (weight, hidden), best_keys(hidden, weight, 16, num_valid=601)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize(("n", "ranks"), list(STATES.items()))
def test_random_heads(screen: str, n: int, ranks: int) -> None:
    (weight, hidden), want = random_case()
    # the last states of the batch, so that a result that depends on the place in it is seen
    for k in (1, 16) if n == 8 else (1,):
        got = sharded(weight, hidden[192 - n :], screen, ranks, 601, k)
        assert torch.equal(got, want[192 - n :, :k])


ADVERSARIAL: dict[str, Callable[[], Pair]] = {}


def adversarial(make: Callable[[], Pair]) -> Callable[[], Pair]:
    ADVERSARIAL[make.__name__] = make
    return make


def plain(rows: int = 210, width: int = 70, dtype: torch.dtype = FP32) -> Pair:
    return random(rows, width, dtype=dtype), random(3, width, seed=1, dtype=dtype)


@adversarial
def duplicates_across_tiles_and_shards() -> Pair:
    weight, hidden = plain(dtype=BF16)
    return weight[torch.arange(210) % 37], hidden


@adversarial
def all_equal() -> Pair:
    weight, hidden = plain(dtype=BF16)
    return weight[:1].expand(210, 70), hidden


@adversarial
def negative_zeros() -> Pair:
    weight, hidden = plain()
    return torch.full_like(weight, -0.0), hidden.abs()


@adversarial
def zero_hidden() -> Pair:
    weight, hidden = plain(dtype=BF16)
    return weight, hidden * torch.tensor([[1], [0], [1]]).bfloat16()


@adversarial
def nan_and_inf_rows() -> Pair:
    weight, hidden = plain(dtype=BF16)
    weight[[0, 5, 207]], weight[9, 0], weight[100] = float("nan"), float("-inf"), float("inf")
    return weight, hidden


@adversarial
def nan_and_inf_states() -> Pair:
    weight, hidden = plain(dtype=BF16)
    hidden[0], hidden[2, 69] = float("nan"), float("inf")
    return weight, hidden


@adversarial
def one_huge_row() -> Pair:
    weight, hidden = plain()
    weight[77] *= 1e30
    return weight, hidden


@adversarial
def all_logits_negative() -> Pair:
    weight, hidden = plain(dtype=BF16)
    return -weight.abs(), hidden.abs()


@adversarial
def small_integers() -> Pair:
    weight, hidden = plain(dtype=BF16)
    return weight.round().clamp(-1, 1), hidden.round().clamp(-1, 1)


@adversarial
def near_ties() -> Pair:
    weight, hidden = plain()
    weight[105:] = weight[:105] * (1 + 1e-7)
    return weight, hidden


@adversarial
def huge_hidden() -> Pair:
    weight, hidden = plain()
    return weight, hidden * 1e30


@adversarial
def tiny_hidden() -> Pair:
    weight, hidden = plain()
    return weight, hidden * 1e-30


@adversarial
def hidden_beyond_fixed_point() -> Pair:
    weight, hidden = plain()
    return weight, hidden * torch.tensor([[1e-31], [2.0**101], [1e-44]])


@adversarial
def huge_rows_and_tiny_states() -> Pair:
    # a scale times a sum of codes overflows fp32 although no logit does
    weight, hidden = plain(width=130)
    return weight * 1e37, hidden * 1e-29


@adversarial
def subnormal_rows() -> Pair:
    weight, hidden = plain(dtype=BF16)
    return weight * 1e-39, hidden


@adversarial
def subnormal_states_of_huge_rows() -> Pair:
    # to an instruction that takes subnormals as zero the rows that lose look best
    first = 0.9 + 0.2 * torch.rand(210, 1, generator=torch.Generator().manual_seed(11))
    weight = torch.where(first > 1.0, -1e37, 1e37).expand(210, 70).clone()
    weight[:, :1] = 1e37 * first
    hidden = torch.full((3, 70), 2.0**-127)
    hidden[:, 0] = 2.0**-120
    return weight.bfloat16(), hidden.bfloat16()


@adversarial
def dots_overflow() -> Pair:
    weight, hidden = plain()
    return weight * 1e20, hidden * 1e20


@adversarial
def bf16_products_underflow() -> Pair:
    # below 2^-134 a bf16 product is not exact in fp32: a fused multiply-add would round differently
    weight, hidden = plain(dtype=BF16)
    return weight * 2.0**-70, hidden * 2.0**-71


@adversarial
def outlier_columns() -> Pair:
    weight, hidden = plain(dtype=BF16)
    weight[:, 3] *= 300
    hidden[:, [3, 69]] *= 100
    return weight, hidden


@adversarial
def fp16_rows_of_bf16_states() -> Pair:
    weight, hidden = plain(dtype=FP16)
    weight[::3] *= 2.0**-12  # subnormal in fp16
    return weight, hidden.bfloat16()


@adversarial
def fp32_states_of_bf16_rows() -> Pair:
    return plain(dtype=BF16)[0], plain()[1]


@adversarial
def one_row() -> Pair:
    return plain(1)


@adversarial
def one_column() -> Pair:
    return plain(width=1)


@cache
def adversarial_case(case: str) -> tuple[Pair, torch.Tensor]:
    weight, hidden = ADVERSARIAL[case]()
    return (weight, hidden), best_keys(hidden, weight, 3)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("case", list(ADVERSARIAL))
def test_adversarial_heads(screen: str, case: str) -> None:
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
    cases: list[Pair] = [adversarial_case(c)[0] for c in ("small_integers", "all_equal", "nan_and_inf_states")]
    for weight, hidden in [*cases, (random(517, 130), random(21, 130, seed=1))]:
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
