"""`DMTPGenerator` against `model.generate` of the same model: families, methods, batches, sampling, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import FinishReason, Request
from dmtp_kernels.models.checkpoint import CheckpointError, load_checkpoint
from dmtp_kernels.models.formats import Exported, export_trio, read_trio
from dmtp_kernels.testing.models import tiny_checkpoint
from dmtp_kernels.training.data import held_out_prompts

T: Any = pytest.importorskip("transformers", reason="transformers is not installed (make test-peer)")
hf: Any = pytest.importorskip("dmtp_kernels.engines.huggingface")

VOCAB = 8
NO_STOPS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    **NO_STOPS,
}
GQA = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, **NO_STOPS}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
}
# sliding layers whose window the text outgrows, logits that are capped, scaled or divided, learned positions, a list of
# layers by another name, experts, keys of another width than values
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GQA),
    "mistral": ("MistralConfig", {**GQA, "sliding_window": 6}),
    "gemma2": ("Gemma2Config", {**GQA, "sliding_window": 6, "final_logit_softcapping": 0.5}),
    "cohere": ("CohereConfig", {**GQA, "logit_scale": 0.25}),
    "granite": ("GraniteConfig", {**GQA, "logits_scaling": 4.0}),
    "gpt2": ("GPT2Config", GPT2),
    "opt": ("OPTConfig", {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "deepseek_v3": ("DeepseekV3Config", {**SHAPE, **MLA}),
}


def random_model(kind: str, fields: dict[str, Any], seed: int = 5) -> Any:
    torch.manual_seed(seed)
    model = T.AutoModelForCausalLM.from_config(getattr(T, kind)(**fields)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def drafts() -> Any:
    return tiny_checkpoint(3, vocab_size=VOCAB, num_valid=VOCAB, target_layers=(0, 2), num_layers=3, window=16)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The embedded trio in public formats."""
    return export_trio(tmp_path_factory.mktemp("trio"), load_checkpoint(drafters=["dmtp"]), "dmtp")


def greedy(model: Any, ids: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    options = {"pad_token_id": 0, **options}
    out: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, drafts: Any) -> None:
    model = random_model(*FAMILIES[family])
    generator = hf.DMTPGenerator(model, drafts, "dmtp", max_batch=2, max_tokens=128, prefill_chunk=7, page_size=4)
    ids = torch.randint(VOCAB, (3, 19), generator=torch.Generator().manual_seed(1))
    out = generator.generate(ids, max_new_tokens=24)
    assert torch.equal(out.sequences, greedy(model, ids, 24))
    # candidates were rejected, so caches were cropped, and some were accepted
    assert sum(sum(row.histogram[1:]) for row in out.completions) > 0
    assert any(row.histogram[k] for row in out.completions for k in range(7))


@pytest.mark.parametrize("method", ["mtp3", "dflash", "replace", "context_fusion", "dmtp_dflash2", "dmtp_domino"])
def test_methods(method: str, drafts: Any) -> None:
    model = random_model(*FAMILIES["llama"])
    generator = hf.DMTPGenerator(model, drafts, method, max_tokens=128)
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(2))
    out = generator.generate(ids, max_new_tokens=24)
    assert torch.equal(out.sequences, greedy(model, ids, 24))
    assert sum(sum(row.histogram[1:]) for row in out.completions) > 0


def test_trained_drafts_from_directories(places: Exported) -> None:
    model = T.AutoModelForCausalLM.from_pretrained(places.target).eval()
    generator = hf.DMTPGenerator.from_directories(model, places.drafter, places.mtp, max_batch=3, max_tokens=256)
    # longer than the drafter's window of 128, shorter than a block, and in between
    texts = [text["text"].encode()[:n] for text, n in zip(held_out_prompts(), (150, 3, 40, 64), strict=False)]
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    out = generator.generate(ids, mask, max_new_tokens=40)
    assert torch.equal(out.sequences, greedy(model, ids, 40, attention_mask=mask))
    trio = read_trio(places.target, places.drafter, places.mtp)
    ours = Engine(trio, "dmtp", max_batch=3, max_tokens=256).run([Request(tuple(text), 40) for text in texts])
    # the drafts saw the same states: the same candidates were accepted in every round
    assert [row.histogram for row in out.completions] == [row.histogram for row in ours]
    accepted = sum(k * n for row in ours for k, n in enumerate(row.histogram))
    assert accepted > sum(row.rounds for row in ours)


def test_end_of_sequence_and_budget(drafts: Any) -> None:
    model = random_model(*FAMILIES["llama"])
    model.generation_config.eos_token_id = [6, 2]
    generator = hf.DMTPGenerator(model, drafts, "dmtp", max_tokens=128)
    ids = torch.randint(VOCAB, (6, 4), generator=torch.Generator().manual_seed(3))
    for count in (1, 2, 9):
        out = generator.generate(ids, max_new_tokens=count)
        want = greedy(model, ids, count, pad_token_id=6)
        assert torch.equal(out.sequences, want)
    assert {row.finish_reason for row in out.completions} == {FinishReason.STOP, FinishReason.LENGTH}
    assert torch.equal(generator.generate(ids, max_new_tokens=9, eos_token_id=[]).sequences, no_stop(model, ids, 9))


