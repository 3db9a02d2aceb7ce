"""Pages granted ahead of need, preemption where they run short, aborts at any moment, results read one round late."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dmtp_kernels.decode import prefill as prefills
from dmtp_kernels.decode.caches import pages_for
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.readback import Landing, Readback
from dmtp_kernels.decode.request import FinishReason, Request
from dmtp_kernels.decode.round import decode_round, refresh
from dmtp_kernels.testing.audit import Auditor, audit_state
from dmtp_kernels.testing.capture import CaptureError, capture_safe, suspended
from dmtp_kernels.testing.poison import poison
from tests.decode.engine_cases import CHECKPOINT, REQUESTS, assert_accounted, caches, engine_of, prompt, run


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()
        assert_accounted(engine)


@torch.no_grad()
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("method", ["autoregressive", "mtp3", "dmtp"])
def test_pages_are_granted_ahead_of_need_and_no_earlier(method: str, page_size: int) -> None:
    engine = engine_of(method, page_size=page_size, max_batch=2)
    auditor = Auditor(engine, CHECKPOINT.fusions.get(method))
    request = Request(prompt(5, 3), 60)
    engine.submit(request)
    held = []
    while engine.busy:
        engine.step()
        if engine.seats:
            seat = engine.seats[0]
            assert int(engine.state.index.error[0]) == 0
            for owner, pages in seat.pages.items():
                row = getattr(engine.state, f"{owner}_table")[0]
                assert row.tolist() == pages + [0] * (len(row) - len(pages))
                assert len(pages) <= pages_for(min(seat.known + 3 * engine.stack.rows, 65), page_size)
            held.append(len(engine.seats[0].pages["target"]))
    assert held[0] == pages_for(5 + 3 * engine.stack.rows, page_size) < held[-1]
    assert auditor.findings == []
    assert engine.completions[0].tokens == run([request], "autoregressive")[0].tokens


@torch.no_grad()
@pytest.mark.parametrize("method", ["autoregressive", "mtp3", "dmtp"])
def test_the_newest_request_leaves_when_pages_run_short(method: str) -> None:
    requests = [Request(prompt(4 + i, i), 50, temperature=0.5 * (i % 2), seed=i) for i in range(4)]
    engine = engine_of(method, num_pages=10)
    auditor = Auditor(engine, CHECKPOINT.fusions.get(method))
    ids = [engine.submit(r) for r in requests]
    left: list[int] = []
    while engine.busy:
        before = set(engine.live)
        engine.step()
        assert_accounted(engine)
        gone = before - set(engine.live)
        left += [i for i in gone if engine.completions[i].finish_reason is None]
    assert engine.preemptions == len(left) > 0
    assert ids[0] not in left  # the oldest one stays
    assert auditor.findings == []
    assert [engine.completions[i].tokens for i in ids] == [run([r], method)[0].tokens for r in requests]


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3])
def test_rows_098_105_abort_during_prefill(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#49620, mlx-vlm#2206: it ends after its chunk, its pages come back, its neighbour does not notice."""
    engine = engine_of(prefill_chunk=8)
    first = engine.submit(REQUESTS[0])
    engine.step()
    doomed = engine.submit(REQUESTS[1])  # four chunks
    inner, chunks = prefills.run_target, []

    def abort(*args: Any) -> Any:
        chunks.append(args)
        if len(chunks) == chunk:
            engine.abort(doomed)
        return inner(*args)

    monkeypatch.setattr(prefills, "run_target", abort)
    engine.step()
    monkeypatch.undo()
    assert len(chunks) == chunk
    assert engine.live == [first]
    assert_accounted(engine)
    follower = engine.submit(REQUESTS[3])
    drain(engine)
    assert engine.completions[doomed].finish_reason is FinishReason.ABORTED
    assert engine.completions[doomed].tokens == []
    for request_id, request in ((first, REQUESTS[0]), (follower, REQUESTS[3])):
        assert engine.completions[request_id].tokens == run([request])[0].tokens


