"""The loop decodes a real chat model: whatever drafts, the output is the target's own."""

from __future__ import annotations

from functools import cache

import pytest

from dmtp_kernels.decode.check import compare_outputs
from dmtp_kernels.decode.evaluate import run_method
from dmtp_kernels.decode.method import METHODS, VERIFY_SHAPED
from dmtp_kernels.decode.request import Completion, Request
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.smollm2 import DRAFTERS, PROMPTS
from tests.smollm2_cases import smollm2

DRAFTED = ("mtp3", "mtp4", "dflash", "dmtp")
NEW_TOKENS = 8


@cache
def shipped() -> Checkpoint:
    return smollm2().with_drafters()


def requests(temperature: float) -> list[Request]:
    model = smollm2()
    chats = [tuple(model.chat(PROMPTS[i])) for i in (0, 7)]
    return [
        Request(chat, NEW_TOKENS, temperature=temperature, seed=i, stop_ids=(model.end,))
        for i, chat in enumerate(chats)
    ]


@cache
def plain(temperature: float) -> tuple[list[Completion], list[Completion]]:
    """Autoregressive, and in the shape of a verification."""
    both = (METHODS["autoregressive"], VERIFY_SHAPED)
    alone, shaped = (run_method(shipped(), method, requests(temperature), 2).completions for method in both)
    return alone, shaped


def test_greedy_text_is_that_of_a_plain_pass() -> None:
    model = smollm2()
    wanted = model.generate([list(r.prompt) for r in requests(0.0)], NEW_TOKENS)[0]
    assert [c.tokens for c in plain(0.0)[0]] == wanted
    assert model.tokenizer.decode(wanted[0]).startswith("The sky is blue because")


@pytest.mark.parametrize(("name", "temperature"), [*((name, 0.0) for name in DRAFTED), ("dmtp", 0.8)])
def test_output_is_the_target_s_own(name: str, temperature: float) -> None:
    got = run_method(shipped(), METHODS[name], requests(temperature), 2).completions
    verdict = compare_outputs(shipped(), got, *plain(temperature))
    assert verdict.identical, verdict.mismatches
    assert all(sum(c.histogram) == c.rounds > 0 for c in got)
    if temperature == 0:
        assert sum(c.rounds for c in got) < sum(len(c.tokens) - 1 for c in got), "no candidate was accepted"


def test_the_drafters_stay_small() -> None:
    assert DRAFTERS.stat().st_size < 25_000_000
