"""Hidden states as fixed point: what lets an integer screen give the same bits on every backend."""

from __future__ import annotations

import torch

LOW, HIGH = 2.0**-100, 2.0**100
DIGIT_BITS = 8


def fixed_point(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as `q * step` with whole q.

    With `e = floor(log2 max|h|) - 21`, `q = rint(h * 2^-e)` (half to even), so `|q| <= 2^22` and
    `|h - q step| <= 2^-22 max|h|`: below a bf16 rounding of the greatest element by a factor of 2^14. A zero row has
    q = 0. A row whose greatest element is not finite or outside [2^-100, 2^100] cannot be screened: its step is NaN.

    Args:
        hidden: `[n, H]` floating point, rounded to fp32 first.

    Returns:
        `(q [n, H], step [n, 1])`, float64.
    """
    rows = hidden.to(torch.float32).to(torch.float64)
    greatest = rows.abs().amax(dim=1, keepdim=True) if rows.shape[1] else rows.new_zeros(rows.shape[0], 1)
    usable = (greatest >= LOW) & (greatest <= HIGH)
    exponent = torch.frexp(torch.where(usable, greatest, 1.0)).exponent - 22
    step = torch.ldexp(torch.ones_like(greatest), exponent)
    q = torch.where(usable, (rows / step).round(), 0.0)
    # a float64 row may be zero in fp32 alone
    zero = (hidden == 0).all(dim=1, keepdim=True)
    return q, torch.where(usable | zero, step, torch.nan)


def split_digits(q: torch.Tensor) -> torch.Tensor:
    """Signed base-256 digits of whole numbers `|q| <= 2^22`, least first: `q = d0 + 256 d1 + 65536 d2`.

    Args:
        q: `[n, H]`, any dtype that holds it.

    Returns:
        `[n, 3, H]` int8.
    """
    rest, digits = q.to(torch.int64), []
    for _ in range(3):
        digit = ((rest + 128) & 255) - 128
        digits.append(digit)
        rest = (rest - digit) >> DIGIT_BITS
    return torch.stack(digits, dim=1).to(torch.int8)
