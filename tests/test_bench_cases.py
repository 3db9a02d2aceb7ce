"""The benchmark's cases: every op has them, at the sizes they name, and what they time is right."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dmtp_kernels import _library
from dmtp_kernels.bench import agree
from dmtp_kernels.bench import inputs as sizes
from dmtp_kernels.bench.agree import disagreement
from dmtp_kernels.bench.cases import CHARACTERS, KINDS, BenchCase, Problem, Suite, tensors_in
from dmtp_kernels.ops._spec import nbytes

CPU = torch.device("cpu")
SUITE = Suite(CPU, scale=128)
CASES = list(SUITE.cases())
NAMED = [pytest.param(c, id=f"{c.op}-{c.name}") for c in CASES]


def test_every_op_is_benchmarked_alone_and_in_a_batch() -> None:
    assert set(KINDS) == set(_library.registered())
    assert {(c.op, c.shape["B"]) for c in CASES} == {(op, b) for op in KINDS for b in (1, 8)}
    assert len({(c.op, c.name) for c in CASES}) == len(CASES)
    assert all(c.character in CHARACTERS for c in CASES)


@pytest.mark.parametrize("case", NAMED)
def test_what_is_timed_is_right(case: BenchCase) -> None:
    problem = case.load()
    assert disagreement(problem) is None
    assert problem.floor_bytes == problem.spec.floor_bytes(*problem.inputs) > 0
    assert nbytes(*problem.outputs) <= problem.floor_bytes or case.op == "draft_page_table"


@pytest.mark.parametrize("case", NAMED)
def test_reset_makes_every_call_the_same(case: BenchCase) -> None:
    problem = case.load()
    before = [t.clone() for t in tensors_in(problem.inputs)]
    run = problem.fused()
    for _ in range(3):
        run()
    problem.reset()
    for now, then in zip(tensors_in(problem.inputs), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", NAMED)
def test_the_eager_chain_does_the_same_step(case: BenchCase) -> None:
    problem = case.load()
    problem.fused()()
    outputs = [t.clone() for t in problem.outputs]
    problem.reset()
    found = problem.eager()()
    problem.reset()
    if problem.eager_is == "reference":
        return
    got = found if isinstance(found, tuple) else (found,)
    if case.op in ("sample_rows", "accept_rejection", "accept_block"):
        # the same distribution, other draws
        assert all(t.shape[0] == outputs[0].shape[0] for t in got)
        if case.op != "sample_rows":
            count, tokens, stopped = got
            assert ((tokens >= 0).sum(dim=1) == count).all() and (count >= 1).all() and not stopped.any()
        return
    if case.op == "block_attention":
        torch.testing.assert_close(got[0].transpose(1, 2), outputs[0], rtol=2e-2, atol=6e-2)
        return
    # logits rounded to bf16 may tie, so other tokens of the same logit are right too
    t1 = case.op == "fused_t1_prep"
    hidden, weight = (problem.inputs[1], problem.inputs[2]) if t1 else problem.inputs[:2]
    logits = hidden.float() @ weight.float().T
    tokens = [got[0].view(-1), outputs[0].view(-1) if t1 else (~outputs[0].view(-1)) & 0xFFFFFFFF]
    reached = [logits.gather(1, t[:, None]) for t in tokens]
    torch.testing.assert_close(*reached, rtol=1e-2, atol=1e-2)
    same = tokens[0] == tokens[1]
    assert same.sum() >= len(same) // 2
    for g, w in zip(got[1:], outputs[1:3] if t1 else (), strict=True):
        torch.testing.assert_close(g[same], w[same], rtol=2e-2, atol=6e-2)


def test_full_sizes_are_those_of_the_model() -> None:
    full = {(c.op, c.name): c.shape for c in Suite(CPU).cases()}
    assert full["fused_t1_prep", "b8"] == {"B": 8, "V": 248_320, "H": 2048}
    assert full["block_attention", "drafter_b1"]["window"] == 4096
    for case in CASES:
        problem_inputs = case.make()
        largest = max(t.numel() for t in tensors_in(problem_inputs))
        assert largest <= max(1 << 24, sizes.HIDDEN * case.shape.get("V", 0))


@pytest.mark.parametrize("op", ["lm_head_screen", "block_attention", "fused_t1_prep", "commit_kv", "accept_block"])
def test_a_wrong_output_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(c for c in CASES if c.op == op).load()
    fused = problem.fused

    def wrong(run: Any) -> None:
        run()
        if op == "lm_head_screen":
            problem.outputs[0].fill_(-1)
        elif op == "commit_kv":
            problem.mutated[0].add_(1)
        elif op == "accept_block":
            problem.outputs[1].add_(1)
        else:
            floats = [t for t in problem.outputs if t.is_floating_point()]
            floats[0].view(-1)[5] += 1

    monkeypatch.setattr(Problem, "fused", lambda self: partial(wrong, fused()))
    assert disagreement(problem) is not None


def test_inputs_do_not_depend_on_what_was_made_before() -> None:
    def counts(suite: Suite) -> torch.Tensor:
        return next(c for c in suite.cases(["commit_kv"]) if c.name == "b8").make()[4]

    fresh, used = Suite(CPU, scale=128), Suite(CPU, scale=128)
    for case in used.cases(["sample_rows", "advance_round"]):
        case.make()
    assert torch.equal(counts(fresh), counts(used)) and torch.equal(counts(used), counts(used))


def test_inputs_on_the_host_are_the_same() -> None:
    problem = next(c for c in CASES if c.op == "commit_round").load()
    problem.fused()()
    got = [t.clone() for t in (*problem.outputs, *problem.mutated)]
    problem.reset()
    host = Problem(problem.case, agree.on_host(problem.inputs))
    assert agree._differs(host, got) is None
    got[1].view(-1)[0] += 1
    assert agree._differs(host, got) is not None


def test_bad_requests_are_named() -> None:
    with pytest.raises(ValueError, match="scale: is 0"):
        Suite(CPU, 0)
    with pytest.raises(ValueError, match="op: is 'x'"):
        list(SUITE.cases(["x"]))
