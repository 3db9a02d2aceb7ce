"""Continuous batching: who is in the batch, and when, never changes a request's tokens."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from dmtp_kernels.decode.caches import pages_for
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import VERIFY_SHAPED
from dmtp_kernels.decode.request import FinishReason, Request
from dmtp_kernels.decode.round import decode_round, refresh
from dmtp_kernels.decode.stack import MAX_ROWS
from dmtp_kernels.testing.audit import Auditor
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.decode.engine_cases import CHECKPOINT, REQUESTS, assert_accounted, caches, engine_of, prompt, run


@pytest.mark.parametrize("method", ["autoregressive", "mtp3", "dflash", "dmtp", "context_fusion"])
def test_tokens_do_not_depend_on_the_batch(method: str) -> None:
    alone = [run([request], method)[0].tokens for request in REQUESTS]
    together = [c.tokens for c in run(REQUESTS, method)]
    crowded = [c.tokens for c in run([*REQUESTS[::-1], *REQUESTS], method, max_batch=3)][len(REQUESTS) :]
    assert alone == together == crowded


@torch.no_grad()
def test_requests_join_and_leave_between_rounds() -> None:
    engine = engine_of(max_batch=2)
    late = Request(prompt(12, 5), 10, seed=5)
    first = engine.submit(REQUESTS[0])
    engine.step()
    second = engine.submit(late)
    engine.step()
    assert engine.live == [first, second]
    third = engine.submit(REQUESTS[1])
    engine.step()
    assert engine.waiting == [third]
    while engine.busy:
        engine.step()
        assert_accounted(engine)
    expected = [run([r])[0].tokens for r in (REQUESTS[0], late, REQUESTS[1])]
    assert [engine.completions[i].tokens for i in (first, second, third)] == expected


@torch.no_grad()
@pytest.mark.parametrize("after", [0, 1, 3])
def test_row_098_abort_with_a_round_in_flight(after: int) -> None:
    """vllm#49620: the dead row's late result is nobody's, its pages and its neighbour's tokens are untouched."""
    engine = engine_of(max_batch=2)
    ids = [engine.submit(r) for r in (REQUESTS[1], REQUESTS[2])]
    for _ in range(after + 1):
        engine.step()
    before = list(engine.completions[ids[0]].tokens)
    engine.abort(ids[0])
    assert_accounted(engine)
    newcomer = engine.submit(REQUESTS[3])  # takes over the freed row and pages
    while engine.busy:
        engine.step()
        assert_accounted(engine)
    dead = engine.completions[ids[0]]
    assert dead.finish_reason is FinishReason.ABORTED
    assert dead.tokens == before
    assert engine.completions[ids[1]].tokens == run([REQUESTS[2]])[0].tokens
    assert engine.completions[newcomer].tokens == run([REQUESTS[3]])[0].tokens
    engine.abort(ids[1])
    assert engine.completions[ids[1]].finish_reason is FinishReason.LENGTH


@torch.no_grad()
def test_abort_of_a_waiting_request() -> None:
    engine = engine_of(max_batch=1)
    ids = [engine.submit(r) for r in REQUESTS[:2]]
    engine.step()
    engine.abort(ids[1])
    while engine.busy:
        engine.step()
    assert engine.completions[ids[1]].tokens == []
    assert engine.completions[ids[0]].finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="no request 9"):
        engine.abort(9)


@torch.no_grad()
def test_row_099_a_reused_row_starts_clean() -> None:
    """llama.cpp#22105: a long request, then a short one in the same row; nothing of the first is reachable."""
    engine = engine_of(max_batch=1, max_tokens=96)
    engine.run([Request(prompt(70, 1), 20, seed=1)])
    row = engine.state.rows(0, 1)
    assert int(row.length) == int(row.budget) == 0
    assert int(row.target_table.abs().sum()) == int(row.mtp_table.abs().sum()) == 0
    assert bool((row.tail_slots == -1).all())
    short = Request(prompt(4, 2), 12, seed=2)
    auditor = Auditor(engine, CHECKPOINT.fusions["dmtp"])
    assert engine.run([short])[0].tokens == run([short])[0].tokens
    assert auditor.findings == []


@torch.no_grad()
def test_row_111_preempted_rows_free_their_pages_and_resume() -> None:
    """vllm-metal#551: preempt two of four at different moments, two others get their places, all end with the same
    tokens."""
    requests = [Request(prompt(5 + i, 40 + i), 16, temperature=0.7, seed=i) for i in range(6)]
    engine = engine_of(max_batch=4, num_pages=4 * pages_for(10 + 16 + MAX_ROWS, 8))
    ids = [engine.submit(r) for r in requests]
    for _ in range(3):
        engine.step()
    for victim in engine.live[:2]:
        engine.preempt(victim)
        assert_accounted(engine)
    assert engine.waiting[:2] == ids[4:]
    while engine.busy:
        engine.step()
        assert_accounted(engine)
    assert [engine.completions[i].tokens for i in ids] == [run([r])[0].tokens for r in requests]
    with pytest.raises(ValueError, match="is not live"):
        engine.preempt(ids[0])


