"""Heads and states that a screen, a tie rule or a rounding gets wrong first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.ops.lm_head_cases import random

Pair = tuple[torch.Tensor, torch.Tensor]  # weight, hidden
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

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
