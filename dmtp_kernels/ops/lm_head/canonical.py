"""The canonical dot product: one row's logit has the same bits on every backend, for any batch, tile and shard."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dmtp_kernels.ops._checks import check_instance

LANES = 256
_CHUNK_ELEMENTS = 1 << 19


def canonical_dot(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Dot products with a fixed summation order.

    Lane j of 256 accumulates `hidden[i] * rows[i]` for i = j, j + 256, ... in that order, starting at zero; then
    adjacent lanes are added pairwise, eight times. Multiply and add round separately: a fused multiply-add gives other
    bits, for bf16 inputs only where a product leaves the range of fp32 (fp16 products never do). Accumulation is fp32,
    or float64 when an input is float64. The result depends on its own two vectors only. The sign of a zero is not part
    of the contract.

    Args:
        hidden: `[n, H]` floating point.
        rows: `[V, H]` (every row with every hidden state) or `[n, C, H]` (each hidden state with its own rows).

    Returns:
        `[n, V]` or `[n, C]`, float32 (float64 when an input is float64).

    Raises:
        ValueError, TypeError: the shapes do not fit, or an argument is no tensor.
    """
    check_instance("hidden", hidden, torch.Tensor)
    check_instance("rows", rows, torch.Tensor)
    if hidden.dim() != 2 or rows.dim() not in (2, 3) or rows.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"rows: shape is {tuple(rows.shape)}, must be [V, H] or [n, C, H] for hidden {tuple(hidden.shape)}"
        )
    if rows.dim() == 3:
        if rows.shape[0] != hidden.shape[0]:
            raise ValueError(f"rows: dimension 0 is {rows.shape[0]}, must be {hidden.shape[0]} like hidden")
        return _dots(hidden[:, None, :], rows)
    parts = [part for _, part in canonical_chunks(hidden, rows)]
    return torch.cat(parts, dim=1) if parts else hidden.new_zeros(hidden.shape[0], 0, dtype=dot_dtype(hidden, rows))


def canonical_chunks(hidden: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """`(start, [n, chunk])` canonical dots of `rows[start : start + chunk]`, with bounded scratch memory."""
    step = max(1, _CHUNK_ELEMENTS // max(1, hidden.shape[0] * hidden.shape[1]))
    for start in range(0, rows.shape[0], step):
        yield start, _dots(hidden[:, None, :], rows[start : start + step])


def dot_dtype(hidden: torch.Tensor, rows: torch.Tensor) -> torch.dtype:
    """dtype of the accumulators."""
    return torch.float64 if torch.float64 in (hidden.dtype, rows.dtype) else torch.float32


def _dots(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    dtype = dot_dtype(hidden, rows)
    hidden, rows = hidden.to(dtype), rows.to(dtype)
    lanes = hidden[..., :LANES] * rows[..., :LANES]
    for start in range(LANES, hidden.shape[-1], LANES):
        product = hidden[..., start : start + LANES] * rows[..., start : start + LANES]
        lanes[..., : product.shape[-1]] += product
    # a missing lane is +0.0, so an odd last lane passes through unchanged
    while lanes.shape[-1] > 1:
        width = lanes.shape[-1]
        pairs = lanes[..., 0 : width - 1 : 2] + lanes[..., 1:width:2]
        lanes = torch.cat((pairs, lanes[..., -1:]), dim=-1) if width % 2 else pairs
    return lanes[..., 0] if lanes.shape[-1] else lanes.new_zeros(lanes.shape[:-1])
