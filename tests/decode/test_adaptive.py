"""Several MTP candidates before the drafter continues: lossless, per request, following its acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dmtp_kernels.decode import adaptive
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import propose, refresh
from dmtp_kernels.testing.audit import audit_state
from dmtp_kernels.testing.capture import capture_safe
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.decode.engine_cases import CHECKPOINT, REQUESTS, engine_of, prompt, run

DRAFTED = [n for n, m in METHODS.items() if m.drafter is not None and m.first == "mtp"]


@pytest.mark.parametrize("verification", ["target", "rejection", "block"])
@pytest.mark.parametrize("method", DRAFTED)
def test_greedy_output_is_the_autoregressive_one(method: str, verification: str) -> None:
    requests = [replace(r, temperature=0.0) for r in REQUESTS[:3]]
    got = run(requests, method, mtp_steps=4, verification=verification)
    assert [c.tokens for c in got] == [c.tokens for c in run(requests, "autoregressive")]


def test_sampled_output_is_the_autoregressive_one() -> None:
    got = run(REQUESTS, mtp_steps=7)
    assert [c.tokens for c in got] == [c.tokens for c in run(REQUESTS, "autoregressive")]


@torch.no_grad()
@pytest.mark.parametrize("method", ["dmtp", "conditioned", "mask_residual"])
def test_the_block_holds_as_many_mtp_tokens_as_its_row_says(method: str) -> None:
    engines = [engine_of(name, **options) for name, options in ((method, {"mtp_steps": 4}), ("mtp4", {}), (method, {}))]
    drafts = []
    for engine in engines:
        for request in REQUESTS:
            engine.submit(request)
        engine.admit()
        view = engine.state.rows(0, 4)
        view.mtp_steps.copy_(torch.tensor([1, 2, 3, 4]))
        drafts.append(propose(engine.stack, view))
    ours, chain, plain = drafts
    assert ours.block_ids is not None and plain.block_ids is not None
    assert ours.block_hidden is not None and plain.block_hidden is not None
    first = METHODS[method].num_known - 1  # T1's slot
    mask = CHECKPOINT.drafters[method].config.mask_token_id
    embedding = CHECKPOINT.target.embed_tokens.weight
    for row in range(4):
        steps = row + 1
        known = chain.candidates[row, 1 : 1 + steps].tolist()
        assert ours.block_ids[row, first : first + steps].tolist() == known
        assert set(ours.block_ids[row, first + steps :].tolist()) == {mask}
        assert ours.candidates[row, 1 : 1 + steps].tolist() == known
        assert ours.block_embeds is not None
        torch.testing.assert_close(
            ours.block_embeds[row, first + 1 : first + steps], embedding[known[1:]], rtol=0, atol=0
        )
    # one step is the method itself
    torch.testing.assert_close(ours.block_hidden[0], plain.block_hidden[0])
    assert torch.equal(ours.candidates[0], plain.candidates[0])


@torch.no_grad()
def test_states_stay_true_and_rounds_capturable() -> None:
    """The chain's rows go to scratch: no cached state notices them."""
    engine = engine_of(mtp_steps=5)
    inner: Any = engine.round_function
    tokens: dict[Any, list[int]] = {}

    def audited(stack: Any, state: Any) -> Any:
        for seat in engine.seats:
            completion = engine.completions[seat.request_id]
            tokens.setdefault(seat, [*completion.request.prompt, *completion.tokens])
        with capture_safe(numpy=True):
            result = inner(stack, state)
        for row, seat in enumerate(engine.seats):
            tokens[seat] += [t for t in result.accepted.out_tokens[row].tolist() if t >= 0]
            assert audit_state(engine, row, tokens[seat]) == []
        return result

    engine.round_function = audited
    engine.run(REQUESTS)


def steps_of(checkpoint: Any, rounds: int) -> list[int]:
    engine = Engine(checkpoint, "dmtp", max_batch=1, max_tokens=128, mtp_steps=4)
    engine.submit(Request(prompt(5, 1), 100))
    steps = []
    for _ in range(rounds):
        engine.step()
        steps.append(int(engine.state.mtp_steps[0]))
    return steps


@torch.no_grad()
def test_steps_follow_acceptance() -> None:
    agreeing, never = tiny_checkpoint(7), tiny_checkpoint(7, shared_bias=0.0)
    # every model of `agreeing` says 4 whatever it reads
    agreeing.target.lm_head.weight.zero_()
    agreeing.target.lm_head.weight[4] = 1.0
    assert agreeing.mtp is not None
    for norm in (agreeing.target.norm, agreeing.mtp.norm, agreeing.drafters["dmtp"].norm):
        norm.weight.zero_()
    grown = steps_of(agreeing, 9)
    # ties go to the lowest id, 0, in all three: seven of seven are accepted
    assert grown[0] == 2 and grown[-1] == 4 and grown == sorted(grown)
    kept = steps_of(never, 20)
    assert max(kept) < 4 and 1 in kept


@torch.no_grad()
def test_steps_come_down_again_and_a_new_request_starts_at_one() -> None:
    engine = engine_of(max_batch=1, mtp_steps=4)
    engine.submit(REQUESTS[1])
    engine.step()
    view = engine.state.rows(0, 1)
    view.recent.fill_(7.0)
    refresh(engine.stack, view)
    seen = []
    for _ in range(6):
        engine.step()
        seen.append(int(view.mtp_steps[0]))
    assert seen[0] == 4 > seen[-1]
    engine.abort(0)
    assert int(view.mtp_steps[0]) == 1 and float(view.recent[0]) == 0.0


def test_a_row_without_tokens_keeps_its_steps() -> None:
    engine = engine_of(max_batch=2, mtp_steps=4)
    for request in REQUESTS[:2]:
        engine.submit(request)
    with torch.no_grad():
        engine.admit()
        view = engine.state.rows(0, 2)
        view.mtp_steps.fill_(3)
        view.recent.fill_(2.5)
        view.budget[0] = 0
        refresh(engine.stack, view)
        engine.round_function(engine.stack, view)
    assert (int(view.mtp_steps[0]), float(view.recent[0])) == (3, 2.5)
    assert float(view.recent[1]) != 2.5


@pytest.mark.parametrize(
    ("method", "steps", "most"), [("dmtp", 8, 7), ("dmtp", 0, 7), ("dflash", 2, 1), ("mtp3", 2, 1)]
)
def test_steps_out_of_range_are_named(method: str, steps: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"mtp_steps: is {steps}, must be between 1 and {most} for method '{method}'"):
        engine_of(method, mtp_steps=steps)


def test_a_wrong_merge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lossless verification hides a bad merge; acceptance does not: chain tokens one place off are never taken."""
    merge = adaptive.merge_chain

    def shifted(stack: Any, state: Any, tokens: torch.Tensor) -> torch.Tensor:
        state.work.chain = state.work.chain.roll(1, dims=1)
        return merge(stack, state, tokens)

    monkeypatch.setattr("dmtp_kernels.decode.round.merge_chain", shifted)
    with pytest.raises(AssertionError):
        test_the_block_holds_as_many_mtp_tokens_as_its_row_says("dmtp")
