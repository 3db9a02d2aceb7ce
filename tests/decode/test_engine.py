"""Continuous batching: who is in the batch, and when, never changes a request's tokens; every page is accounted for."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from dmtp_kernels.decode.caches import OutOfPages, PagePool, pages_for
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS, VERIFY_SHAPED
from dmtp_kernels.decode.request import Completion, FinishReason, Request
from dmtp_kernels.decode.round import decode_round
from dmtp_kernels.decode.state import MAX_ROWS
from dmtp_kernels.testing.audit import Auditor
from dmtp_kernels.testing.models import tiny_checkpoint

CHECKPOINT = tiny_checkpoint(7)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 19, (length,), generator=generator).tolist())


def engine_of(method: Any = "dmtp", **options: Any) -> Engine:
    settings = {"max_batch": 4, "max_tokens": 96, "page_size": 8, "prefill_chunk": 16} | options
    return Engine(CHECKPOINT, method, **settings)


@torch.no_grad()
def run(requests: list[Request], method: Any = "dmtp", **options: Any) -> list[Completion]:
    return engine_of(method, **options).run(requests)


def caches(engine: Engine) -> list[Any]:
    stack = engine.stack
    return [c for c in (stack.target_cache, stack.drafter_cache, stack.mtp_cache) if c is not None]


def assert_accounted(engine: Engine) -> None:
    """Free + used = total in every cache, no page in two tables, used pages belong to live requests."""
    for cache in caches(engine):
        pool = cache.pool
        assert pool.free + pool.used == pool.num_pages
        owned = [page for request in engine.live for page in pool.owned_by(request)]
        assert len(owned) == len(set(owned)) == pool.used


REQUESTS = [
    Request(prompt(n, n), 14 + n % 5, temperature=t, seed=100 + n)
    for n, t in ((3, 0.0), (30, 1.0), (9, 0.6), (17, 0.0))
]


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
def test_row_095_freed_pages_equal_allocated_pages() -> None:
    """sglang#31616: lengths around a page edge leave no page behind."""
    engine = engine_of(page_size=64, max_tokens=192, max_batch=5)
    lengths = [1, 63, 64, 65, 127]
    for n in lengths:
        engine.submit(Request(prompt(n, n), 9, seed=n))
    engine.step()
    assert_accounted(engine)
    assert engine.stack.target_cache.pool.used == sum(pages_for(n + 9 + MAX_ROWS, 64) for n in lengths)
    while engine.busy:
        engine.step()
        assert_accounted(engine)
    assert [cache.pool.used for cache in caches(engine)] == [0, 0, 0]


@pytest.mark.parametrize(("rows", "page", "pages"), [(11, 4, 3), (11, 1, 11), (64, 64, 1), (65, 64, 2), (0, 8, 0)])
def test_row_109_pages_for_a_round_of_rows(rows: int, page: int, pages: int) -> None:
    """ATOM#250: a round of 8 rows after 3 crosses more than one page."""
    assert pages_for(rows, page) == pages


def test_row_110_pages_are_never_owned_twice() -> None:
    """sglang#25805: a thousand random allocations and releases keep the books exact."""
    pool, rng = PagePool(40), random.Random(1)
    held: dict[int, list[int]] = {}
    for step in range(1000):
        if held and rng.random() < 0.5:
            owner = rng.choice(sorted(held))
            pool.release(held.pop(owner), owner)
        else:
            count = rng.randint(0, 12)
            if count > pool.free:
                with pytest.raises(OutOfPages):
                    pool.allocate(count, step)
            else:
                held[step] = pool.allocate(count, step)
        pages = [page for owned in held.values() for page in owned]
        assert len(pages) == len(set(pages)) == pool.used == pool.num_pages - pool.free
        assert 0 not in pages
    owner, pages = next((o, p) for o, p in held.items() if p)
    pool.release(pages, owner)
    with pytest.raises(ValueError, match="not owned"):
        pool.release(pages, owner)


