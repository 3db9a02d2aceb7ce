"""The installed FlashAttention behind block attention: the reference's answer wherever the backend takes the case."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmtp_kernels
from dmtp_kernels.ops.block_attention import flash, reference
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.ops.block_attention_oracle import attend, paged

CUDA = torch.device("cuda")
MISSING = flash.missing(CUDA)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

CASES: dict[str, dict[str, Any]] = {
    "mtp": {"dense_rows": 9, "block_causal": True},
    "mtp_in_cache": {"block_causal": True},
    "drafter": {"dense_rows": 8, "window": 300},
    "drafter_skip": {"dense_rows": 8, "valid_from": torch.tensor([0, 0, 3, 700, 17])},
    "query_in_cache": {"window": 300, "window_ref": "query", "block_causal": True},
    "query_both_ways": {"window": 300, "window_ref": "query"},
    "capped": {"dense_rows": 8, "block_causal": True, "soft_cap": 2.0},
    "sink": {"dense_rows": 8, "sink": torch.randn(16, generator=torch.Generator().manual_seed(1))},
    "part_of_a_block": {"dense_rows": 8, "block_len": torch.tensor([0, 8, 3, 8, 1])},
}


def inputs_of(name: str, page_size: int, dim: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(CASES[name])
    inputs, block = paged(
        torch.Generator().manual_seed(3), batch=5, slots=8, heads=(16, 2), dim=dim, pages=-(-1024 // page_size),
        page_size=page_size, dense_rows=options.pop("dense_rows", None), dtype=dtype, spare=0,
    )  # fmt: skip
    # unread rows of a page that is read must be finite here: no page holds NaN
    return (*inputs[:4], torch.tensor([0, 1, 299, 1000, 640])), block | options


def moved(values: Any) -> Any:
    return {n: v.to(CUDA) if isinstance(v, torch.Tensor) else v for n, v in values.items()}


@pytest.mark.parametrize(
    ("page_size", "dim", "dtype"),
    [(16, 128, torch.bfloat16), (64, 64, torch.float16), (256, 128, torch.float16), (256, 256, torch.bfloat16)],
)
@pytest.mark.parametrize("name", CASES)
def test_flash_gives_the_reference(name: str, page_size: int, dim: int, dtype: torch.dtype) -> None:
    inputs, options = inputs_of(name, page_size, dim, dtype)
    on_device = tuple(t.to(CUDA) for t in inputs)
    with dmtp_kernels.use_backend("flash", "block_attention"):
        reason = dmtp_kernels.supports("block_attention", *on_device, **moved(options))
        if reason is not None:
            pytest.skip(reason)
        got = attend(*on_device, **moved(options))
    with dmtp_kernels.use_backend("reference", "block_attention"):
        plain = attend(*inputs, **options)
        wide = {
            n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in options.items()
        }
        truth = attend(*(t.double() if t.is_floating_point() else t for t in inputs), **wide)
    assert_within_budget(got.out, truth.out, plain.out, name="out")
    torch.testing.assert_close(got.lse.cpu(), truth.lse.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mtp", "drafter", "query_in_cache"])
def test_same_bits_alone_and_in_a_batch(name: str) -> None:
    inputs, options = inputs_of(name, 256, 128, torch.bfloat16)
    on_device, options = tuple(t.to(CUDA) for t in inputs), moved(options)
    with dmtp_kernels.use_backend("flash", "block_attention"):
        if (reason := dmtp_kernels.supports("block_attention", *on_device, **options)) is not None:
            pytest.skip(reason)
        whole = attend(*on_device, **options)
        q, k, v, table, ctx_len = on_device
        for b in range(5):
            one = {n: t[b : b + 1] if n in ("block_k", "block_v") else t for n, t in options.items()}
            alone = attend(q[b : b + 1], k, v, table[b : b + 1], ctx_len[b : b + 1], **one)
            assert torch.equal(alone.out[0], whole.out[b]) and torch.equal(alone.lse[0], whole.lse[b])


def test_the_reference_is_not_what_ran() -> None:
    inputs, options = inputs_of("mtp_in_cache", 256, 128, torch.bfloat16)
    with dmtp_kernels.use_backend("flash", "block_attention"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "block_attention", None)
        assert torch.isfinite(attend(*(t.to(CUDA) for t in inputs), **options).lse).all()
