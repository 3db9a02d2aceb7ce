"""Rejection sampling and block verification in the loop: greedy rows stay greedy, draws depend on nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import Request
from tests.decode.engine_cases import REQUESTS, engine_of, prompt, run

RULES = ("rejection", "block")


@pytest.mark.parametrize("verification", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_the_autoregressive_one(method: str, verification: str) -> None:
    requests = [replace(r, temperature=0.0) for r in REQUESTS[:2]]
    requests.append(Request(prompt(9, 4), 15, stop_ids=(3, 5)))
    got = run(requests, method, verification=verification)
    assert [c.tokens for c in got] == [c.tokens for c in run(requests, "autoregressive")]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in run(requests, "autoregressive")]
    # same drafts, same verdicts as when tokens are compared
    assert [c.histogram for c in got] == [c.histogram for c in run(requests, method)]


@pytest.mark.parametrize("verification", RULES)
def test_sampled_tokens_do_not_depend_on_the_batch(verification: str) -> None:
    requests = [replace(r, temperature=0.9, top_k=n, top_p=0.95) for n, r in enumerate(REQUESTS)]
    alone = [run([request], verification=verification)[0].tokens for request in requests]
    assert alone == [c.tokens for c in run(requests, verification=verification)]
    assert alone == [c.tokens for c in run([*requests[::-1], *requests], verification=verification, max_batch=3)][4:]


def test_draws_are_not_those_of_target_only_verification() -> None:
    """Rejection sampling follows the same law with other draws; equal output would mean that it did not run."""
    request = Request(prompt(9, 4), 30, temperature=1.0, seed=4)
    tokens = {v: run([request], verification=v)[0].tokens for v in ("target", *RULES)}
    assert tokens["target"] != tokens["rejection"] and tokens["target"] != tokens["block"]


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="verification: is 'best', must be one of target, rejection, block"):
        engine_of(verification="best")