@torch.no_grad()
def test_a_request_that_cannot_get_pages_waits_while_others_go_on() -> None:
    need = pages_for(17 + 14 + 17 % 5 + MAX_ROWS, 8)
    engine = engine_of(num_pages=need + 2, max_batch=4)
    ids = [engine.submit(REQUESTS[3]), engine.submit(REQUESTS[2])]
    engine.step()
    assert engine.live == ids[:1]
    assert engine.waiting == ids[1:]
    while engine.busy:
        engine.step()
        assert_accounted(engine)
    assert [engine.completions[i].tokens for i in ids] == [run([r])[0].tokens for r in (REQUESTS[3], REQUESTS[2])]


def test_a_request_that_can_never_fit_is_refused_and_nothing_is_queued() -> None:
    engine = engine_of(num_pages=3)
    with pytest.raises(ValueError, match="needs 6 pages, the pool has 3"):
        engine.submit(Request(prompt(20, 1), 20))
    with pytest.raises(ValueError, match="the cache holds 96 per request"):
        engine.submit(Request(prompt(90, 1), 20))
    with pytest.raises(ValueError, match=r"token id outside 0\.\.19"):
        engine.submit(Request((1, 20), 4))
    assert not engine.busy
    assert engine.completions == {}


@torch.no_grad()
def test_rows_077_153_request_of_the_full_length_fits() -> None:
    """sglang#35985, sglang#29695: tables hold the length limit plus a round's rows; one token more is refused."""
    engine = engine_of(max_tokens=64)
    assert engine.state.target_table.shape[1] >= pages_for(64 + MAX_ROWS, 8)
    completion = engine.run([Request(prompt(40, 2), 24)])[0]
    assert len(completion.tokens) == 24
    with pytest.raises(ValueError, match="the cache holds 64"):
        engine.submit(Request(prompt(40, 2), 25))


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
    before = {f.name: getattr(state, f.name)[1].clone() for f in fields(state)}
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


@pytest.mark.parametrize("method", ["autoregressive", "mtp4", "dmtp"])
def test_rows_114_115_162_stop_token_inside_a_block(method: str) -> None:
    """transformers#47912, sglang#31599, ik_llama.cpp#2358: nothing is emitted, counted or kept after a stop token."""
    for request in REQUESTS:
        whole = run([request], "autoregressive")[0].tokens
        for stop in sorted(set(whole)):
            end = whole.index(stop) + 1
            completion = run([replace(request, stop_ids=(stop, 19))], method)[0]
            assert completion.tokens == whole[:end]
            assert completion.finish_reason is FinishReason.STOP
            cut = max(1, end - 1)
            limited = run([replace(request, stop_ids=(stop,), max_new_tokens=cut)], method)[0]
            assert limited.tokens == whole[:cut]
            assert limited.finish_reason is (FinishReason.STOP if cut == end else FinishReason.LENGTH)


@torch.no_grad()
def test_row_166_first_token_is_counted_once() -> None:
    """SwiftLM#78: emitted = 1 from prefill + what the rounds emitted; events, usage and histogram agree."""
    engine = engine_of()
    ids = [engine.submit(r) for r in REQUESTS]
    seen: dict[int, list[int]] = {i: [] for i in ids}
    while engine.busy:
        for event in engine.step():
            seen[event.request_id] += event.tokens
    for request_id in ids:
        completion = engine.completions[request_id]
        assert seen[request_id] == completion.tokens
        assert len(completion.tokens) == completion.request.max_new_tokens
        accepted = sum(k * n for k, n in enumerate(completion.histogram))
        # the last round may match candidates that the budget cuts off
        assert 1 + completion.rounds + accepted >= len(completion.tokens)
        assert 1 + completion.rounds <= len(completion.tokens)


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


def test_row_078_requests_stay_inside_the_position_range() -> None:
    """vllm#57941: the engine refuses lengths whose last round would leave the model's positions."""
    limit = CHECKPOINT.target.config.max_positions
    assert engine_of(max_tokens=limit - MAX_ROWS).max_tokens == limit - MAX_ROWS
    with pytest.raises(ValueError, match=f"must be between 2 and {limit - MAX_ROWS}"):
        engine_of(max_tokens=limit - MAX_ROWS + 1)


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