@torch.no_grad()
@pytest.mark.parametrize("method", ["mtp3", "dmtp"])
def test_row_089_a_request_held_back_for_a_round_goes_on(method: str) -> None:
    """vllm-metal#716: counts of 8, 0, 3 tokens: a row with 0 changes nothing and continues from the right length."""
    engine = engine_of(method, max_batch=2, num_pages=40)
    for request in REQUESTS[:2]:
        engine.submit(request)
    tokens = [list(event.tokens) for event in engine.admit()]
    engine.seating.grow(engine._total)
    view = engine.seating.round_view()
    for number in range(4):
        budget = view.budget.clone()
        view.budget[0] *= number != 1
        refresh(engine.stack, view)
        accepted = decode_round(engine.stack, view).accepted
        for row, emitted in enumerate(accepted.out_tokens.tolist()):
            tokens[row] += [t for t in emitted if t >= 0]
        if number == 1:
            assert int(accepted.commit_len[0]) == 0 < int(accepted.commit_len[1])
            view.budget[0] = budget[0]
            refresh(engine.stack, view)
        for row, request in enumerate(REQUESTS[:2]):
            assert audit_state(engine, row, [*request.prompt, *tokens[row]]) == []
    for request, emitted in zip(REQUESTS[:2], tokens, strict=True):
        assert emitted == run([request], "autoregressive")[0].tokens[: len(emitted)]
        assert len(emitted) >= 4


@torch.no_grad()
@pytest.mark.parametrize("method", ["autoregressive", "mtp4", "dflash", "dmtp", "context_fusion"])
def test_rows_090_093_146_155_whatever_padded_rows_hold(method: str) -> None:
    """TensorRT-LLM#16548, vllm#43682, xllm#1939, vllm#41841: two rows padded to four; every input of the padding is
    poison, its length and budget apart from 0 too. Rows, caches and tables of the live ones are those of two rows."""
    outcomes = []
    for padding in (0, 2):
        engine = engine_of(method)
        for request in REQUESTS[:2]:
            engine.submit(request)
        engine.step()
        view = engine.state.rows(0, 2 + padding)
        for name, tensor in view._tensors().items():
            if name in ("tail_slots", "grants", "idle"):
                continue  # the engine's own, cleared with the row
            tensor[2:] = poison(tensor.dtype)
        view.budget[2:] = -1
        refresh(engine.stack, view)
        for _ in range(3):
            accepted = decode_round(engine.stack, view).accepted
            assert accepted.out_tokens[2:].eq(-1).all() and view.index.slots[2:].eq(-1).all()
        state = [t[:2].clone() for t in (*view._tensors().values(), *view.index, *accepted)]
        stored = [layer.clone() for cache in caches(engine) for layer in (*cache.k, *cache.v)]
        outcomes.append((state, stored))
    for plain, padded in zip(*outcomes, strict=True):
        for a, b in zip(plain, padded, strict=True):
            # the models' GEMMs sum by batch size; integers are compared exactly
            torch.testing.assert_close(b, a, equal_nan=True)


@torch.no_grad()
def test_row_158_many_rows_that_end_at_random_rounds() -> None:
    """z-lab/dflash#146: 32 rows, seven of sixteen left alive and the like, joins into the gaps."""
    rng = random.Random(158)
    requests = [Request(prompt(rng.randint(1, 20), i), rng.randint(1, 30)) for i in range(44)]
    plain = [c.tokens for c in run(requests, "autoregressive", max_batch=16)]
    for method in ("dmtp", "dflash"):
        engine = engine_of(method, max_batch=32, num_pages=180)
        ids = [engine.submit(r) for r in requests]
        drain(engine)
        assert [engine.completions[i].tokens for i in ids] == plain


