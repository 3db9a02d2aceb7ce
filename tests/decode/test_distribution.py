"""At temperature 1 the loop's first three tokens follow the target's own distribution, computed exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.caches import pages_for
from dmtp_kernels.decode.dense import target_logits
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.prefill import prefill
from dmtp_kernels.decode.stack import MAX_ROWS, build_stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.testing.models import tiny_checkpoint

VALID = 4
CHECKPOINT = tiny_checkpoint(5, vocab_size=6, num_valid=VALID)
PROMPT = [1, 3, 0, 2, 2, 1, 0]
RUNS, BATCH, TOKENS = 20_000, 2_000, 3


def exact_distribution() -> torch.Tensor:
    """Probability of each of the VALID^3 continuations of the prompt, by enumeration."""
    total = torch.zeros(VALID**TOKENS, dtype=torch.float64)
    for index in range(VALID**TOKENS):
        tokens = [index // VALID**2, index // VALID % VALID, index % VALID]
        probability = torch.tensor(1.0, dtype=torch.float64)
        logits = target_logits(CHECKPOINT, torch.tensor(PROMPT + tokens)).double().softmax(-1)
        for offset, token in enumerate(tokens):
            probability *= logits[len(PROMPT) - 1 + offset, token]
        total[index] = probability
    return total


@torch.no_grad()
def sampled_counts(method: str, runs: int, verification: str = "target", mtp_steps: int = 1) -> torch.Tensor:
    """How often each continuation came out of `runs` runs with seeds 0, 1, ..."""
    page_size = 8
    pages = pages_for(len(PROMPT) + TOKENS + 2 * MAX_ROWS, page_size)
    stack = build_stack(
        CHECKPOINT,
        METHODS[method],
        num_pages=BATCH * pages,
        page_size=page_size,
        max_batch=BATCH,
        verification=verification,
        mtp_steps=mtp_steps,
    )
    counts = torch.zeros(VALID**TOKENS, dtype=torch.int64)
    for start in range(0, runs, BATCH):
        state = BatchState.create(stack, BATCH, pages)
        table = 1 + torch.arange(BATCH * pages, dtype=torch.int32).reshape(BATCH, pages)
        for name in ("target_table", "drafter_table", "mtp_table"):
            getattr(state, name).copy_(table)
        tails = (1 + BATCH * pages) * page_size + torch.arange(BATCH * 2 * page_size).reshape(BATCH, -1)
        state.tail_slots.copy_(tails[:, : 1 + MAX_ROWS])
        state.temperature.fill_(1.0)
        state.seed.copy_(torch.arange(start, start + BATCH))
        state.budget.fill_(TOKENS)
        state.mtp_steps.copy_(torch.arange(BATCH) % mtp_steps + 1)
        state.recent.copy_(state.mtp_steps - 0.5)
        first = prefill(stack, state, torch.tensor(PROMPT).expand(BATCH, -1), chunk=4)
        assert first is not None
        tokens = torch.full((BATCH, TOKENS), -1)
        tokens[:, 0] = first.bonus
        filled = first.commit_len.long()
        while int(state.budget.max()) > 0:
            accepted = rounds.decode_round(stack, state).accepted
            for column in range(accepted.out_tokens.shape[1]):
                emitted = accepted.out_tokens[:, column] >= 0
                rows = emitted.nonzero()[:, 0]
                tokens[rows, filled[rows]] = accepted.out_tokens[rows, column]
                filled += emitted
        assert bool((tokens >= 0).all())
        index = (tokens * torch.tensor([VALID**2, VALID, 1])).sum(dim=1)
        counts += torch.bincount(index, minlength=VALID**TOKENS)
    return counts


def p_value(counts: torch.Tensor) -> float:
    """Chi-square against the exact distribution, cells expected under 5 times pooled."""
    expected = exact_distribution() * float(counts.sum())
    small = expected < 5
    observed = torch.cat([counts[~small].double(), counts[small].sum()[None].double()])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    expected = expected[keep] * observed[keep].sum() / expected[keep].sum()
    return float(chisquare(observed[keep].numpy(), expected.numpy()).pvalue)


def test_exact_distribution_sums_to_one() -> None:
    assert abs(float(exact_distribution().sum()) - 1) < 1e-5


def test_dmtp_matches_the_target() -> None:
    counts = sampled_counts("dmtp", RUNS)
    assert int(counts.sum()) == RUNS
    assert p_value(counts) > 0.001


def test_a_wrong_acceptance_rule_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking every tenth first candidate unseen shifts the distribution; the test above must notice."""
    original = rounds.accept_prefix

    def lenient(candidates: Any, target: Any, **kwargs: Any) -> Any:
        target = target.clone()
        favoured = torch.arange(target.shape[0]) % 10 == 0
        target[favoured, 0] = candidates[favoured, 1]
        return original(candidates, target, **kwargs)

    monkeypatch.setattr(rounds, "accept_prefix", lenient)
    assert p_value(sampled_counts("dmtp", RUNS // 2)) < 0.001


@pytest.mark.parametrize(("verification", "mtp_steps"), [("rejection", 1), ("block", 1), ("block", 3)])
def test_sampled_drafts_match_the_target(verification: str, mtp_steps: int) -> None:
    assert p_value(sampled_counts("dmtp", RUNS // 2, verification, mtp_steps)) > 0.001


def test_a_wrong_draft_distribution_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates judged as if they had been drawn uniformly: the test above must notice."""
    original = rounds.accept_rejection

    def uniform(*args: Any, draft_probs: Any, **kwargs: Any) -> Any:
        return original(*args, draft_probs=torch.ones_like(draft_probs), **kwargs)

    monkeypatch.setattr(rounds, "accept_rejection", uniform)
    assert p_value(sampled_counts("dmtp", RUNS // 4, "rejection")) < 0.001


def test_chain_tokens_judged_by_the_drafters_distribution_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = rounds.merge_chain

    def unmerged(stack: Any, state: Any, tokens: Any) -> Any:
        state.work.chain_probabilities = []
        return merge(stack, state, tokens)

    monkeypatch.setattr(rounds, "merge_chain", unmerged)
    assert p_value(sampled_counts("dmtp", RUNS // 4, "block", 3)) < 0.001
