"""Every cached state equals a recomputation from the committed tokens after every round; planted draft bugs are caught.

All planted bugs below leave the output lossless: only the audit can see them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmtp_kernels.decode import forward
from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import FinishReason, Request
from dmtp_kernels.testing.audit import Auditor
from dmtp_kernels.testing.models import tiny_checkpoint

CHECKPOINT = tiny_checkpoint(3)
# one token, less than a page, page edges, past the window of 16, several chunks; greedy and sampled
PROMPTS = ((1, 0.0), (5, 0.8), (8, 0.0), (23, 1.0), (40, 0.0))


def requests(new_tokens: int = 20) -> list[Request]:
    generator = torch.Generator().manual_seed(11)
    return [
        Request(tuple(torch.randint(0, 19, (n,), generator=generator).tolist()), new_tokens, t, seed=i)
        for i, (n, t) in enumerate(PROMPTS)
    ]


@torch.no_grad()
def audited_run(name: str, **options: Any) -> tuple[Auditor, list[list[int]]]:
    method = METHODS[name]
    settings = {"max_batch": 3, "max_tokens": 80, "page_size": 8, "prefill_chunk": 16} | options
    engine = Engine(CHECKPOINT, name, **settings)
    auditor = Auditor(engine, CHECKPOINT.fusions.get(method.drafter or ""))
    completions = engine.run(requests())
    return auditor, [c.tokens for c in completions]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return audited_run("autoregressive")[1]


@pytest.mark.parametrize("name", METHODS)
def test_state_equals_recomputation(name: str, plain: list[list[int]]) -> None:
    auditor, outputs = audited_run(name)
    assert auditor.findings == []
    assert auditor.rounds > 10
    assert outputs == plain


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_page_sizes(page_size: int, plain: list[list[int]]) -> None:
    auditor, outputs = audited_run("dmtp", page_size=page_size)
    assert auditor.findings == []
    assert outputs == plain


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_row_106_107_chunked_prefill(chunk: int, plain: list[list[int]]) -> None:
    """LightLLM#1079, rtp-llm#1174: a chunk's last MTP row takes the next chunk's first token, at its absolute
    position."""
    auditor, outputs = audited_run("dmtp", prefill_chunk=chunk)
    assert auditor.findings == []
    assert outputs == plain


@torch.no_grad()
@pytest.mark.parametrize("name", ["dmtp", "context_fusion", "mtp3"])
def test_random_joins_aborts_and_preemptions(name: str) -> None:
    """Rows move, pages are reused, late results find nobody: every state of every live row stays true."""
    rng = random.Random(name)
    engine = Engine(CHECKPOINT, name, max_batch=3, max_tokens=64, page_size=8, prefill_chunk=16, num_pages=20)
    auditor = Auditor(engine, CHECKPOINT.fusions.get(name))
    submitted: dict[int, Request] = {}
    for step in range(60):
        if step < 45 and rng.random() < 0.4:
            length = rng.randint(1, 30)
            prompt = tuple(rng.randrange(19) for _ in range(length))
            request = Request(prompt, rng.randint(1, 25), rng.choice([0.0, 0.7, 1.0]), seed=step, stop_ids=(3,))
            submitted[engine.submit(request)] = request
        if engine.live and rng.random() < 0.1:
            engine.abort(rng.choice(engine.live))
        if engine.live and rng.random() < 0.15:
            engine.preempt(rng.choice(engine.live))
        engine.step()
    while engine.busy:
        engine.step()
    assert auditor.findings == []
    assert auditor.rounds > 40
    finished = 0
    for request_id, request in submitted.items():
        completion = engine.completions[request_id]
        plain = Engine(CHECKPOINT, "autoregressive", max_batch=1, max_tokens=64, page_size=8).run([request])[0]
        assert completion.tokens == plain.tokens[: len(completion.tokens)]
        if completion.finish_reason is not FinishReason.ABORTED:
            assert completion.tokens == plain.tokens
            assert completion.finish_reason == plain.finish_reason
            finished += 1
    assert finished >= 5


Patch = Callable[[pytest.MonkeyPatch], None]


def _wrap(module: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Replace `module.name` by `change(original, *args, **kwargs)`."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return apply


def _context_mutant(change: Callable[[Any, Any], Any]) -> Patch:
    """Change where the drafter's context rows go: `change(slots, valid)`."""

    def commit(original: Any, *args: Any, **kwargs: Any) -> Any:
        *others, valid, dst = args
        return original(*others, valid, [dst[0], change(dst[1], valid), *dst[2:]], **kwargs)

    return _wrap(rounds, "commit_round", commit)