@torch.no_grad()
def test_rows_118_119_a_row_of_nan_ends_with_an_error_and_alone() -> None:
    """sglang#33206, colibri#369: no token is invented from NaN logits; the other requests do not notice."""
    broken = tiny_checkpoint(7)
    broken.target.embed_tokens.weight[13] = float("nan")
    sick = Request((1, 13, 2), 8, temperature=0.9)
    well = Request((1, 2, 3), 8, temperature=0.9)
    expected = Engine(broken, "dmtp", max_batch=1, max_tokens=32).run([well])[0].tokens
    engine = Engine(broken, "dmtp", max_batch=2, max_tokens=32)
    results = engine.run([sick, well])
    assert results[0].tokens == []
    assert results[0].finish_reason is FinishReason.ERROR
    assert results[1].tokens == expected
    assert_accounted(engine)


def test_row_121_greedy_rows_among_sampled_ones() -> None:
    """vllm#22180: temperatures 0, 0.7, 1 and 1e-6 in one batch; the tiny one equals greedy."""
    base = Request(prompt(11, 3), 12, seed=4)
    batch = [replace(base, temperature=t) for t in (0.0, 0.7, 1.0, 1e-6)]
    got = [c.tokens for c in run(batch)]
    assert got == [run([r])[0].tokens for r in batch]
    assert got[0] == got[3] != got[2]


def test_row_127_top_k_and_top_p_reach_the_target() -> None:
    """Truncation applies to the target's tokens, before acceptance: top-k 1 is greedy, and the rest stays lossless."""
    base = Request(prompt(11, 3), 12, temperature=1.0, seed=9)
    greedy = run([replace(base, temperature=0.0)])[0].tokens
    assert run([replace(base, top_k=1)])[0].tokens == greedy
    assert run([replace(base, top_p=1e-6)])[0].tokens == greedy
    for options in ({"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.8}):
        request = replace(base, **options)
        assert run([request])[0].tokens == run([request], "autoregressive")[0].tokens


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "prompt: is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens: is 0"),
        ({"temperature": float("nan")}, "temperature: is nan"),
        ({"temperature": float("inf")}, "temperature: is inf"),
        ({"temperature": -1.0}, "temperature: is -1.0"),
        ({"top_k": -1}, "top_k: is -1"),
        ({"top_p": 0.0}, "top_p: is 0.0"),
        ({"seed": -1}, "seed: is -1"),
        ({"stop_ids": (1, 2, 3, 4, 5)}, "stop_ids: has 5 entries"),
    ],
)
def test_rows_123_139_bad_requests_are_named(change: dict[str, Any], message: str) -> None:
    """aprender#2018, lattice#295: bad values are refused before anything is launched."""
    with pytest.raises(ValueError, match=message):
        replace(Request((1,), 4), **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "best"}, "no method 'best'"),
        ({"max_batch": 0}, "max_batch: is 0"),
        ({"page_size": 0}, "page_size: is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: is 0"),
        ({"max_tokens": 100_000}, "max_tokens: is 100000"),
        ({"num_pages": 0}, "num_pages: is 0"),
    ],
)
def test_bad_engines_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(**options)


def test_missing_weights_are_named() -> None:
    partial = tiny_checkpoint(0)
    del partial.drafters["dmtp"], partial.fusions["replace"]
    with pytest.raises(ValueError, match="has no drafter 'dmtp'"):
        Engine(partial, "dmtp", max_tokens=32)
    with pytest.raises(ValueError, match="no fusion weights for method 'replace'"):
        Engine(partial, "replace", max_tokens=32)


def test_every_method_of_the_source_is_there() -> None:
    assert {m.num_candidates for m in METHODS.values()} == {0, 3, 4, 7}
    assert all(m.num_rows <= MAX_ROWS for m in METHODS.values())