@torch.no_grad()
def test_rows_089_090_101_inert_rows_change_nothing() -> None:
    """vllm-metal#716, TensorRT-LLM#16548, vllm#48475: a row with nothing left to emit leaves every cache as it was."""
    engine = engine_of(max_batch=3)
    for request in REQUESTS[:3]:
        engine.submit(request)
    engine.step()
    state = engine.state.rows(0, 3)
    state.budget[1] = 0
    refresh(engine.stack, state)
    before = {
        f.name: getattr(state, f.name)[1].clone()
        for f in fields(state)
        if isinstance(getattr(state, f.name), torch.Tensor)
    }
    slots = {}
    for cache, table in zip(caches(engine), (state.target_table, state.drafter_table, state.mtp_table), strict=True):
        pages = table[1][table[1] > 0].long()
        slots[cache.page_size, id(cache)] = [layer[pages].clone() for layer in (*cache.k, *cache.v)]
    tail = [k[state.tail_slots[1]].clone() for k in engine.stack.mtp_cache.flat_k]  # type: ignore[union-attr]
    accepted = decode_round(engine.stack, state).accepted
    assert int(accepted.commit_len[1]) == int(accepted.accept_len[1]) == 0
    assert accepted.out_tokens[1].tolist() == [-1] * 8
    assert min(accepted.commit_len[[0, 2]].tolist()) > 0
    for name, value in before.items():
        assert torch.equal(getattr(state, name)[1], value), name
    for cache, table in zip(caches(engine), (state.target_table, state.drafter_table, state.mtp_table), strict=True):
        pages = table[1][table[1] > 0].long()
        for layer, old in zip((*cache.k, *cache.v), slots[cache.page_size, id(cache)], strict=True):
            assert torch.equal(layer[pages].nan_to_num(nan=7.0), old.nan_to_num(nan=7.0))
    for k, old in zip(engine.stack.mtp_cache.flat_k, tail, strict=True):  # type: ignore[union-attr]
        assert torch.equal(k[state.tail_slots[1]].nan_to_num(nan=7.0), old.nan_to_num(nan=7.0))


@torch.no_grad()
@pytest.mark.parametrize(("method", "first"), [("dmtp", 7), ("dflash", 7), ("conditioned", 8)])
def test_row_069_positions(method: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#25015: tokens 0..6, anchor 7. MTP rows sit at the position of their target hidden (the anchor's at 6, the
    round's from 7 on); the drafter's block starts at 7 with A, at 8 with T1."""
    seen: dict[str, list[list[int]]] = {"mtp": [], "block": []}
    engine = engine_of(method, max_batch=1, prefill_chunk=64)
    if engine.stack.mtp is not None:
        mtp = engine.stack.mtp.forward

        def forward(embeds: Any, hidden: Any, positions: Any, attend: Any) -> Any:
            seen["mtp"].append(positions[0].tolist())
            return mtp(embeds, hidden, positions, attend)

        monkeypatch.setattr(engine.stack.mtp, "forward", forward)
    engine.submit(Request(prompt(7, 1), 20))
    engine.admit()
    draft = decode_round(engine.stack, engine.state.rows(0, 1)).draft
    assert draft.block_positions is not None
    assert draft.block_positions[0].tolist() == list(range(first, 15))
    if engine.stack.mtp is not None:
        assert seen["mtp"] == [list(range(7)), list(range(7, 15))]


@torch.no_grad()
def test_row_105_lengths_at_every_stage() -> None:
    """mlx-vlm#2206: after prefill the cache holds the prompt; after a round also the anchor and the accepted
    candidates."""
    engine = engine_of(max_batch=1)
    request_id = engine.submit(Request(prompt(17, 6), 20, seed=3))
    engine.admit()
    assert int(engine.state.length[0]) == 17
    result = decode_round(engine.stack, engine.state.rows(0, 1))
    assert int(engine.state.length[0]) == 18 + int(result.accepted.accept_len[0])
    assert int(engine.state.anchor[0]) == int(result.accepted.bonus[0])
    engine.abort(request_id)
    assert [cache.pool.used for cache in caches(engine)] == [0, 0, 0]


def test_row_135_two_runs_are_equal() -> None:
    """sglang#35079: same requests, same tokens and same acceptance."""
    first, second = run(REQUESTS), run(REQUESTS)
    assert [(c.tokens, c.histogram) for c in first] == [(c.tokens, c.histogram) for c in second]


@torch.no_grad()
def test_row_137_padding_rows_are_not_candidates() -> None:
    """vllm#58080: a placeholder equal to the target's token is neither accepted nor counted as drafted."""
    repeats = tiny_checkpoint(1)
    token = 4
    # every position predicts token 4, which is also what fills the padding rows
    repeats.target.lm_head.weight.zero_()
    repeats.target.norm.weight.fill_(0.0)
    repeats.target.lm_head.weight[token] = 1.0
    request = Request((4, 4), 6)
    completion = Engine(repeats, VERIFY_SHAPED, max_batch=1, max_tokens=32).run([request])[0]
    plain = Engine(repeats, "autoregressive", max_batch=1, max_tokens=32).run([request])[0]
    assert completion.tokens == plain.tokens
    assert completion.histogram == [5]


@torch.no_grad()
def test_zero_residual_gives_the_plain_dual_anchor_block_bit_for_bit() -> None:
    """W = 0: same block, same drafter output, same candidates as without the MTP hidden."""
    checkpoint = tiny_checkpoint(2)
    checkpoint.drafters["control"] = checkpoint.drafters["dmtp"]
    checkpoint.fusions["dmtp"].proj.weight.zero_()
    drafts: dict[str, list[Any]] = {"dmtp": [], "control": []}
    for name, kept in drafts.items():
        engine = Engine(checkpoint, name, max_batch=2, max_tokens=96)
        inner = engine.round_function

        def keep(stack: Any, state: Any, inner: Any = inner, kept: list[Any] = kept) -> Any:
            result = inner(stack, state)
            kept.append(result.draft)
            return result

        engine.round_function = keep
        engine.run(REQUESTS[:2])
    assert len(drafts["dmtp"]) == len(drafts["control"]) > 5
    for ours, plain in zip(*drafts.values(), strict=True):
        assert torch.equal(ours.block_embeds, plain.block_embeds)
        assert torch.equal(ours.block_hidden, plain.block_hidden)
        assert torch.equal(ours.candidates, plain.candidates)
