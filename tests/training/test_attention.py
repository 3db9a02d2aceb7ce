"""Dense training attention against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dmtp_kernels.training.attention import attend_with_bias, block_attend, block_bias, causal_bias


def _loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """One batch row: `q[T, Hq, D]`, `k, v[J, Hkv, D]`, `visible[T, J]`."""
    out = np.zeros_like(q)
    shared = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys = [j for j in range(k.shape[0]) if visible[t, j]]
            scores = np.array([q[t, head] @ k[j, head // shared] for j in keys]) / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[t, head] = sum(w * v[j, head // shared] for w, j in zip(weights / weights.sum(), keys, strict=True))
    return out


def test_causal_rows_match_plain_loops() -> None:
    # 6 query heads on 2 key heads: a wrong head grouping shows
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 6, 4).double(), torch.randn(2, 5, 2, 4).double(), torch.randn(2, 5, 2, 4).double()
    out = attend_with_bias(q, k, v, causal_bias(5, torch.float64))
    for b in range(2):
        want = _loops(q[b].numpy(), k[b].numpy(), v[b].numpy(), np.tril(np.ones((5, 5), bool)))
        np.testing.assert_allclose(out[b].numpy(), want, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3, 100], ids=["all", "short window", "window past the start"])
def test_blocks_match_plain_loops(window: int | None) -> None:
    torch.manual_seed(0)
    batch, count, slots, context = 2, 3, 4, 12
    anchors = torch.tensor([[1, 5, 11], [2, 3, 4]])
    q = torch.randn(batch, count, slots, 4, 4).double()
    k, v = torch.randn(2, batch, count, slots, 2, 4).double()
    past = [tuple(torch.randn(2, batch, context, 2, 4).double()) for _ in range(2)]
    bias = block_bias(anchors, slots, context, window, torch.float64)
    out = block_attend(past, bias)(1, q, k, v)
    for b in range(batch):
        for n in range(count):
            a = int(anchors[b, n])
            first = 0 if window is None else max(0, a - window)
            keys = torch.cat([past[1][0][b, first:a], k[b, n]]).numpy()
            values = torch.cat([past[1][1][b, first:a], v[b, n]]).numpy()
            want = _loops(q[b, n].numpy(), keys, values, np.ones((slots, len(keys)), bool))
            np.testing.assert_allclose(out[b, n].numpy(), want, atol=1e-12)
