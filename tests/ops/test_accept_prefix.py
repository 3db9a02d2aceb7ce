"""accept_prefix against a plain-Python oracle and the public reports about verification, stop tokens and budgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.accept import LENGTH, RUNNING, STOPPED, Acceptance, accept_prefix

KERNEL_OPS = ("accept_prefix",)
EVERY_CAPABILITY = True

EOS = 99


def _oracle(
    candidates: list[int], target: list[int], stops: list[int], budget: int, proposed: int | None = None
) -> tuple[int, list[int], int]:
    """Accepted count, emitted tokens and reason of one request, token by token."""
    proposed = len(candidates) - 1 if proposed is None else proposed
    if budget <= 0 or proposed < 0:
        return 0, [], RUNNING
    m = 0
    while m < min(proposed, len(candidates) - 1) and candidates[m + 1] == target[m] and target[m] >= 0:
        m += 1
    emitted: list[int] = []
    for token in target[: m + 1]:
        if token < 0:
            break
        emitted.append(token)
        if token in [s for s in stops if s >= 0]:
            return m, emitted, STOPPED
        if len(emitted) == budget:
            return m, emitted, LENGTH
    return m, emitted, RUNNING


def _accept(candidates: Any, target: Any, stops: Any = (), budget: Any = 100, proposed: Any = None) -> Acceptance:
    candidates, target = torch.as_tensor(candidates), torch.as_tensor(target)
    batch = len(candidates)
    counts = None if proposed is None else torch.as_tensor(proposed)
    limit = torch.as_tensor(budget).expand(batch).contiguous()
    stop_ids = torch.as_tensor(stops, dtype=torch.int64)
    return accept_prefix(candidates, target, stop_ids=stop_ids, budget=limit, num_candidates=counts)


def _one(
    drafts: list[int], target: list[int], stops: Any = (), budget: int = 100, proposed: Any = None
) -> tuple[int, list[int], int]:
    got = _accept([[7, *drafts]], [target], stops, budget, None if proposed is None else [proposed])
    count = int(got.commit_len)
    tokens = got.out_tokens[0].tolist()
    assert tokens[count:] == [-1] * (len(tokens) - count)
    assert got.bonus.item() == (tokens[count - 1] if count else -1)
    return int(got.accept_len), tokens[:count], int(got.finished)


def test_row_113_each_draft_is_judged_by_the_row_before_it() -> None:
    t = [10, 11, 12, 13, 14, 15, 16, 17]
    assert _one([1, *t[1:7]], t) == (0, [10], RUNNING)
    assert _one(t[:7], t) == (7, t, RUNNING)
    assert _one([10, 1, *t[2:7]], t) == (1, [10, 11], RUNNING)


@pytest.mark.parametrize(
    ("drafts", "bonus", "stops", "accepted", "emitted"),
    [
        ([5, EOS, 7, 8, 9, 1, 2], 3, [EOS], 7, [5, EOS]),
        ([EOS, 5, 7, 8, 9, 1, 2], 3, [EOS], 7, [EOS]),
        ([5, 6, 7, 8, 9, 1, EOS], 3, [EOS], 7, [5, 6, 7, 8, 9, 1, EOS]),
        ([5, 6, 7, 8, 9, 1, 2], EOS, [EOS], 7, [5, 6, 7, 8, 9, 1, 2, EOS]),
        ([5, 6, 98, 8, EOS, 1, 2], 3, [EOS, 98], 7, [5, 6, 98]),
    ],
)
def test_row_114_stop_tokens_inside_the_block(
    drafts: list[int], bonus: int, stops: list[int], accepted: int, emitted: list[int]
) -> None:
    # the raw count ignores the stop: it is the histogram's bucket
    assert _one(drafts, [*drafts, bonus], stops) == (accepted, emitted, STOPPED)
    # ignore_eos is an empty list; negative ids are list padding
    for nothing in ([], [-1], [[-1, -1]]):
        assert _one(drafts, [*drafts, bonus], nothing) == (accepted, [*drafts, bonus], RUNNING)


@pytest.mark.parametrize(
    ("budget", "emitted", "reason"),
    [
        (5, [10, 11, EOS], STOPPED),
        (2, [10, 11], LENGTH),
        (3, [10, 11, EOS], STOPPED),
        (0, [], RUNNING),
        (-4, [], RUNNING),
    ],
)
def test_row_115_a_stop_wins_over_the_budget(budget: int, emitted: list[int], reason: int) -> None:
    drafts = [10, 11, EOS, 20, 21]
    accepted = 5 if budget > 0 else 0
    assert _one(drafts, [*drafts, 22], [EOS], budget) == (accepted, emitted, reason)


@pytest.mark.parametrize(("budget", "eos", "commit"), [(5, 2, 3), (2, 4, 2), (9, None, 7), (0, None, 0)])
def test_row_097_commit_is_the_least_of_valid_budget_and_stop(budget: int, eos: int | None, commit: int) -> None:
    target = [10, 11, 12, 13, 14, 15, 16, 17]
    drafts = [10, 11, 12, 13, 14, 15, 0]  # six match
    if eos is not None:
        target[eos] = drafts[eos] = EOS
    assert len(_one(drafts, target, [EOS], budget)[1]) == commit


def test_row_137_a_dummy_id_is_not_a_draft() -> None:
    # zeros that were never proposed, while the target's own token is 0
    assert _one([0] * 7, [0] * 8, proposed=0) == (0, [0], RUNNING)
    assert _one([-1] * 7, [-1] * 8) == (0, [], RUNNING)
    assert _one([0, 0, -1, 0, 0, 0, 0], [0] * 8) == (2, [0, 0, 0], RUNNING)


def test_row_131_ragged_counts() -> None:
    target = torch.arange(8).expand(4, 8).contiguous()
    candidates = torch.cat((torch.full((4, 1), 50), target[:, :-1]), dim=1)
    got = _accept(candidates, target, proposed=[3, 0, 7, 1])
    assert got.accept_len.tolist() == [3, 0, 7, 1] and got.commit_len.tolist() == [4, 1, 8, 2]
    beyond = _accept(candidates, target, proposed=[8, 2**40, -1, -(2**40)])
    assert beyond.accept_len.tolist() == [7, 7, 0, 0] and beyond.commit_len.tolist() == [8, 8, 0, 0]


def test_row_159_matched_and_emitted_are_two_numbers() -> None:
    drafts = [101, 102, EOS, 104, 105]
    assert _one(drafts, [*drafts, 7], [EOS]) == (5, [101, 102, EOS], STOPPED)


def test_an_undecided_target_row_ends_the_prefix_and_is_not_emitted() -> None:
    t = [10, 11, -1, 13]
    assert _one([10, 11, -1], t) == (2, [10, 11], RUNNING)
    assert _one([10, 11, 12], t) == (2, [10, 11], RUNNING)
    assert _one([9, 11, 12], [-1, 11, 12, 13]) == (0, [], RUNNING)


def test_row_155_padded_rows_full_of_garbage_are_inert() -> None:
    candidates = torch.tensor([[1, 5, 6], [2**62, 2**62, 2**62]])
    target = torch.tensor([[5, 6, 7], [2**62, 2**62, 2**62]])
    for budget, proposed in (([9, 0], None), ([9, -(2**62)], None), ([9, 2**62], [2, -1])):
        got = _accept(candidates, target, [[EOS], [2**62]], budget, proposed)
        assert got.accept_len.tolist() == [2, 0] and got.commit_len.tolist() == [3, 0]
        assert got.out_tokens.tolist() == [[5, 6, 7], [-1, -1, -1]] and got.finished.tolist() == [0, 0]
        assert got.bonus.tolist() == [7, -1]


@pytest.mark.parametrize("seed", range(20))
def test_random_rounds_equal_the_oracle(seed: int) -> None:
    """Few ids, so that matches, stops, sentinels and budgets meet; strided views of wider tables; both index dtypes."""
    rng = np.random.default_rng(seed)
    batch, width = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    dtype = torch.int32 if seed % 2 else torch.int64
    table = torch.tensor(rng.integers(-1, 2, (batch, 2 * width + 3)), dtype=dtype)
    candidates, target = table[:, :width], table[:, width + 1 : 2 * width + 1]
    stops = torch.tensor(rng.integers(-1, 6, (batch, 3)), dtype=dtype)[:, : seed % 4]
    budget = torch.tensor(rng.integers(-1, width + 2, batch), dtype=dtype)
    proposed = torch.tensor(rng.integers(-1, width + 1, batch), dtype=dtype)
    got = accept_prefix(candidates, target, stop_ids=stops, budget=budget, num_candidates=proposed)
    alone = accept_prefix(
        candidates[-1:], target[-1:], stop_ids=stops[-1:], budget=budget[-1:], num_candidates=proposed[-1:]
    )
    for b in range(batch):
        want = _oracle(candidates[b].tolist(), target[b].tolist(), stops[b].tolist(), int(budget[b]), int(proposed[b]))
        count = got.commit_len[b].item()
        assert (got.accept_len[b].item(), got.out_tokens[b, :count].tolist(), got.finished[b].item()) == want
        assert (got.out_tokens[b, count:] == -1).all()
    for one, many in zip(alone, got, strict=True):
        assert torch.equal(one[0], many[-1])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"candidates": torch.zeros(2, 3)}, TypeError, "candidates: dtype"),
        ({"candidates": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "candidates: has no rows"),
        ({"target": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, r"target: dimension 1 \(R\) is 4, must be 3"),
        ({"stop_ids": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, r"stop_ids: dimension 0 \(B\)"),
        ({"budget": torch.zeros(2)}, TypeError, "budget: dtype"),
        ({"num_candidates": torch.zeros(1, dtype=torch.int64)}, ValueError, "num_candidates: dimension 0"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    arguments: dict[str, Any] = {
        "candidates": ids,
        "target": ids,
        "stop_ids": ids[0, :0],
        "budget": ids[:, 0].contiguous(),
    }
    with pytest.raises(kind, match=message):
        accept_prefix(**(arguments | change))
