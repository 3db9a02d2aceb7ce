"""Dense masked attention for training: explicit products and softmax, on a CPU much faster than SDPA's backward."""

from __future__ import annotations

import torch

from dmtp_kernels.models.layers import Attend


def attend_with_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`q[B, T, Hq, D]` on `k, v[B, J, Hkv, D]` plus `bias[B or 1, T, J]` (0 or -inf); returns `[B, T, Hq, D]`."""
    batch, rows, heads, width = q.shape
    groups = k.shape[2]
    shared = heads // groups
    # query heads of one group become rows, so one product per group serves all of them
    q = (q * width**-0.5).unflatten(2, (groups, shared)).permute(0, 2, 3, 1, 4).reshape(batch, groups, -1, width)
    scores = q @ k.permute(0, 2, 3, 1)  # [B, Hkv, G*T, J]
    scores = scores.unflatten(2, (shared, rows)) + bias[:, None, None]
    out = scores.softmax(-1).flatten(2, 3) @ v.transpose(1, 2)
    return out.unflatten(2, (shared, rows)).permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, width)


def causal_bias(length: int, dtype: torch.dtype) -> torch.Tensor:
    """`[1, T, T]`: every row sees itself and what came before."""
    return torch.full((length, length), float("-inf"), dtype=dtype).triu(1)[None]


def causal_attend(bias: torch.Tensor) -> Attend:
    return lambda layer, q, k, v: attend_with_bias(q, k, v, bias)


def block_bias(anchors: torch.Tensor, slots: int, context: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """`[B, N*S, T + N*S]` for blocks at `anchors[B, N]`.

    A slot sees the context rows strictly before its anchor, at most `window` of them, and every slot of its own block.
    """
    rows = torch.arange(context)
    visible = rows < anchors[..., None]  # [B, N, T]
    if window is not None:
        visible &= rows >= anchors[..., None] - window
    batch, count = anchors.shape
    visible = visible[:, :, None].expand(batch, count, slots, context).flatten(1, 2)
    block = torch.arange(count).repeat_interleave(slots)
    own = (block[:, None] == block).expand(batch, -1, -1)
    return torch.where(torch.cat([visible, own], dim=-1), 0.0, float("-inf")).to(dtype)


def block_attend(context: list[tuple[torch.Tensor, torch.Tensor]], bias: torch.Tensor) -> Attend:
    """Blocks `[B, N, S, ...]` attend to each layer's context `k, v[B, T, Hkv, D]` and to themselves."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([context[layer][0], k.flatten(1, 2)], dim=1)
        values = torch.cat([context[layer][1], v.flatten(1, 2)], dim=1)
        return attend_with_bias(q.flatten(1, 2), keys, values, bias).unflatten(1, q.shape[1:3])

    return attend
