"""The error budget of a kernel: at most twice what eager PyTorch errs at the same dtype, plus one ulp."""

from __future__ import annotations

import math

import torch

FACTOR = 2.0
"""Times the error of the eager computation, as FlashAttention and cut-cross-entropy test."""


def ulp(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of `value` in `dtype`: the distance to the next larger number."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(value), info.smallest_normal))
    return info.eps * 2.0 ** (exponent - 1)


def assert_within_budget(
    got: torch.Tensor, truth: torch.Tensor, eager: torch.Tensor, *, name: str = "output", factor: float = FACTOR
) -> None:
    """Fail unless `got` errs at most `factor` times as much as `eager`, plus one ulp of the largest true value.

    NaN and infinities must be where the truth, rounded to the output dtype, has them and nowhere else, whatever
    `eager` has there; errors are the largest over the other elements.

    Args:
        got: what the kernel wrote, in the output dtype; any shape.
        truth: the same in float64.
        eager: what plain PyTorch gives at the dtype of `got`.

    Raises:
        AssertionError: with the errors and the place of the largest.
        ValueError: shapes or dtypes do not fit each other.
    """
    if not got.shape == truth.shape == eager.shape:
        raise ValueError(f"{name}: shapes differ: {[tuple(t.shape) for t in (got, truth, eager)]}")
    if truth.dtype != torch.float64 or eager.dtype != got.dtype or not got.is_floating_point():
        raise ValueError(
            f"{name}: is {got.dtype}, eager {eager.dtype}, must be one floating dtype; truth {truth.dtype}"
        )
    dtype = got.dtype
    rounded = truth.detach().cpu().to(dtype).double().reshape(-1)
    exact, out, plain = (t.detach().cpu().double().reshape(-1) for t in (truth, got, eager))
    special = ~rounded.isfinite()
    same = (rounded == out) | (rounded.isnan() & out.isnan())
    wrong = (special | ~out.isfinite()) & ~same
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in NaN or infinity, the first at "
            f"{_place(at, got.shape)}: is {out[at]:g}, must be {rounded[at]:g}"
        )
    if special.all():
        return
    error, allowed = (out - exact).abs()[~special], (plain - exact).abs()[~special]
    allowed = allowed[allowed.isfinite()]
    eager_error = float(allowed.max()) if allowed.numel() else 0.0
    budget = factor * eager_error + ulp(float(exact[~special].abs().max()), dtype)
    if float(error.max()) > budget:
        at = int((~special).nonzero()[error.argmax()])
        raise AssertionError(
            f"{name}: errs {float(error.max()):.3g} at {_place(at, got.shape)} (is {out[at]:g}, truth {exact[at]:g}), "
            f"may err {budget:.3g}: {factor:g} x eager's {eager_error:.3g} and an ulp"
        )


def _place(index: int, shape: torch.Size) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        place.append(index % size)
        index //= size
    return tuple(reversed(place))
