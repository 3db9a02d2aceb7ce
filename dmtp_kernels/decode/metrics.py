"""Acceptance metrics: what counts as a round, the lengths and rates of the method's description, bootstrap intervals.

Pinned choices:
- A bucket is the raw number of candidates the target accepted, before stop tokens and the token budget cut the round.
  So a last round with a stop token inside its accepted prefix counts all it accepted; `emitted` counts what was sent.
- A round is in the histogram when at least one candidate was proposed and at least one token was emitted. Aborted and
  padded rows (nothing emitted) count nowhere; rounds without candidates count in `rounds` and `emitted` only.
- The token that prefill produces is emitted once and belongs to no round.
- A figure whose denominator is 0 is None.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class AcceptanceStats:
    """Acceptance of some requests with K candidates per round; the three fields have one entry per request."""

    histograms: tuple[tuple[int, ...], ...]
    """`histograms[i][k]`: rounds of request i that accepted k candidates, k = 0..K."""
    emitted: tuple[int, ...]
    """Tokens sent to the user, the one of prefill included."""
    rounds: tuple[int, ...]
    """Verification passes that emitted something, the ones without candidates included."""

    def __post_init__(self) -> None:
        if not len(self.histograms) == len(self.emitted) == len(self.rounds):
            sizes = f"{len(self.histograms)}, {len(self.emitted)}, {len(self.rounds)}"
            raise ValueError(f"histograms, emitted, rounds: have {sizes} entries, must have one per request each")
        if len({len(h) for h in self.histograms}) > 1:
            raise ValueError("histograms: have different numbers of buckets, must all have K + 1")
        for i, (histogram, emitted, rounds) in enumerate(zip(self.histograms, self.emitted, self.rounds, strict=True)):
            if min((*histogram, emitted, rounds)) < 0:
                raise ValueError(f"request {i}: has a negative count, must have none")
            if sum(histogram) > rounds:
                raise ValueError(
                    f"histograms[{i}]: counts {sum(histogram)} rounds, must be at most rounds[{i}] = {rounds}"
                )

    @classmethod
    def from_histograms(cls, histograms: Iterable[Sequence[int]]) -> AcceptanceStats:
        """Stats of requests of which only the histograms are known: every round emitted k + 1 tokens."""
        buckets = tuple(tuple(int(count) for count in h) for h in histograms)
        rounds = tuple(sum(h) for h in buckets)
        return cls(buckets, tuple(_accepted(h) + r for h, r in zip(buckets, rounds, strict=True)), rounds)

    @property
    def histogram(self) -> list[int]:
        """Sum over requests: K + 1 buckets (empty without requests)."""
        return [sum(column) for column in zip(*self.histograms, strict=True)]

    @property
    def verify_count(self) -> int:
        """Rounds in the histogram."""
        return sum(self.histogram)

    @property
    def accepted_drafts(self) -> int:
        """Candidates accepted in all rounds: sum of k * histogram[k]."""
        return _accepted(self.histogram)

    @property
    def t1_acceptance(self) -> float | None:
        """Share of rounds that accepted the first candidate: 1 - h[0] / sum(h)."""
        return 1 - self.histogram[0] / self.verify_count if self.verify_count else None

    @property
    def per_verify_length(self) -> float | None:
        """1 + sum(k * h[k]) / sum(h), the correction or bonus token included."""
        return 1 + self.accepted_drafts / self.verify_count if self.verify_count else None

    @property
    def per_request_length(self) -> float | None:
        """Mean over requests of each one's own per-verify length; requests with an empty histogram are left out."""
        lengths = [1 + _accepted(h) / sum(h) for h in self.histograms if sum(h)]
        return sum(lengths) / len(lengths) if lengths else None

    @property
    def cumulative(self) -> list[float | None]:
        """P(L >= k) for k = 1..K: share of rounds that accepted the first k candidates."""
        total = self.verify_count
        return [c / total if total else None for c in self._at_least()[1:]]

    @property
    def conditional(self) -> list[float | None]:
        """P(L >= k | L >= k - 1) for k = 1..K; None where no round accepted the first k - 1."""
        at_least = self._at_least()
        return [b / a if a else None for a, b in itertools.pairwise(at_least)]

    def merge(self, other: AcceptanceStats) -> AcceptanceStats:
        """The requests of both, in order.

        Raises:
            ValueError: the two have different numbers of candidates per round.
        """
        return AcceptanceStats(
            self.histograms + other.histograms, self.emitted + other.emitted, self.rounds + other.rounds
        )

    def select(self, requests: Iterable[int]) -> AcceptanceStats:
        """The requests at these indices, repeats included."""
        chosen = [int(i) for i in requests]
        return AcceptanceStats(
            tuple(self.histograms[i] for i in chosen),
            tuple(self.emitted[i] for i in chosen),
            tuple(self.rounds[i] for i in chosen),
        )

    def _at_least(self) -> list[int]:
        histogram = self.histogram
        return [sum(histogram[k:]) for k in range(len(histogram))]