def no_stop(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """By hand: every step is one forward over the whole text."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def test_preempted_and_aborted_requests(drafts: Any) -> None:
    """Fewer pages than needed: some start over; one is aborted in flight. Each cache goes with its request."""
    model = random_model(*FAMILIES["llama"])
    generator = hf.DMTPGenerator(model, drafts, "dmtp", max_batch=4, max_tokens=64, num_pages=36, page_size=4)
    engine, ids = generator.engine, torch.randint(VOCAB, (5, 6), generator=torch.Generator().manual_seed(4))
    requests = [engine.submit(Request(tuple(row), 50)) for row in ids.tolist()]
    for _ in range(4):
        engine.step()
    engine.abort(requests[0])
    while engine.busy:
        engine.step()
    assert engine.preemptions > 0 and len(engine._caches) == 0
    want = greedy(model, ids, 50)[:, 6:].tolist()
    for request, text in zip(requests, want, strict=True):
        found = engine.completions[request]
        assert found.tokens == (text[: len(found.tokens)] if request == requests[0] else text)


@pytest.mark.parametrize("verification", ["target", "block"])
def test_law_of_sampled_text(verification: str) -> None:
    """Three tokens at temperature 1.3: a first one of the prefill and two of one or two rounds."""
    vocab, rows = 4, 700
    model = random_model("LlamaConfig", {**GQA, "vocab_size": vocab, "num_hidden_layers": 1})
    drafts = tiny_checkpoint(3, vocab_size=vocab, num_valid=vocab, target_layers=(0,), num_layers=1, drafter_layers=1)
    generator = hf.DMTPGenerator(model, drafts, "dmtp", max_tokens=16, max_batch=64, verification=verification)
    prompt = torch.tensor([[1, 3, 2]])
    out = generator.generate(prompt.expand(rows, -1), max_new_tokens=3, temperature=1.3, seed=11)
    found = out.sequences[:, 3:] @ torch.tensor([vocab**2, vocab, 1])
    texts = torch.cartesian_prod(*[torch.arange(vocab)] * 3)
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1)).logits[:, 2:5].double() / 1.3
    chance = logits.log_softmax(-1).gather(2, texts[..., None]).sum((1, 2)).exp()
    counts = torch.bincount(found, minlength=len(texts)).double()
    big = chance * rows >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    expected = torch.cat([chance[big], chance[~big].sum()[None]]) * rows
    assert chisquare(observed, expected).pvalue > 1e-3
    rounds, kept = sum(row.rounds for row in out.completions), sum(sum(row.histogram[1:]) for row in out.completions)
    assert rows // 10 < kept < rounds - rows // 10


def test_half_precision(drafts: Any) -> None:
    """bfloat16 rows of another count round otherwise: every token is the model's best up to that."""
    model = random_model(*FAMILIES["llama"]).bfloat16()
    half = tiny_checkpoint(
        3, vocab_size=VOCAB, num_valid=VOCAB, target_layers=(0, 2), num_layers=3, dtype=torch.bfloat16
    )
    ids = torch.tensor([[1, 2, 3, 4]])
    out = hf.DMTPGenerator(model, half, "dmtp", max_tokens=64).generate(ids, max_new_tokens=24).sequences
    with torch.no_grad():
        logits = model(out[:, :-1]).logits[:, 3:].float()
    short = logits.amax(-1) - logits.gather(2, out[:, 4:, None])[..., 0]
    assert (short <= 0.05 * logits.abs().amax()).all()
    with pytest.raises(ValueError, match=r"drafts: mtp is torch.float32 on cpu, must be as the model, torch.bfloat16"):
        hf.DMTPGenerator(model, drafts, "dmtp")


def test_model_is_left_as_it_was(drafts: Any) -> None:
    model = random_model(*FAMILIES["llama"])
    before = {name: (p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    generator = hf.DMTPGenerator(model, drafts, "dmtp", max_tokens=64)
    generator.generate(torch.tensor([[1, 2]]), max_new_tokens=8)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == before[name][0] and torch.equal(parameter, before[name][1])
    assert not any(module._forward_hooks for module in model.modules())


QWEN3_5 = {
    **{**GQA, "num_hidden_layers": 4},
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen3_5TextConfig", QWEN3_5, "cache that cannot be cropped"),
    (
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, **NO_STOPS},
        "cannot be run, cropped and run again",
    ),
    ("PhiConfig", {**SHAPE, "intermediate_size": 48}, "linear head without bias"),
]


@pytest.mark.parametrize(("kind", "fields", "why"), REFUSED, ids=[kind for kind, _, _ in REFUSED])
def test_models_that_cannot_be_served(kind: str, fields: dict[str, Any], why: str, drafts: Any) -> None:
    with pytest.raises(hf.UnsupportedModel, match=why):
        hf.DMTPGenerator(random_model(kind, fields), drafts, "dmtp")


def test_other_refusals(drafts: Any, places: Exported) -> None:
    model = random_model(*FAMILIES["llama"])
    with pytest.raises(hf.UnsupportedModel, match="training mode"):
        hf.DMTPGenerator(model.train(), drafts, "dmtp")
    model.eval()
    deeper = random_model("LlamaConfig", {**GQA, "num_hidden_layers": 4})
    with pytest.raises(CheckpointError, match=r"drafter: vocab_size is 260, the target's is 8"):
        hf.DMTPGenerator.from_directories(deeper, places.drafter, places.mtp)
    with pytest.raises(CheckpointError, match=r"mask id 30 is outside the embedding of 8"):
        hf.DMTPGenerator(model, tiny_checkpoint(0, vocab_size=31, num_layers=3), "dmtp")
    with pytest.raises(CheckpointError, match=r"hidden size is 48, the target's is 32"):
        hf.DMTPGenerator(model, tiny_checkpoint(0, vocab_size=VOCAB, hidden_size=48), "dmtp")
    with pytest.raises(CheckpointError, match=r"reads target layers \[0, 5\], the target has 3"):
        hf.DMTPGenerator(model, tiny_checkpoint(0, vocab_size=VOCAB, num_layers=6, target_layers=(0, 5)), "dmtp")
    with pytest.raises(ValueError, match="drafts nothing"):
        hf.DMTPGenerator(model, drafts, "autoregressive")
    with pytest.raises(ValueError, match="reads lengths from the host, must be None"):
        hf.DMTPGenerator(model, drafts, "dmtp", graphs="exact")
    with pytest.raises(ValueError, match="max_tokens: is 1000, must be between 2 and 248"):
        hf.DMTPGenerator(model, drafts, "dmtp", max_tokens=1000)
    generator = hf.DMTPGenerator(model, drafts, "dmtp", max_tokens=64)
    with pytest.raises(ValueError, match="prompt: is empty"):
        generator.generate(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), max_new_tokens=4)
    ids = torch.tensor([[1, 2]])
    for name, value in (("repetition_penalty", 1.2), ("stop_strings", "x"), ("max_time", 1.0), ("penalty_alpha", 0.6)):
        setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match=rf"generation_config.{name}: is {value!r}, must be"):
            generator.generate(ids, max_new_tokens=4)
        setattr(model.generation_config, name, None)
    model.generation_config.min_p = 0.1  # changes draws alone
    generator.generate(ids, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"generation_config.min_p: is 0.1, must be None"):
        generator.generate(ids, max_new_tokens=4, temperature=1.0)
    model.generation_config.min_p = None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([[1, 2]], dtype=torch.uint8)}, "input_ids: dtype is torch.uint8"),
        ({"input_ids": torch.tensor([1, 2])}, "input_ids: has 1 dimensions"),
        ({"attention_mask": torch.ones(1, 3).long()}, r"attention_mask: dimension 1 \(n\) is 3, must be 2"),
        ({"attention_mask": torch.ones(2, 2).long()}, r"attention_mask: dimension 0 \(B\) is 2, must be 1"),
        ({"attention_mask": torch.zeros(1, 2)}, "attention_mask: dtype is torch.float32"),
        ({"attention_mask": torch.tensor([[0, -9]])}, "attention_mask: holds other values than 0 and 1"),
        ({"eos_token_id": 1.5}, "eos_token_id: is 1.5"),
    ],
    ids=str,
)
def test_arguments_are_named(arguments: dict[str, Any], message: str, drafts: Any) -> None:
    generator = hf.DMTPGenerator(random_model(*FAMILIES["llama"]), drafts, "dmtp", max_tokens=64)
    with pytest.raises((ValueError, TypeError), match=message):
        generator.generate(**{"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 2, **arguments})


def test_stops_of_any_kind_and_no_generation_config(drafts: Any) -> None:
    model = random_model(*FAMILIES["llama"])
    generator = hf.DMTPGenerator(model, drafts, "dmtp", max_tokens=64)
    ids = torch.randint(VOCAB, (3, 4), generator=torch.Generator().manual_seed(3))
    want = generator.generate(ids, max_new_tokens=9, eos_token_id=[3]).sequences
    for stops in (3, np.int64(3), torch.tensor(3), torch.tensor([3]), (3,)):
        assert torch.equal(generator.generate(ids, max_new_tokens=9, eos_token_id=stops).sequences, want)
    model.generation_config = None
    assert torch.equal(generator.generate(ids, max_new_tokens=9, eos_token_id=3).sequences, want)


def test_without_a_list_of_layers(drafts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(*FAMILIES["llama"])
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(hf.UnsupportedModel, match="no list of its 3 layers"):
        hf.DMTPGenerator(model, drafts, "dmtp")


def test_logits_that_are_not_the_heads(drafts: Any) -> None:
    model = random_model(*FAMILIES["llama"])
    forward = model.forward

    def biased(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits + torch.arange(VOCAB)
        return out

    model.forward = biased
    with pytest.raises(hf.UnsupportedModel, match="computes its logits from more"):
        hf.DMTPGenerator(model, drafts, "dmtp")
