"""The real small model: weights, rotation, attention and tokenizer read as their makers meant them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from dmtp_kernels.models import smollm2 as module
from tests.smollm2_cases import smollm2

SENTENCE = "The capital of France is Paris, and the capital of Germany is Berlin."


def perplexity(text: str) -> float:
    model = smollm2()
    ids = torch.tensor(model.tokenizer.encode(text))
    logits = model.model.logits(model.hidden(ids))
    return math.exp(functional.cross_entropy(logits[:-1], ids[1:]).item())


def test_text_has_low_perplexity() -> None:
    assert perplexity(SENTENCE) < 10  # measured 5.6
    assert perplexity("Paris Berlin the is and of capital France Germany capital is, the of.") > 300  # measured 2,200


def test_greedy_text_is_english() -> None:
    model = smollm2()
    prompts = [model.tokenizer.encode("The capital of France is"), model.chat(module.PROMPTS[0])]
    answers, states = model.generate(prompts, 12)
    assert model.tokenizer.decode(answers[0]).startswith(" Paris")
    assert model.tokenizer.decode(answers[1]).startswith("The sky is blue because")
    # padding and the cache change nothing: the states are those of one plain pass over each text
    both = [model.hidden(torch.tensor(p + a))[len(p) - 1 : -1] for p, a in zip(prompts, answers, strict=True)]
    torch.testing.assert_close(states, torch.cat(both), rtol=1e-3, atol=1e-3)


def test_an_answer_ends() -> None:
    model = smollm2()
    answers, states = model.generate(
        [model.chat("Answer with one word: what is 1 + 1?"), model.chat("Tell a story.")], 12
    )
    assert answers[0][-1] == model.end and len(answers[0]) < 12 == len(answers[1])
    assert states.shape == (len(answers[0]) + 12, 576)
    again = model.generate([model.chat("Tell a story.")], 4, temperature=1.0, seed=3)[0]
    assert again == model.generate([model.chat("Tell a story.")], 4, temperature=1.0, seed=3)[0]


@pytest.mark.parametrize("text", [SENTENCE, " a  b\n\n\tc ", "naïve café 北京 🙂", "x_1 += 23; // don't", ""])
def test_tokens_of_any_text_give_it_back(text: str) -> None:
    tokenizer = smollm2().tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_are_the_vocabulary_s() -> None:
    tokenizer = smollm2().tokenizer
    assert [tokenizer.tokens[i] for i in tokenizer.encode("The lazy dog.")] == ["The", "Ġlazy", "Ġdog", "."]
    assert [tokenizer.tokens[i] for i in tokenizer.encode(" 12")] == ["Ġ", "1", "2"]
    assert tokenizer.encode("<|im_start|>")[0] == tokenizer.tokens.index("<|im_start|>")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="gguf is not installed"):
        module.load_smollm2()