def _rejected_draft_to_mtp(advance: Any, stack: Any, state: Any, accepted: Any, verified: Any) -> Any:
    tokens = torch.cat([state.work.candidates[:, 1:], accepted.out_tokens[:, -1:]], dim=1)
    return advance(stack, state, accepted._replace(out_tokens=tokens), verified)


def _hidden_off_by_one(advance: Any, stack: Any, state: Any, accepted: Any, verified: Any) -> Any:
    return advance(stack, state, accepted, verified._replace(hidden=verified.hidden.roll(1, dims=1)))


def _commit_with(**changes: Callable[[Any], Any]) -> Patch:
    def change(commit: Any, *args: Any, **kwargs: Any) -> Any:
        for key, edit in changes.items():
            if key in kwargs:
                kwargs[key] = edit(kwargs[key])
        return commit(*args, **kwargs)

    return _wrap(rounds, "commit_round", change)


def _scratch_visible(
    run: Any, stack: Any, tokens: Any, hidden: Any, positions: Any, table: Any, ctx: Any, tail: Any
) -> Any:
    # the tail slots that a round's advance may see are the pending one alone
    visible = _STATE["state"].tail_slots[:, :2] if tokens.shape[1] > 1 else tail
    return run(stack, tokens, hidden, positions, table, ctx, visible)


_STATE: dict[str, Any] = {}


def _scratch_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = rounds.advance_mtp

    def remember(stack: Any, state: Any, *args: Any) -> Any:
        _STATE["state"] = state
        return advance(stack, state, *args)

    monkeypatch.setattr(rounds, "advance_mtp", remember)
    _wrap(rounds, "run_mtp", _scratch_visible)(monkeypatch)


def _window_with(offset: int) -> Patch:
    def change(pages: Any, table: Any, ctx_len: Any, *, window: int, page_size: int) -> Any:
        return pages(table, ctx_len, window=window + offset, page_size=page_size)

    return _wrap(forward, "draft_page_table", change)


def _swap_t1_and_mask(prepare: Any, stack: Any, state: Any) -> Any:
    ids, embeds = prepare(stack, state)
    swap = [0, 2, 1, *range(3, ids.shape[1])]
    return ids, embeds[:, swap]


def _wrong_anchor(prepare: Any, stack: Any, state: Any) -> Any:
    ids, embeds = prepare(stack, state)
    embeds = embeds.clone()
    embeds[:, 0] = embeds[:, 1]
    return ids, embeds


MUTANTS: dict[str, tuple[Patch, str]] = {
    "context one row short": (
        _context_mutant(lambda s, v: s.scatter(1, (v[:, None].long() - 1).clamp(min=0), -1)),
        "context k",
    ),
    "a stale context row": (
        _context_mutant(lambda s, v: torch.cat([s[:, :1], torch.full_like(s[:, 1:2], -1), s[:, 2:]], 1)),
        "context k",
    ),
    "block position + 1": (_wrap(rounds, "block_positions", lambda f, *a: f(*a) + 1), "block positions"),
    "MTP fed a rejected draft": (_wrap(rounds, "advance_mtp", _rejected_draft_to_mtp), "pending k"),
    "MTP hidden off by one": (_wrap(rounds, "advance_mtp", _hidden_off_by_one), "pending k"),
    "pending row not promoted": (_commit_with(promote_dst=lambda slots: torch.full_like(slots, -1)), "mtp history"),
    "scratch row visible": (_scratch_mutant, "h_mtp"),
    "h_mtp after consuming T1": (_commit_with(hidden=lambda h: h.roll(-1, dims=1)), "h_mtp"),
    "window one too wide": (_window_with(1), "block hidden"),
    "window one too narrow": (_window_with(-1), "block hidden"),
    "wrong anchor": (_wrap(rounds, "prepare_block", _wrong_anchor), "block embeddings"),
    "T1 slot and MASK slot swapped": (_wrap(rounds, "prepare_block", _swap_t1_and_mask), "block embeddings"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_draft_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, plain: list[list[int]]) -> None:
    patch, finding = MUTANTS[name]
    patch(monkeypatch)
    auditor, outputs = audited_run("dmtp")
    assert any(finding in found for found in auditor.findings), auditor.findings[:3]
    assert outputs == plain  # lossless all the same: this is why the audit exists
