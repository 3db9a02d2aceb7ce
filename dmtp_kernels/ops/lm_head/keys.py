"""Keys: a logit and its token id in one int64 whose maximum is the greedy token on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels.ops._checks import check_instance

NO_KEY = -(1 << 63)
"""Key of no token: loses against every other key and decodes to (-1, NaN)."""


def encode_key(logit: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`monotone(fp32 logit) << 32 | ~id` (the ids broadcast to the logits); NaN logits and negative ids give `NO_KEY`.

    The greatest key has the greatest logit, and the lowest id among equal logits; -0.0 equals +0.0.
    """
    check_instance("logit", logit, torch.Tensor)
    check_instance("token", token, torch.Tensor)
    logit = logit.to(torch.float32) + 0.0
    bits = logit.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    key = (ordered << 32) | (~token.to(torch.int64) & 0xFFFFFFFF)
    return torch.where(logit.isnan() | (token < 0), NO_KEY, key)


def decode_key(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token id and logit of each key.

    Args:
        key: int64, any shape, from `lm_head_select` or `lm_head_rescore`.

    Returns:
        `(token int64, logit float32)` of the same shape; `NO_KEY` gives (-1, NaN).

    Raises:
        TypeError: `key` is not an int64 tensor.
    """
    token = key_token(key)
    ordered = key >> 32
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return token, bits.to(torch.int32).view(torch.float32)


def key_token(key: torch.Tensor) -> torch.Tensor:
    """Token id of each key, as `decode_key` without the logit: three small launches instead of eight."""
    _check_key("key", key)
    return (~key << 32) >> 32


def combine_keys(keys: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The best k keys over all ranks, best first: an elementwise maximum when k is 1.

    Args:
        keys: one `[n, k]` int64 tensor per rank, or all of them stacked `[ranks, n, k]`.

    Returns:
        `[n, k]` int64, the same on every rank whatever the order of the ranks.

    Raises:
        ValueError, TypeError: no keys, keys that are not int64 or not of one shape, or not three dimensions once
            stacked.
    """
    if not isinstance(keys, torch.Tensor):
        check_instance("keys", keys, Sequence)
        if not keys:
            raise ValueError("keys: is empty, must have one tensor per rank")
        for rank, key in enumerate(keys):
            _check_key(f"keys[{rank}]", key)
            if key.shape != keys[0].shape:
                raise ValueError(f"keys[{rank}]: shape is {tuple(key.shape)}, must be {tuple(keys[0].shape)}")
        keys = torch.stack(tuple(keys))
    _check_key("keys", keys)
    if keys.dim() != 3 or keys.shape[0] == 0:
        raise ValueError(f"keys: stacked shape is {tuple(keys.shape)}, must be [ranks, n, k] with at least one rank")
    ranks, rows, width = keys.shape
    if width == 1:
        return keys.amax(dim=0)
    return keys.transpose(0, 1).reshape(rows, ranks * width).topk(width, dim=1).values


def _check_key(name: str, key: object) -> None:
    if not isinstance(key, torch.Tensor):
        hint = "; lm_head_select returns (key, status)" if isinstance(key, tuple) else ""
        raise TypeError(f"{name}: is a {type(key).__name__}, must be an int64 tensor{hint}")
    if key.dtype != torch.int64:
        raise TypeError(f"{name}: dtype is {key.dtype}, must be torch.int64")
