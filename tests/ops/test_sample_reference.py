"""The reference of sample_rows with its draws replaced: what kernels cannot be made to draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops.sample import Sampled, philox, reference, sample_rows

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    with use_backend("reference", "sample_rows"):
        yield


def _sample(logits: Any, temperature: float = 1.0) -> Sampled:
    x = torch.as_tensor(logits)
    n = len(x)
    key: dict[str, Any] = {"seed": torch.arange(n), "position": torch.zeros(n, dtype=torch.int64)}
    return sample_rows(x, temperature=torch.full((n,), temperature), **key)


def test_row_123_extreme_draws_stay_inside_the_support(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [[-INF, 1.0, -INF, 0.0, -INF]] * 3
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(
            philox, "words", lambda seed, position, stream, count, w=word: torch.full((len(seed), count), w)
        )
        assert set(_sample(logits).token.tolist()) <= {1, 3}
    # even a draw that rounds to exactly 1 or 0, as a kernel in fp32 might make it
    for draw in (0.0, INF):
        monkeypatch.setattr(philox, "exponential", lambda seed, *_, e=draw: torch.full((len(seed), 5), e))
        assert set(_sample(logits).token.tolist()) <= {1, 3}


@pytest.mark.parametrize("dropped_bits", [0, 8])
def test_row_126_resolution_of_the_winning_end(monkeypatch: pytest.MonkeyPatch, dropped_bits: int) -> None:
    """An entry 18 nats below the rest wins only by the smallest 2^12 of its 2^32 words: draw those alone, ten times
    each, and scale. Dropping eight bits, the reported 24-bit uniforms, must fail the same count."""
    ends, repeats = 2**12, 10
    tail = torch.arange(ends).repeat(repeats) >> dropped_bits << dropped_bits
    rest = philox.words(torch.arange(ends * repeats), torch.zeros(ends * repeats, dtype=torch.int64), 0, 1)[:, 0]
    monkeypatch.setattr(philox, "words", lambda *_: torch.stack((rest, tail), dim=1))
    wins = int(_sample(torch.tensor([[0.0, -18.0]]).expand(len(tail), 2)).token.sum())
    expected = len(tail) * 2.0**32 / ends / (1 + np.exp(18.0))
    assert (abs(wins - expected) < 4 * np.sqrt(expected)) == (dropped_bits == 0)


def test_greedy_rows_use_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.philox, "exponential", lambda seed, *_: torch.full((len(seed), 3), NAN))
    assert _sample([[0.0, 2.0, 1.0]], 0.0).token.tolist() == [1]