@contextmanager
def only_late_reads(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[list[int]]:
    """No read of the device inside, except of the round before, through `Landing`."""
    reads: list[int] = []
    inner = Landing.read

    def read(landing: Landing) -> Any:
        reads.append(engine.rounds)
        with suspended():
            return inner(landing)

    monkeypatch.setattr(Landing, "read", read)
    with capture_safe(numpy=True):
        yield reads


@torch.no_grad()
def test_row_151_a_steady_step_reads_the_round_before_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#36013: the host waits for the last round's event after launching the next round, and for nothing else."""
    engine = engine_of(page_size=64)
    for request in REQUESTS:
        engine.submit(request)
    engine.step()
    with only_late_reads(monkeypatch, engine) as reads:
        for _ in range(3):
            engine.step()
    assert reads == [2, 3, 4]  # round n + 1 was launched before round n was read
    inner = engine.round_function

    def peeking(stack: Any, state: Any) -> Any:
        int(state.length[0])
        return inner(stack, state)

    engine.round_function = peeking
    with pytest.raises(CaptureError, match="__int__"), only_late_reads(monkeypatch, engine):
        engine.step()


@torch.no_grad()
def test_row_151_results_do_not_change_while_they_wait() -> None:
    """A later round reuses the buffers that the earlier one's results came from: the host's copy is its own."""
    engine = engine_of(max_batch=2)
    engine.submit(REQUESTS[1])
    engine.admit()
    readback, view = Readback(2, engine.stack.rows, engine.device), engine.state.rows(0, 1)
    landings, wanted = [], []
    for _ in range(2):
        accepted = decode_round(engine.stack, view).accepted
        wanted.append((accepted.out_tokens.tolist(), accepted.finished.tolist(), accepted.accept_len.tolist(), [0]))
        landings.append(readback.start(view))
        for tensor in accepted:
            tensor.fill_(77)
    assert [landing.read() for landing in landings] == wanted


@torch.no_grad()
def test_a_row_whose_caches_went_wrong_ends_with_an_error() -> None:
    """A count out of range is clamped and flagged; its request ends, the other one does not notice."""
    engine = engine_of(max_batch=2)
    ids = [engine.submit(r) for r in REQUESTS[:2]]
    engine.step()
    inner = engine.round_function

    def broken(stack: Any, state: Any) -> Any:
        result = inner(stack, state)
        state.index.error[0] = 1
        return result

    engine.round_function = broken
    engine.step()
    engine.round_function = inner
    drain(engine)
    assert engine.completions[ids[0]].finish_reason is FinishReason.ERROR
    assert engine.completions[ids[1]].tokens == run([REQUESTS[1]])[0].tokens


def test_rows_082_083_094_prefix_reuse_is_refused_with_its_reason() -> None:
    """atlas#693, vLLM-2080Ti#194, sglang#19897: target pages alone leave the drafter's and MTP's rows unwritten."""
    with pytest.raises(ValueError, match=r"prefix_cache: is True, must be False: .* rows that were never written"):
        engine_of(prefix_cache=True)


@pytest.mark.parametrize("where", ["advanced", "readback", "landing", "recording", "growing"])
@pytest.mark.parametrize("method", ["autoregressive", "mtp3", "dmtp"])
@torch.no_grad()
def test_an_error_around_a_round_loses_no_token(method: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may be a round ahead of the host then: everybody starts over from the tokens the host has."""
    requests = [Request(prompt(3 + i, i), 25 + i) for i in range(3)]
    plain = [c.tokens for c in run(requests, "autoregressive")]
    engine = engine_of(method)
    calls = 0

    def failing(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            done = original(*arguments) if where in ("advanced", "growing") else None
            if calls == 4:
                raise KeyboardInterrupt
            return original(*arguments) if done is None else done

        return call

    owner, name = {
        "advanced": (engine, "round_function"),
        "readback": (engine._readback, "start"),
        "landing": (engine, "_land"),
        "recording": (engine, "_record"),
        "growing": (engine.seating, "grow"),
    }[where]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    ids = [engine.submit(r) for r in requests]
    seen: dict[int, list[int]] = {i: [] for i in ids}
    interrupted = 0
    while engine.busy:
        try:
            events = engine.step()
        except KeyboardInterrupt:
            interrupted += 1
            assert not engine.live and len(engine.waiting) == 3
            continue
        for event in events:
            seen[event.request_id] += event.tokens
    assert interrupted == 1
    assert [engine.completions[i].tokens for i in ids] == [seen[i] for i in ids] == plain
    assert_accounted(engine)


@torch.no_grad()
def test_an_error_while_joining_keeps_events_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("dmtp", max_batch=2)
    first, second = engine.submit(Request(prompt(4, 1), 9)), engine.submit(Request(prompt(5, 2), 9))
    fill = engine.seating._fill_tables
    calls = 0

    def failing(seat: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no tables")
        fill(seat)

    monkeypatch.setattr(engine.seating, "_fill_tables", failing)
    with pytest.raises(RuntimeError, match="no tables"):
        engine.step()
    assert_accounted(engine)
    assert engine.live == [first] and engine.waiting == [second]
    tokens: dict[int, list[int]] = {first: [], second: []}
    while engine.busy:
        for event in engine.step():
            tokens[event.request_id] += event.tokens
    assert all(tokens[i] == engine.completions[i].tokens and len(tokens[i]) == 9 for i in tokens)


@pytest.mark.parametrize("value", [-3, 0])
def test_num_pages_must_be_positive(value: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages: is {value}, must be at least 1"):
        engine_of("dmtp", num_pages=value)
    with pytest.raises(TypeError, match=r"max_batch: is 2.5, must be a whole number"):
        engine_of("dmtp", max_batch=2.5)