class AcceptanceRecorder:
    """Counts the rounds of requests as they happen."""

    def __init__(self, num_candidates: int) -> None:
        """`num_candidates`: K, the most candidates a round may propose; 0 for plain autoregressive decoding."""
        if num_candidates < 0:
            raise ValueError(f"num_candidates: is {num_candidates}, must be at least 0")
        self._num_candidates = num_candidates
        self._histograms: dict[object, list[int]] = {}
        self._emitted: dict[object, int] = {}
        self._rounds: dict[object, int] = {}

    def prefill(self, request: object, emitted: int = 1) -> None:
        """A request starts; `emitted` tokens came from its prefill."""
        self._start(request)
        self._emitted[request] += emitted

    def round(self, request: object, accept_len: int, commit_len: int, proposed: int | None = None) -> None:
        """One verification of one request.

        Args:
            request: any hashable name; requests are reported in the order they were first seen.
            accept_len: raw matching candidates m.
            commit_len: emitted tokens c; 0 for an aborted, finished or padded row, which is not counted.
            proposed: candidates really proposed (default K).

        Raises:
            ValueError: the counts contradict each other.
        """
        proposed = self._num_candidates if proposed is None else proposed
        if not 0 <= proposed <= self._num_candidates:
            raise ValueError(f"proposed: is {proposed}, must be between 0 and {self._num_candidates}")
        if not 0 <= accept_len <= proposed:
            raise ValueError(f"accept_len: is {accept_len}, must be between 0 and the {proposed} proposed")
        if not 0 <= commit_len <= accept_len + 1:
            raise ValueError(f"commit_len: is {commit_len}, must be between 0 and accept_len + 1 = {accept_len + 1}")
        self._start(request)
        if commit_len == 0:
            return
        self._emitted[request] += commit_len
        self._rounds[request] += 1
        if proposed > 0:
            self._histograms[request][accept_len] += 1

    def stats(self) -> AcceptanceStats:
        """What was counted so far."""
        return AcceptanceStats(
            tuple(tuple(h) for h in self._histograms.values()),
            tuple(self._emitted.values()),
            tuple(self._rounds.values()),
        )

    def _start(self, request: object) -> None:
        self._histograms.setdefault(request, [0] * (self._num_candidates + 1))
        self._emitted.setdefault(request, 0)
        self._rounds.setdefault(request, 0)


def bootstrap_interval(
    values: AcceptanceStats | npt.ArrayLike,
    statistic: Callable[[Any], float | None] | None = None,
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic pooled over prompts: prompts are drawn with replacement.

    Args:
        values: `[prompts]` or `[prompts, columns]`, one row per prompt; or the stats of one request per prompt.
        statistic: what to compute of a resample, an array of such rows or an `AcceptanceStats` (for instance
            `lambda s: s.t1_acceptance`). Default for arrays: the mean of one column, of two the ratio of their sums
            (for instance accepted candidates and rounds of each prompt).
        resamples: number of resamples; those whose statistic is None or not finite are left out.
        confidence: share of the resamples inside the interval.
        seed: of NumPy's generator.

    Returns:
        (low, high), (nan, nan) when no resample is left.

    Raises:
        ValueError: there is no prompt, no statistic where one is needed, or a number is out of range.

    Source: Efron, "Bootstrap methods: another look at the jackknife", 1979.
    """
    if resamples < 1:
        raise ValueError(f"resamples: is {resamples}, must be at least 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: is {confidence}, must be between 0 and 1")
    measure: Callable[[Any], float | None]
    take: Callable[[np.ndarray], Any]
    if isinstance(values, AcceptanceStats):
        if statistic is None:
            raise ValueError("statistic: is None, must be given for an AcceptanceStats")
        prompts, take, measure = len(values.rounds), values.select, statistic
    else:
        data = np.asarray(values, dtype=np.float64)
        if data.ndim not in (1, 2):
            raise ValueError(f"values: has shape {data.shape}, must be [prompts] or [prompts, columns]")
        if statistic is None and data.ndim == 2 and data.shape[1] != 2:
            raise ValueError(f"values: has {data.shape[1]} columns, must have 2 without a statistic")
        prompts, take = len(data), data.__getitem__
        default: Callable[[Any], float | None] = _ratio_of_sums if data.ndim == 2 else _mean
        measure = statistic or default
    if prompts == 0:
        raise ValueError("values: has no prompt, must have at least 1")
    draws = np.random.default_rng(seed).integers(0, prompts, size=(resamples, prompts))
    results = np.array([measure(take(draw)) for draw in draws], dtype=np.float64)
    results = results[np.isfinite(results)]
    if len(results) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(results, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _mean(rows: np.ndarray) -> float:
    return float(rows.mean())


def _ratio_of_sums(rows: np.ndarray) -> float | None:
    numerator, denominator = rows.sum(axis=0)
    return numerator / denominator if denominator else None


def _accepted(histogram: Iterable[int]) -> int:
    return sum(k * count for k, count in enumerate(histogram))
