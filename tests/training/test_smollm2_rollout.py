"""The target's answers: what is kept of them is what the target computed, and each row is nobody else's."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dmtp_kernels.training.attention import causal_attend, causal_bias
from dmtp_kernels.training.smollm2.rollout import SOFT, Rollouts, roll_out
from tests.smollm2_cases import smollm2

LAYERS = (1, 29)
# the first two answers end early; without the second the rows that are left are moved
QUESTIONS = ("Answer with one word: what is 1 + 1?", "Say only hello.", "Tell a story.", "Name the planets.")


def roll(count: int, temperature: float = 0.0) -> Rollouts:
    model = smollm2()
    return roll_out(
        model.model,
        [model.chat(question) for question in QUESTIONS[-count:]],
        end=model.end,
        layers=LAYERS,
        temperature=torch.full((count,), temperature),
        generator=torch.Generator().manual_seed(0),
        length=40,
    )


@cache
def greedy() -> Rollouts:
    return roll(4)


def test_rows_are_those_of_a_plain_pass() -> None:
    model, texts = smollm2(), greedy()
    assert texts.length[0] < 40 and texts.ids[0, texts.length[0] - 1] == model.end
    assert texts.length[3] == 40
    for row in range(4):
        start, stop = int(texts.answer[row]), int(texts.length[row])
        ids = texts.ids[row, :stop].long()
        assert ids[:start].tolist() == model.chat(QUESTIONS[row])
        attend = causal_attend(causal_bias(stop, torch.float32))
        with torch.no_grad():
            out = model.model(ids[None], torch.arange(stop), attend, LAYERS)
            best = model.model.logits(out.hidden[0, start - 1 : stop - 1]).topk(SOFT, dim=1)
        # the first token of a text has channels of a thousand
        torch.testing.assert_close(
            texts.features[row, 1 : stop - 1], out.features[0, 1 : stop - 1], rtol=1e-3, atol=5e-3
        )
        assert not texts.features[row, stop - 1 :].any()
        torch.testing.assert_close(texts.soft_logits[row, start - 1 : stop - 1], best.values, rtol=1e-3, atol=1e-3)
        assert torch.equal(texts.soft_ids[row, start - 1 : stop - 1, 0], ids[start:].int())


def test_an_answer_does_not_depend_on_the_others() -> None:
    assert torch.equal(roll(1).ids[0], greedy().ids[3])


def test_draws_follow_the_temperature() -> None:
    cold, hot = roll(2, 1e-2), roll(2, 3.0)
    assert torch.equal(cold.ids, greedy().ids[2:])
    start = int(hot.answer[0])
    assert not torch.equal(hot.ids[0, start:], greedy().ids[2, start:])
    assert torch.equal(hot.ids, roll(2, 3.0).ids)


@pytest.mark.parametrize("row", range(4))
def test_nothing_is_kept_of_prompts_but_their_rows(row: int) -> None:
    texts = greedy()
    start, stop = int(texts.answer[row]), int(texts.length[row])
    assert not texts.soft_ids[row, : start - 1].any() and not texts.soft_ids[row, stop - 1 :].any()
    assert texts.soft_ids[row, start - 1 : stop - 1].any(dim=1).all()
