"""Keys of a head by their definition, in NumPy: nothing here is shared with the ops."""

from __future__ import annotations

import numpy as np
import torch

NO_KEY = -(1 << 63)


def canonical_logits(hidden: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """`[n, V]` fp32: 256 lanes filled in ascending order, then neighbours added eight times."""
    h, w = hidden.float().numpy(), weight.float().numpy()
    out = np.empty((h.shape[0], w.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        for i, state in enumerate(h):
            products = w * state
            lanes = np.zeros((w.shape[0], 256), np.float32)
            for start in range(0, h.shape[1], 256):
                part = products[:, start : start + 256]
                lanes[:, : part.shape[1]] += part
            while lanes.shape[1] > 1:
                lanes = lanes[:, 0::2] + lanes[:, 1::2]
            out[i] = lanes[:, 0]
    return out


def best_keys(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    num_valid: int | None = None,
    tokens: torch.Tensor | None = None,
    logit_dtype: str = "float32",
) -> torch.Tensor:
    """`[n, k]` int64 keys over all rows; `tokens [V]` are the rows' token ids (default: their numbers)."""
    rows = weight.shape[0] if num_valid is None else num_valid
    ids = np.arange(rows) if tokens is None else tokens[:rows].long().numpy()
    logits = torch.from_numpy(canonical_logits(hidden, weight[:rows]))
    if logit_dtype == "bfloat16":
        logits = logits.bfloat16().float()
    values = logits.numpy() + np.float32(0)
    bits = values.view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered << 32) | (~ids & 0xFFFFFFFF)
    keys = np.where(np.isnan(values) | (ids < 0), NO_KEY, keys)
    padded = np.concatenate([keys, np.full((keys.shape[0], k), NO_KEY)], axis=1)
    return torch.from_numpy(np.sort(padded, axis=1)[:, ::-1][:, :k].copy())
