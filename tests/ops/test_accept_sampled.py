"""accept_rejection and accept_block: greedy requests, faulty rows, stops and budgets, independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.accept import (
    BAD_DRAFT,
    BAD_PARAMETER,
    LENGTH,
    NAN_LOGITS,
    RUNNING,
    STOPPED,
    UNDECIDED,
    accept_block,
    accept_prefix,
    accept_rejection,
)
from dmtp_kernels.ops.sample import philox
from tests.ops.accept_cases import INF, MANY, NAN, RULES, Rule, call, certain, random_round
from tests.ops.conftest import INTERPRETED
from tests.ops.philox_keys import LARGEST, SMALLEST, word

KERNEL_OPS = ("accept_rejection", "accept_block")
EVERY_CAPABILITY = True


@MANY
@RULES
def test_greedy_requests_equal_target_only_verification(rule: Rule) -> None:
    candidates, logits, q = random_round(40)
    candidates[:, 1:] = torch.where(torch.rand(40, 7) < 0.8, logits[:, :-1].argmax(dim=2), candidates[:, 1:])
    stops, budget = torch.tensor([3, 4]), torch.arange(40) % 10
    count = torch.arange(40) % 9 - 1
    want = accept_prefix(candidates, logits.argmax(dim=2), stop_ids=stops, budget=budget, num_candidates=count)
    mixed = {"stop_ids": stops, "budget": budget, "num_candidates": count, "draft_probs": q}
    got = call(rule, candidates, logits, temperature=torch.zeros(40), **mixed)
    assert not got.status.any()
    for a, b in zip(want, got[:5], strict=True):
        assert torch.equal(a, b)
    # rows of a mixed batch do not notice the sampled ones
    temperature = torch.arange(40) % 2 * 0.8
    part = call(rule, candidates, logits, temperature=temperature, **mixed)
    for a, b in zip(want, part[:5], strict=True):
        assert torch.equal(a[::2], b[::2])


@RULES
def test_greedy_ties_go_to_the_lowest_id(rule: Rule) -> None:
    logits = torch.tensor([[[0.0, 2.0, 2.0], [INF, 5.0, INF], [1.0, 1.0, 0.0]]]).double()
    got = call(rule, [[0, 1, 0]], logits, temperature=torch.zeros(1))
    assert got.out_tokens.tolist() == [[1, 0, 0]] and got.accept_len.tolist() == [2] and got.status.tolist() == [0]
    assert call(rule, [[0, 2, 0]], logits, temperature=torch.zeros(1)).out_tokens.tolist() == [[1, -1, -1]]


@RULES
def test_stops_budget_and_ragged_counts_cut_sampled_rounds(rule: Rule) -> None:
    tokens = [5, 6, 9, 7, 8, 1]
    logits, drafts = certain(tokens), [[0, *tokens[:5]]]
    q = logits[:, :-1].exp()
    for budget, stops, want, reason in (
        (9, [], tokens, RUNNING),
        (5, [9], [5, 6, 9], STOPPED),
        (3, [9], [5, 6, 9], STOPPED),
        (2, [9], [5, 6], LENGTH),
        (6, [], tokens, LENGTH),
        (0, [9], [], RUNNING),
    ):
        got = call(
            rule,
            drafts,
            logits,
            draft_probs=q,
            stop_ids=torch.tensor(stops, dtype=torch.int64),
            budget=torch.tensor([budget]),
        )
        assert got.out_tokens[0, : got.commit_len.item()].tolist() == want and got.finished.item() == reason
        assert got.accept_len.item() == (5 if budget else 0)  # raw, before the cuts
    for count, m in ((3, 3), (0, 0), (99, 5)):
        got = call(rule, drafts, logits, draft_probs=q, num_candidates=torch.tensor([count]))
        assert got.accept_len.item() == m and got.out_tokens[0, : m + 1].tolist() == tokens[: m + 1]
    dead = call(rule, drafts, logits * NAN, draft_probs=q, num_candidates=torch.tensor([-1]))
    assert dead.commit_len.item() == 0 and dead.bonus.item() == -1 and dead.status.item() == 0


@RULES
def test_row_117_rows_that_are_no_distribution_fail_closed(rule: Rule) -> None:
    tokens = [5, 6, 7, 8]
    for fault, bits in ((NAN, NAN_LOGITS + UNDECIDED), (INF, UNDECIDED), (-INF, UNDECIDED)):
        logits = certain(tokens).repeat(1, 1, 1)
        if fault == -INF:
            logits[0, 2] = -INF
        else:
            logits[0, 2, 3] = fault
        got = call(rule, [[0, *tokens[:3]]], logits, draft_probs=certain(tokens)[:, :-1].exp())
        assert got.out_tokens.tolist() == [[5, 6, -1, -1]] and got.accept_len.item() == 2
        assert got.status.item() == bits and got.commit_len.item() == 2 and got.bonus.item() == 6
    # faults beyond the decision do not count; a row of one finite entry is certain
    logits = certain(tokens)
    logits[0, 3] = NAN
    got = call(rule, [[0, 5, 1, 7]], logits, draft_probs=certain([5, 1, 7])[:, :3].exp())
    assert got.out_tokens.tolist() == [[5, 6, -1, -1]] and got.status.item() == 0


@RULES
def test_row_118_all_nan_rows_never_emit(rule: Rule) -> None:
    logits = torch.full((4, 2, 5) if INTERPRETED else (500, 2, 5), NAN)
    got = call(rule, torch.zeros(len(logits), 2, dtype=torch.int64), logits)
    assert (got.commit_len == 0).all() and (got.out_tokens == -1).all() and (got.bonus == -1).all()
    assert (got.status == NAN_LOGITS + UNDECIDED).all()


@RULES
def test_greedy_rows_ignore_nan_but_say_so(rule: Rule) -> None:
    logits = torch.tensor([[[NAN, 1.0, 3.0], [NAN, NAN, NAN]]])
    got = call(rule, [[0, 2]], logits, temperature=torch.zeros(1))
    assert got.out_tokens.tolist() == [[2, -1]] and got.status.item() == NAN_LOGITS + UNDECIDED
    got = call(rule, [[0, 1]], logits, temperature=torch.zeros(1))
    assert got.out_tokens.tolist() == [[2, -1]] and got.status.item() == NAN_LOGITS and got.accept_len.item() == 0


@MANY
@RULES
def test_row_122_and_138_impossible_and_tiny_candidates(rule: Rule) -> None:
    trials = 10_000
    drafts = torch.tensor([[0, 1]]).expand(trials, 2).contiguous()
    tiny = torch.tensor([1 - 1e-6, 1e-6, 0.0]).log().expand(trials, 2, 3)
    q = torch.tensor([0.0, 1.0, 0.0]).expand(trials, 1, 3)
    assert call(rule, drafts, tiny, draft_probs=q).accept_len.sum() <= 2
    # half precision q: 1e-9 is stored as 0; nothing is divided by it and the candidate is refused
    half = call(rule, drafts, tiny, draft_probs=torch.tensor([1.0, 1e-9, 0.0]).half().expand(trials, 1, 3))
    assert not half.accept_len.any() and (half.commit_len == 1).all() and not half.status.any()


@RULES
def test_row_122_and_123_the_smallest_and_the_largest_draw(rule: Rule) -> None:
    # keys whose acceptance draw is word 0 (fp32 would make it 0) and word 2^32 - 1 (fp32 would make it 1)
    for extremes, u in ((SMALLEST, 2.0**-33), (LARGEST, 1 - 2.0**-33)):
        position, index = extremes[philox.ACCEPT]
        assert index == 0 and word(philox.ACCEPT, position, 0) == (0 if extremes is SMALLEST else 2**32 - 1)
        key: dict[str, Any] = {"seed": torch.zeros(1).long(), "position": torch.tensor([position])}

        def kept(p: float, key: dict[str, Any] = key) -> int:
            rows = torch.tensor([[[1 - p, p, 0.0]] * 2], dtype=torch.float64).log()
            certain = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
            return int(call(rule, [[0, 1]], rows, draft_probs=certain, **key).accept_len)

        # u lies inside (0, 1): p = 0 is never kept, p = q always, and the threshold is u itself
        assert kept(0.0) == 0 and kept(1.0) == 1
        assert kept(u * (1 - 1e-12)) == 0 and kept(u + (1 - u) * 1e-3) == 1
        assert kept(u + 2.0**-50) == 1


@RULES
def test_row_123_residual_draws_at_the_ends_stay_inside_the_support(rule: Rule) -> None:
    for extremes in (SMALLEST, LARGEST):
        position, index = extremes[philox.RESIDUAL]
        rows = torch.full((1, 2, 4), -INF)
        rows[0, :, 1 if index == 0 else 0], rows[0, :, 3] = 0.0, -3.0
        key: dict[str, Any] = {"seed": torch.zeros(1).long(), "position": torch.tensor([position])}
        got = call(rule, [[0, 2]], rows, **key)
        assert got.accept_len.item() == 0 and got.out_tokens[0, 0].item() in (0, 1, 3)


@MANY
@RULES
def test_row_130_block_and_rejection_differ_on_the_same_round(rule: Rule) -> None:
    # cumprod(p / q) with refusals in between is not the token-wise rule: one of the two would never differ
    candidates, logits, q = random_round(200, seed=3)
    one = call(accept_rejection, candidates, logits, draft_probs=q)
    all_at_once = call(accept_block, candidates, logits, draft_probs=q)
    assert (one.accept_len != all_at_once.accept_len).any()


@MANY
@RULES
def test_row_127_unproposed_rows_of_q_are_not_read(rule: Rule) -> None:
    candidates, logits, q = random_round(24)
    count = torch.arange(24) % 8
    want = call(rule, candidates, logits, draft_probs=q, num_candidates=count)
    beyond = torch.arange(7) >= count[:, None]
    q[beyond], logits = NAN, logits.clone()
    candidates[:, 1:][beyond] = 2**40
    logits[:, 1:][beyond] = NAN
    got = call(rule, candidates, logits, draft_probs=q, num_candidates=count)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


@RULES
@pytest.mark.parametrize("fault", ["nan", "inf", "negative", "zero"])
def test_unusable_q_cuts_the_draft_there(rule: Rule, fault: str) -> None:
    tokens = [5, 6, 7, 8]
    logits = certain(tokens)
    q = logits[:, :-1].exp()
    q[0, 1] = {"nan": NAN, "inf": INF, "negative": -1.0, "zero": 0.0}[fault]
    got = call(rule, [[0, *tokens[:3]]], logits, draft_probs=q)
    assert got.accept_len.item() == 1 and got.out_tokens.tolist() == [[5, 6, -1, -1]] and got.status.item() == BAD_DRAFT
    assert call(rule, [[0, *tokens[:3]]], logits, draft_probs=q, temperature=torch.zeros(1)).status.item() == 0


@MANY
@RULES
def test_q_is_normalised(rule: Rule) -> None:
    candidates, logits, q = random_round(64)
    a = call(rule, candidates, logits, draft_probs=q)
    b = call(rule, candidates, logits, draft_probs=q * 4)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@RULES
def test_row_137_candidates_outside_the_vocabulary_are_not_proposed(rule: Rule) -> None:
    tokens = [5, 6, 7, 8]
    for bad in (-1, 12, 2**40):
        got = call(rule, [[0, 5, bad, 7]], certain(tokens))
        assert got.accept_len.item() == 1 and got.out_tokens.tolist() == [[5, 6, -1, -1]] and got.status.item() == 0


@RULES
def test_row_123_and_139_bad_parameters_are_inert(rule: Rule) -> None:
    logits = certain([5, 6]).expand(6, 2, 12)
    temperature = torch.tensor([NAN, INF, -1.0, 1e-30, 0.0, 1.0])
    top_p = torch.tensor([1.0, 1.0, 1.0, 1.0, NAN, NAN])
    got = call(rule, [[0, 5]] * 6, logits, temperature=temperature, top_p=top_p)
    assert got.status.tolist() == [BAD_PARAMETER] * 3 + [0, 0, BAD_PARAMETER]
    assert got.commit_len.tolist() == [0, 0, 0, 2, 2, 0] and got.finished.tolist() == [0] * 6


@MANY
@RULES
def test_filters_shape_the_target(rule: Rule) -> None:
    trials = 10_000
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drafts = torch.full((trials, 2), 3)
    got = call(rule, drafts, p.log().expand(trials, 2, 4), top_p=torch.full((trials,), 0.75))
    assert not got.accept_len.any()  # id 3 is outside the top-p
    # the draft is fixed at 3, not drawn from q: the residual of p = (.625, .375, 0, 0) over q = 1/4 each
    law = np.bincount(got.out_tokens[:, 0].numpy(), minlength=4) / trials
    np.testing.assert_allclose(law, [0.75, 0.25, 0, 0], atol=0.02)
    assert set(
        call(rule, drafts, p.log().expand(trials, 2, 4), top_k=torch.ones(trials, dtype=torch.int64))
        .out_tokens[:, 0]
        .tolist()
    ) == {0}


@MANY
@RULES
def test_a_requests_round_does_not_depend_on_the_batch(rule: Rule) -> None:
    candidates, logits, q = random_round(32, vocab=261)
    temperature = torch.arange(32) % 3 * 0.6
    keys = {"seed": torch.arange(32) * 11, "position": torch.arange(32) + 2**35, "top_p": 1.1 - torch.arange(32) / 60}
    together = call(rule, candidates, logits, draft_probs=q, temperature=temperature, **keys)
    assert together.accept_len.unique().numel() > 3
    for b in (0, 1, 5, 31):
        one = slice(b, b + 1)
        part = {k: v[one] for k, v in keys.items()}
        alone = call(rule, candidates[one], logits[one], draft_probs=q[one], temperature=temperature[one], **part)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, together, strict=True))
        # a strided view of a wider buffer is the same request
        wide = torch.full((2, 8, 300), NAN)
        wide[1, :, :261] = logits[b]
        view = call(rule, candidates[one], wide[1:, :, :261], draft_probs=q[one], temperature=temperature[one], **part)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(view, together, strict=True))


def test_block_needs_q() -> None:
    candidates, logits, _ = random_round(2)
    with pytest.raises(TypeError, match="draft_probs: is None"):
        call(accept_block, candidates, logits, draft_probs=None)


@RULES
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"target_logits": torch.zeros(2, 4, 5)}, ValueError, r"target_logits: dimension 1 \(R\) is 4, must be 3"),
        ({"target_logits": torch.zeros(2, 3, 0)}, ValueError, "target_logits: has no columns"),
        ({"draft_probs": torch.zeros(2, 3, 5)}, ValueError, r"draft_probs: dimension 1 \(K\) is 3, must be 2"),
        ({"draft_probs": torch.zeros(2, 2, 4)}, ValueError, r"draft_probs: dimension 2 \(V\) is 4, must be 5"),
        ({"temperature": torch.zeros(2, dtype=torch.int64)}, TypeError, "temperature: dtype"),
        ({"seed": torch.zeros(1, dtype=torch.int64)}, ValueError, r"seed: dimension 0 \(B\)"),
        ({"position": torch.zeros(2)}, TypeError, "position: dtype"),
        ({"top_k": torch.zeros(2)}, TypeError, "top_k: dtype"),
        ({"top_p": torch.zeros(3)}, ValueError, "top_p: dimension 0"),
    ],
)
def test_bad_arguments_are_named(rule: Rule, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    zeros = torch.zeros(2, dtype=torch.int64)
    arguments: dict[str, Any] = {
        "candidates": ids,
        "target_logits": torch.zeros(2, 3, 5),
        "temperature": torch.ones(2),
        "seed": zeros,
        "position": zeros,
        "stop_ids": zeros[:0],
        "budget": zeros,
        "draft_probs": torch.zeros(2, 2, 5),
    }
    with pytest.raises(kind, match=message):
        rule(**(arguments | change))


@RULES
def test_row_129_addresses_need_64_bits(rule: Rule) -> None:
    # row stride 2^28: the logits of request 4 start at 2^31
    memory = torch.from_numpy(np.empty(9 * 2**28 + 64, dtype=np.float16))
    logits = memory.as_strided((5, 2, 64), (2**29, 2**28, 1))
    logits.fill_(-INF)
    logits[torch.arange(5), 0, torch.arange(5) * 5] = logits[torch.arange(5), 1, torch.arange(5) * 7] = 0.0
    drafts = torch.stack((torch.zeros(5).long(), torch.arange(5) * 5), dim=1)
    got = call(rule, drafts, logits)
    assert got.out_tokens.tolist() == [[5 * i, 7 * i] for i in range(5)]
