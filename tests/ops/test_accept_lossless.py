"""Losslessness of the reference of the sampled acceptance rules: enumeration, known answers, biased controls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops.accept import SampledAcceptance, accept_block, accept_rejection, reference
from dmtp_kernels.ops.sample import philox, sample_rows

V, K = 3, 2


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    # its draws are replaced; test_accept_laws.py has what kernels can be asked
    with use_backend("reference", "accept_rejection", "accept_block"):
        yield


Vector = np.ndarray


def _model(seed: int, vocab: int = V, rows: int = K + 1, sharp: float = 1.5) -> list[Vector]:
    """Conditional distributions: entry j has shape [V] * (j + 1), its last axis sums to 1."""
    rng = np.random.default_rng(seed)
    tables = [np.exp(sharp * rng.standard_normal((vocab,) * (j + 1))) for j in range(rows)]
    return [t / t.sum(axis=-1, keepdims=True) for t in tables]


def _token_thresholds(p: list[Vector], q: list[Vector], x: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Probability of keeping each candidate given the ones before, and the factors on p in the residuals."""
    return [min(1.0, p[j][x[: j + 1]] / q[j][x[: j + 1]]) for j in range(len(x))], [1.0] * (len(x) + 1)


def _block_thresholds(p: list[Vector], q: list[Vector], x: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """h_i and P_i of the paper's algorithm 2."""
    chances, weights = [], [1.0]
    for i in range(1, len(x) + 1):
        weights.append(min(1.0, weights[-1] * p[i - 1][x[:i]] / q[i - 1][x[:i]]))
        if i == len(x):
            chances.append(weights[-1])
        else:
            surplus = sum(max(weights[-1] * p[i][(*x[:i], v)] - q[i][(*x[:i], v)], 0.0) for v in range(p[0].size))
            chances.append(surplus / (surplus + 1 - weights[-1]) if surplus + 1 - weights[-1] > 0 else 1.0)
    return chances, weights


def _kept(rule: str, below: tuple[bool, ...]) -> int:
    """Accepted candidates when draw i fell below threshold i or not."""
    if rule == "token":
        return next((i for i, ok in enumerate(below) if not ok), len(below))
    return max((i + 1 for i, ok in enumerate(below) if ok), default=0)


OPS = {"token": accept_rejection, "block": accept_block}
THRESHOLDS = {"token": _token_thresholds, "block": _block_thresholds}


def _call(rule: str, candidates: Any, p: Any, q: Any, **overrides: Any) -> SampledAcceptance:
    candidates, p, q = (torch.as_tensor(np.asarray(t)) for t in (candidates, p, q))
    batch, width = candidates.shape
    arguments: dict[str, Any] = {
        "temperature": torch.ones(batch),
        "seed": torch.arange(batch),
        "position": torch.zeros(batch, dtype=torch.int64),
        "stop_ids": torch.empty(0, dtype=torch.int64),
        "budget": torch.full((batch,), width + 1),
        "draft_probs": q,
    }
    return OPS[rule](candidates, p.log(), **(arguments | overrides))


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the acceptance draws by `forced["u"]` and records the residual weights in `forced["residual"]`."""
    state: dict[str, Any] = {}
    true_race = reference.race

    def uniform(seed: torch.Tensor, position: torch.Tensor, stream: int, count: int) -> torch.Tensor:
        assert stream == philox.ACCEPT and state["u"].shape == (len(seed), count)
        return state["u"]

    def race(weight: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
        state["residual"] = weight.exp()
        return true_race(weight, exponentials)

    monkeypatch.setattr(reference.philox, "uniform", uniform)
    monkeypatch.setattr(
        reference.philox, "exponential", lambda seed, position, stream, count: torch.ones(len(seed), count)
    )
    monkeypatch.setattr(reference, "race", race)
    return state


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", ["token", "block"])
def test_output_law_by_enumeration(rule: str, seed: int, forced: dict[str, Any]) -> None:
    """Every candidate pair, every cell that the thresholds cut the unit square into, every residual: the law of three
    tokens (the missing ones drawn from the target) is the target's to rounding."""
    p, q = _model(seed), _model(100 + seed)[:K]
    pairs = list(itertools.product(range(V), repeat=K))
    cells = list(itertools.product([True, False], repeat=K))
    candidates, logits_p, probs_q, draws, volumes, weights = [], [], [], [], [], []
    for x in pairs:
        chances, _ = THRESHOLDS[rule](p, q, x)
        for below in cells:
            edges = list(zip(chances, below, strict=True))
            candidates.append((0, *x))
            logits_p.append([p[0], p[1][x[0]], p[2][x]])
            probs_q.append([q[0], q[1][x[0]]])
            draws.append([h / 2 if ok else (1 + h) / 2 for h, ok in edges])
            volumes.append(np.prod([h if ok else 1 - h for h, ok in edges]))
            weights.append(q[0][x[0]] * q[1][x])
    forced["u"] = torch.tensor(np.array(draws))
    result = _call(rule, candidates, logits_p, probs_q)

    law = np.zeros((V,) * (K + 1))
    accepted = result.accept_len.tolist()
    for i, (x, below) in enumerate(itertools.product(pairs, cells)):
        m = accepted[i]
        if volumes[i] > 1e-12:  # thinner cells are rounding of the threshold itself
            assert m == _kept(rule, below)
        residual = (forced["residual"][i] / forced["residual"][i].sum()).numpy()
        for y in range(V):
            # the tokens after the round's last come from the target
            rest = np.ones(()) if m == K else p[2][(*x[:1], y)] if m == 1 else p[1][y][:, None] * p[2][y]
            law[(*x[:m], y)] += weights[i] * volumes[i] * residual[y] * rest
    target = p[0][:, None, None] * p[1][:, :, None] * p[2]
    np.testing.assert_allclose(law, target, atol=1e-12)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_thresholds_are_where_the_papers_put_them(rule: str, forced: dict[str, Any]) -> None:
    """A hair below threshold i keeps candidate i, a hair above does not; found with the other draws refusing."""
    p, q = _model(5), _model(105)[:K]
    for x in itertools.product(range(V), repeat=K):
        chances, _ = THRESHOLDS[rule](p, q, x)
        for i, h in enumerate(chances):
            for offset in (-1e-9, 1e-9):
                if not 0 < h + offset < 1:
                    continue
                u = [1e-12 if rule == "token" else 1 - 1e-12] * K
                u[i] = h + offset
                forced["u"] = torch.tensor([u], dtype=torch.float64)
                result = _call(rule, [(0, *x)], [[p[0], p[1][x[0]], p[2][x]]], [[q[0], q[1][x[0]]]])
                want = _kept(rule, tuple(u[j] < chances[j] for j in range(K)))
                assert result.accept_len.item() == want


def _expected_length(rule: str, p: list[Vector], q: list[Vector]) -> float:
    total = 0.0
    for x in itertools.product(range(p[0].size), repeat=len(q)):
        chances, _ = THRESHOLDS[rule](p, q, x)
        weight = np.prod([q[j][x[: j + 1]] for j in range(len(q))])
        for below in itertools.product([True, False], repeat=len(q)):
            volume = np.prod([h if ok else 1 - h for h, ok in zip(chances, below, strict=True)])
            total += weight * volume * _kept(rule, below)
    return total


def test_block_keeps_more_and_matches_the_papers_example() -> None:
    """Section 2 of the paper: p = (1/3, 2/3), q = (2/3, 1/3), two candidates: 10/9 by token, 11/9 by block."""
    row_p, row_q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    p = [row_p, np.tile(row_p, (2, 1)), np.tile(row_p, (2, 2, 1))]
    q = [row_q, np.tile(row_q, (2, 1))]
    assert _expected_length("token", p, q) == pytest.approx(10 / 9)
    assert _expected_length("block", p, q) == pytest.approx(11 / 9)

    trials = 20_000
    means = {}
    for rule in OPS:
        drafts = _draw_drafts(q, trials)
        rows = torch.tensor(np.stack([row_p] * 3)).expand(trials, 3, 2)
        result = _call(rule, drafts, rows, torch.tensor(np.stack([row_q] * 2)).expand(trials, 2, 2))
        means[rule] = result.accept_len.double().mean().item()
    assert means["token"] == pytest.approx(10 / 9, abs=0.022)
    assert means["block"] == pytest.approx(11 / 9, abs=0.022)


@pytest.mark.parametrize("seed", range(6))
def test_block_never_keeps_less_on_average(seed: int) -> None:
    p, q = _model(seed), _model(50 + seed)[:K]
    assert _expected_length("block", p, q) >= _expected_length("token", p, q) - 1e-12


def _draw_drafts(q: list[Vector], trials: int) -> torch.Tensor:
    """`[trials, K + 1]` verify rows of context-free drafts q, drawn with the draft stream's keys."""
    seed, zero = torch.arange(trials), torch.zeros(trials, dtype=torch.int64)
    columns = [zero]
    for j, table in enumerate(q):
        logits = torch.tensor(table[(0,) * j]).log().expand(trials, -1)
        key: dict[str, Any] = {"seed": seed, "position": philox.round_position(zero, j), "stream": philox.DRAFT}
        columns.append(sample_rows(logits, temperature=torch.ones(trials), **key).token)
    return torch.stack(columns, dim=1)


ROW_125 = {"p": (0.1, 0.3, 0.6), "q": (0.7, 0.2, 0.1)}
TRIALS = 131_072  # the report's


def _first_token_law(rule: str, p: tuple[float, ...], q: tuple[float, ...]) -> np.ndarray:
    drafts = _draw_drafts([np.array(q)], TRIALS)
    rows = torch.tensor([p, p], dtype=torch.float64).expand(TRIALS, 2, 3)
    result = _call(rule, drafts, rows, torch.tensor([[q]], dtype=torch.float64).expand(TRIALS, 1, 3))
    return np.bincount(result.out_tokens[:, 0].numpy(), minlength=3) / TRIALS


@pytest.mark.parametrize("rule", ["token", "block"])
def test_row_125_streams_are_separate(rule: str) -> None:
    np.testing.assert_allclose(_first_token_law(rule, **ROW_125), ROW_125["p"], atol=0.0055)


def test_row_125_control_shared_uniform_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """One uniform both for accepting and for the residual's inverse distribution function."""
    true_uniform = philox.uniform
    spent: dict[str, torch.Tensor] = {}

    def uniform(seed: torch.Tensor, position: torch.Tensor, stream: int, count: int) -> torch.Tensor:
        drawn = true_uniform(seed, position, stream, count)
        return spent.setdefault("u", drawn) if stream == philox.ACCEPT else drawn

    def inverse(weight: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
        steps = weight.exp().cumsum(dim=1)
        return (spent["u"][:, :1] * steps[:, -1:] >= steps).sum(dim=1)

    drafts = _draw_drafts([np.array(ROW_125["q"])], TRIALS)
    monkeypatch.setattr(reference.philox, "uniform", uniform)
    monkeypatch.setattr(reference, "race", inverse)
    rows = torch.tensor([ROW_125["p"]] * 2, dtype=torch.float64).expand(TRIALS, 2, 3)
    q = torch.tensor([[ROW_125["q"]]], dtype=torch.float64).expand(TRIALS, 1, 3)
    law = np.bincount(_call("token", drafts, rows, q).out_tokens[:, 0].numpy(), minlength=3) / TRIALS
    np.testing.assert_allclose(law, (0.100, 0.216, 0.684), atol=0.0055)


@pytest.mark.parametrize("rule", [accept_rejection, accept_block])
def test_greedy_requests_use_no_draw(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uniform", "exponential"):
        monkeypatch.setattr(
            reference.philox, name, lambda seed, position, stream, count: torch.full((len(seed), count), float("nan"))
        )
    logits = torch.tensor([[[0.0, 2.0, 2.0], [5.0, 1.0, 5.0], [1.0, 1.0, 0.0]]])
    zero, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    got = rule(
        torch.tensor([[0, 1, 0]]), logits, temperature=torch.zeros(1), seed=zero, position=zero, stop_ids=none,
        budget=zero + 9, draft_probs=torch.full((1, 2, 3), 1 / 3),
    )  # fmt: skip
    assert got.out_tokens.tolist() == [[1, 0, 0]]
