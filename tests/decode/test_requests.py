"""What ends a request, what it may ask for, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import FinishReason, Request
from dmtp_kernels.decode.stack import MAX_ROWS
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.decode.engine_cases import REQUESTS, assert_accounted, engine_of, prompt, run


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
        ({"stop_ids": (2**63,)}, "stop_ids: are"),
        ({"stop_ids": (1.5,)}, "stop_ids: must be a tuple of token ids"),
        ({"top_k": 2**63}, "top_k: is 9223372036854775808"),
        ({"top_k": 1.5}, "top_k: is 1.5"),
        ({"temperature": 1e39}, "temperature: is 1e"),
        ({"seed": 2**63}, "seed: is"),
        ({"prompt": "text"}, "prompt: must be a tuple of token ids"),
    ],
)
def test_rows_123_139_bad_requests_are_named(change: dict[str, Any], message: str) -> None:
    """aprender#2018, lattice#295: bad values are refused before anything is launched."""
    with pytest.raises(ValueError, match=message):
        replace(Request((1,), 4), **change)


def test_integers_of_numpy_become_int() -> None:
    request = Request(tuple(np.array([1, 2])), np.int64(3), seed=np.int32(4), stop_ids=(np.int64(5),))  # type: ignore[arg-type]
    assert request == Request((1, 2), 3, seed=4, stop_ids=(5,))
    assert {type(x) for x in (*request.prompt, *request.stop_ids, request.max_new_tokens, request.seed)} == {int}
    with pytest.raises(ValueError, match="prompt: must be a tuple of token ids"):
        Request((np.bool_(True),), 4)  # type: ignore[arg-type]


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


@torch.no_grad()
def test_a_request_that_fails_while_joining_leaves_no_row_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seat and pages are given back before the error is raised; the others go on."""
    from dmtp_kernels.decode import engine as engines

    engine = engine_of()
    well = engine.submit(REQUESTS[0])
    engine.step()
    sick = engine.submit(REQUESTS[1])
    original = engines.prefill

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(engines, "prefill", fail)
    with pytest.raises(RuntimeError, match="planted"):
        engine.step()
    monkeypatch.setattr(engines, "prefill", original)
    assert engine.live == [well]
    assert_accounted(engine)
    while engine.busy:
        engine.step()
    assert engine.completions[sick].tokens == []
    assert engine.completions[sick].finish_reason is FinishReason.ERROR
    assert engine.completions[well].tokens == run([REQUESTS[0]])[0].tokens


def test_run_queues_all_or_none() -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match="the cache holds"):
        engine.run([REQUESTS[0], Request(prompt(90, 1), 20)])
    assert not engine.busy


def test_a_drafter_of_another_block_size_is_named() -> None:
    odd = tiny_checkpoint(0)
    odd.drafters["dmtp"].config = replace(odd.drafters["dmtp"].config, block_size=3)
    with pytest.raises(ValueError, match="has blocks of 3 slots, method 'dmtp' needs 8"):
        Engine(odd, "dmtp", max_tokens=32)
