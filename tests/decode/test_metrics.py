"""Metrics against hand-counted rounds and the public reports where other engines counted wrongly."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict

import numpy as np
import pytest

from dmtp_kernels.decode.metrics import AcceptanceRecorder, AcceptanceStats, bootstrap_interval


def _stats(*histograms: tuple[int, ...]) -> AcceptanceStats:
    return AcceptanceStats.from_histograms(histograms)


def test_row_159_accepted_and_emitted_are_two_counters() -> None:
    # verify [101, 102, EOS, 104, 105, bonus]: five candidates matched, three tokens were sent
    recorder = AcceptanceRecorder(5)
    recorder.round("a", accept_len=5, commit_len=3)
    stats = recorder.stats()
    assert stats.histogram == [0, 0, 0, 0, 0, 1]
    assert stats.accepted_drafts == 5 and stats.emitted == (3,)
    assert stats.per_verify_length == 6.0


def test_row_161_aborted_padded_and_draftless_rows_are_no_rounds() -> None:
    recorder = AcceptanceRecorder(7)
    recorder.round("aborted", accept_len=0, commit_len=0)
    recorder.round("padded", accept_len=0, commit_len=0, proposed=0)
    recorder.round("draftless", accept_len=0, commit_len=1, proposed=0)
    stats = recorder.stats()
    assert stats.histograms == ((0,) * 8,) * 3
    assert stats.rounds == (0, 0, 1) and stats.emitted == (0, 0, 1)
    assert stats.t1_acceptance is None and stats.per_verify_length is None and stats.per_request_length is None
    with pytest.raises(ValueError, match="accept_len: is -1"):
        recorder.round("a", accept_len=-1, commit_len=0)
    with pytest.raises(ValueError, match="accept_len: is 8"):
        recorder.round("a", accept_len=8, commit_len=1)


def test_row_162_emitted_counts_what_was_sent() -> None:
    recorder = AcceptanceRecorder(5)
    recorder.prefill("a")
    recorder.round("a", accept_len=3, commit_len=4)
    recorder.round("a", accept_len=5, commit_len=2)  # six matched, stop at index 1
    assert recorder.stats().emitted == (7,)


def test_row_163_histogram_identities() -> None:
    a, b = _stats((11, 14, 11, 4, 0, 3)), _stats((2, 0, 0, 0, 0, 5))
    assert len(a.histogram) == 6 and a.verify_count == 43 and a.accepted_drafts == 63
    assert a.per_verify_length == pytest.approx(106 / 43) == pytest.approx(2.46512, abs=1e-5)
    assert a.t1_acceptance == pytest.approx(1 - 11 / 43)
    assert a.emitted == (106,)
    merged = a.merge(b)
    assert merged.histogram == [13, 14, 11, 4, 0, 8]
    assert merged.histograms == ((11, 14, 11, 4, 0, 3), (2, 0, 0, 0, 0, 5))
    assert merged.emitted == a.emitted + b.emitted and merged.rounds == (43, 7)


def test_row_165_per_request_and_per_verify_differ() -> None:
    stats = _stats((0, 0, 0, 0, 0, 0, 0, 1), (3, 0, 0, 0, 0, 0, 0, 0))
    assert stats.per_request_length == 4.5
    assert stats.per_verify_length == 2.75


def test_row_166_prefill_token_counts_once_and_is_no_round() -> None:
    recorder = AcceptanceRecorder(7)
    recorder.prefill("a")
    recorder.round("a", accept_len=2, commit_len=3)
    recorder.round("a", accept_len=2, commit_len=3)
    stats = recorder.stats()
    assert stats.emitted == (7,) and stats.rounds == (2,) and stats.per_verify_length == 3.0


def test_positions_hand_counted() -> None:
    # ten rounds, K = 4: 4 accepted none, 3 one, 2 two, 0 three, 1 four
    stats = _stats((4, 3, 2, 0, 1))
    assert stats.t1_acceptance == pytest.approx(0.6)
    assert stats.cumulative == pytest.approx([0.6, 0.3, 0.1, 0.1])
    assert stats.conditional == pytest.approx([6 / 10, 3 / 6, 1 / 3, 1 / 1])
    # the mean length is one plus the sum of the cumulative rates
    assert stats.per_verify_length == pytest.approx(1 + sum(c for c in stats.cumulative if c is not None)) == 2.1


def test_undefined_figures_are_none_and_json_safe() -> None:
    # nothing got past the first candidate: later conditionals have no round to speak of
    stats = _stats((2, 1, 0, 0))
    assert stats.conditional == [pytest.approx(1 / 3), 0.0, None]
    assert stats.cumulative == [pytest.approx(1 / 3), 0.0, 0.0]
    empty = _stats()
    assert empty.histogram == [] and empty.cumulative == [] and empty.conditional == []
    assert empty.per_verify_length is None and empty.per_request_length is None and empty.t1_acceptance is None
    nothing = _stats((0, 0, 0))
    assert nothing.cumulative == [None, None] and nothing.conditional == [None, None]
    json.dumps([asdict(stats), stats.conditional], allow_nan=False)


def test_autoregressive_has_rounds_but_no_candidates() -> None:
    recorder = AcceptanceRecorder(0)
    for _ in range(3):
        recorder.round("a", accept_len=0, commit_len=1)
    stats = recorder.stats()
    assert stats.histogram == [0] and stats.rounds == (3,) and stats.emitted == (3,)
    assert stats.cumulative == [] and stats.per_verify_length is None


def test_requests_without_rounds_do_not_pull_the_request_mean_down() -> None:
    assert _stats((0, 2), (0, 0)).per_request_length == 2.0


def test_inconsistent_stats_are_refused() -> None:
    with pytest.raises(ValueError, match="one per request"):
        AcceptanceStats(((1, 0),), (2, 3), (1,))
    with pytest.raises(ValueError, match="buckets"):
        _stats((1, 0), (1, 0, 0))
    with pytest.raises(ValueError, match="negative"):
        AcceptanceStats(((1, -1),), (2,), (1,))
    with pytest.raises(ValueError, match="at most rounds"):
        AcceptanceStats(((2, 1),), (4,), (2,))
    with pytest.raises(ValueError, match="buckets"):
        _stats((1, 0)).merge(_stats((1, 0, 0)))
    with pytest.raises(ValueError, match="commit_len: is 4"):
        AcceptanceRecorder(7).round("a", accept_len=2, commit_len=4)
    with pytest.raises(ValueError, match="proposed: is 8"):
        AcceptanceRecorder(7).round("a", accept_len=2, commit_len=3, proposed=8)
    with pytest.raises(ValueError, match="num_candidates"):
        AcceptanceRecorder(-1)
    with pytest.raises(FrozenInstanceError):
        _stats((1, 0)).rounds = (5,)  # type: ignore[misc]


def test_bootstrap_is_seeded_and_covers_a_known_mean() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, size=100)
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values) != bootstrap_interval(values, seed=1)
    # the normal interval of the mean: +- 1.96 standard errors
    half = 1.96 * values.std(ddof=1) / 10
    assert low == pytest.approx(values.mean() - half, abs=0.1) and high == pytest.approx(values.mean() + half, abs=0.1)
    narrow = bootstrap_interval(values, confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_bootstrap_pools_ratios_over_prompts() -> None:
    # one long prompt with ratio 2 and many short ones with ratio 0: a mean of ratios would sit near 0
    rows = [(200.0, 100.0)] + [(0.0, 1.0)] * 9
    low, high = bootstrap_interval(rows)
    assert low == 0.0 and high > 1.9
    same = bootstrap_interval(rows, lambda r: r[:, 0].sum() / r[:, 1].sum())
    assert same == (low, high)


def test_bootstrap_resamples_requests_of_stats() -> None:
    stats = _stats(*[(i % 3, 2, 1) for i in range(12)])
    by_stats = bootstrap_interval(stats, lambda s: s.per_verify_length, resamples=300)
    # each request accepted 2 * 1 + 1 * 2 = 4 candidates
    low, high = bootstrap_interval([(4.0, i % 3 + 3) for i in range(12)], resamples=300)
    assert by_stats == pytest.approx((1 + low, 1 + high))


def test_bootstrap_leaves_out_undefined_resamples() -> None:
    low, high = bootstrap_interval([(0.0, 0.0), (3.0, 1.0)], resamples=100)
    assert (low, high) == (3.0, 3.0)
    assert np.isnan(bootstrap_interval([(0.0, 0.0)], resamples=10)).all()
    assert np.isnan(bootstrap_interval(_stats((0, 0)), lambda s: s.t1_acceptance, resamples=10)).all()


def test_bootstrap_refuses_bad_arguments() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="3 columns"):
        bootstrap_interval([(1.0, 2.0, 3.0)])
    with pytest.raises(ValueError, match="shape"):
        bootstrap_interval(np.zeros((1, 1, 1)))
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_interval([1.0], confidence=1.0)
    with pytest.raises(ValueError, match="resamples"):
        bootstrap_interval([1.0], resamples=0)
    with pytest.raises(ValueError, match="statistic"):
        bootstrap_interval(_stats((1, 0)))
