"""Rollouts on disk, a file a batch, and the batches that training draws from them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dmtp_kernels.models.checkpoint import write_atomically
from dmtp_kernels.models.smollm2 import SmolLM2
from dmtp_kernels.training.data import Corpus, seeded
from dmtp_kernels.training.losses import BLOCK
from dmtp_kernels.training.smollm2.prompts import make_prompts
from dmtp_kernels.training.smollm2.rollout import Rollouts, roll_out

LAYERS = (9, 19, 29)
"""Target layers whose outputs the drafter reads; MTP reads the last one's, after the target's final norm."""
TEMPERATURES = (0.0, 0.6, 1.0)
"""Answers are drawn at these in turn."""
LONGEST_PROMPT = 96


class DataError(RuntimeError):
    """Rollouts that cannot be written or used; the message is one line and names the file."""


def collect(
    out: Path,
    smol: SmolLM2,
    corpus: Corpus,
    *,
    files: int,
    rows: int,
    length: int,
    seed: int,
    log: Callable[[str], None],
) -> list[Path]:
    """Write what is missing of `files` files of `rows` rollouts, of `length` tokens at most, and return them all.

    Every file is a function of corpus, seed, its number and the sizes. `smol` decodes in bf16.

    Raises:
        DataError: a file that is there belongs to another run, or cannot be read.
    """
    paths = [out / f"rollouts-{index:03}.safetensors" for index in range(files)]
    prompts: list[list[int]] = []
    for index, path in enumerate(paths):
        key = {"data": corpus.digest, "seed": seed, "rows": rows, "length": length, "index": index}
        if path.is_file():
            _check_key(path, key)
            continue
        if not prompts:
            limit = min(LONGEST_PROMPT, length // 2)
            encoded = (smol.chat(p) for p in make_prompts(corpus, 2 * files * rows, seed))
            prompts = [ids for ids in encoded if len(ids) <= limit]
            if len(prompts) < files * rows:
                raise DataError(f"rollouts: {len(prompts)} prompts of at most {limit} tokens, need {files * rows}")
        started = time.perf_counter()
        texts = roll_out(
            smol.model,
            prompts[index * rows : (index + 1) * rows],
            end=smol.end,
            layers=LAYERS,
            temperature=torch.tensor(TEMPERATURES)[torch.arange(rows) % len(TEMPERATURES)],
            generator=seeded(seed, index),
            length=length,
        )
        seconds = time.perf_counter() - started
        metadata = {"rollouts": json.dumps({"key": key, "seconds": round(seconds, 1)})}
        write_atomically(path, save({name: getattr(texts, name) for name in _FIELDS}, metadata=metadata))
        tokens = int((texts.length - texts.answer).sum())
        log(f"rollouts {index + 1}/{files} {seconds:.0f} s, {tokens} tokens")
    return paths


_FIELDS = ("ids", "answer", "length", "features", "soft_ids", "soft_logits")


def _metadata(path: Path) -> dict[str, object]:
    try:
        with safe_open(path, framework="pt") as handle:
            return json.loads((handle.metadata() or {})["rollouts"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DataError(f"rollouts: {path} cannot be read ({error}); delete it") from error


def _check_key(path: Path, key: dict[str, object]) -> None:
    if _metadata(path)["key"] != key:
        raise DataError(f"rollouts: {path} belongs to another seed, size or corpus; choose another directory")


@dataclass(frozen=True)
class Batch:
    """Windows of one step: what `Rollouts` holds of them, ids int64, and features divided by each channel's scale."""

    ids: torch.Tensor  # [B, T]
    answer: torch.Tensor  # [B]
    length: torch.Tensor  # [B]
    features: torch.Tensor  # [B, T, n*H]
    hidden: torch.Tensor  # [B, T, H], what the last layer's output was before its division
    soft_ids: torch.Tensor  # [B, T, SOFT]
    soft_logits: torch.Tensor


class Collection:
    """All rollouts of some files.

    `scale[n*H]` is each feature channel's root mean square in the first file, without the first token of a text, whose
    channels reach a hundred times the others'. `shortlist(n)` are the n commonest tokens of the answers.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files: list[Rollouts] = []
        for path in paths:
            try:
                with safe_open(path, framework="pt") as handle:
                    self.files.append(Rollouts(**{name: handle.get_tensor(name) for name in _FIELDS}))
            except (SafetensorError, OSError, TypeError) as error:
                raise DataError(f"rollouts: {path} cannot be read ({error}); delete it") from error
        self.seconds = sum(float(str(_metadata(path)["seconds"])) for path in paths)
        # a block needs its anchor and the labels behind it
        self.places = [
            (f, int(row))
            for f, texts in enumerate(self.files)
            for row in (texts.length - texts.answer > BLOCK).nonzero()[:, 0]
        ]
        if not self.places:
            raise DataError(f"rollouts: no answer is longer than {BLOCK} tokens")

    @cached_property
    def scale(self) -> torch.Tensor:
        first = self.files[0]
        seen = (torch.arange(first.ids.shape[1]) > 0) & (torch.arange(first.ids.shape[1]) < first.length[:, None] - 1)
        return first.features[seen].float().square().mean(0).sqrt().clamp(min=1e-3)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(int((texts.length - texts.answer).sum()) for texts in self.files)

    def shortlist(self, count: int, vocabulary: int) -> torch.Tensor:
        seen = torch.zeros(vocabulary, dtype=torch.int64)
        for texts in self.files:
            place = torch.arange(texts.ids.shape[1])
            in_answer = (place >= texts.answer[:, None]) & (place < texts.length[:, None])
            seen += torch.bincount(texts.ids[in_answer].long(), minlength=vocabulary)
        # ties to the lowest id, on any machine
        return (-seen).argsort(stable=True)[:count].sort().values

    def batch(self, rows: int, *key: int) -> Batch:
        """`rows` texts, a function of `key`."""
        picked = torch.randint(0, len(self.places), (rows,), generator=seeded(*key)).tolist()
        chosen = [self.places[i] for i in picked]

        def gather(name: str) -> torch.Tensor:
            return torch.stack([getattr(self.files[f], name)[row] for f, row in chosen])

        features = gather("features")
        return Batch(
            gather("ids").long(),
            gather("answer"),
            gather("length"),
            (features / self.scale).to(features.dtype),
            features[..., -(features.shape[-1] // len(LAYERS)) :],
            gather("soft_ids").long(),
            gather("soft_logits"),
        )
