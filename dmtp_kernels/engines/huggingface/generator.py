"""`DMTPGenerator`: the decode loop with a model of transformers as its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Completion, Event, Request
from dmtp_kernels.decode.round import RoundResult, decode_round
from dmtp_kernels.decode.seating import Seat
from dmtp_kernels.decode.stack import MAX_ROWS, Stack, get_method
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.engines.huggingface.target import RowCache, TransformersTarget
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.formats import check_fit, read_drafts
from dmtp_kernels.ops._checks import INDEX_DTYPES, check_tensor

_NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
}
"""Settings of a `generation_config` that change the text, and the values at which they do not."""

_NEUTRAL_DRAWS = {"min_p": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
"""Those that change sampled text alone and that `generate` has no argument for."""


class Generated(NamedTuple):
    """`sequences[B, n + longest]` as `model.generate` returns them, and what the loop knows of every row: tokens,
    accepted candidates per round, why it ended."""

    sequences: torch.Tensor
    completions: list[Completion]


class DMTPGenerator:
    """Generates with a model's own forward passes, drafted by an MTP module and a DFlash drafter.

    Output is the model's: greedy text equals `model.generate(do_sample=False)` up to ties within float rounding (a
    verification has 8 rows, a plain step one), sampled text has its distribution.

    Args:
        model: a causal language model of transformers in eval mode; it is used as it is.
        drafts: MTP module, drafters and fusions in the model's dtype on its device; its own target is not used.
        method: which drafter (default: the only one there is, of several `dmtp`).
        options: of `Engine`: `max_batch`, `max_tokens` (longest prompt and output; 1024 or what the model
            takes), `verification`, `mtp_steps`, `page_size`, `prefill_chunk`.

    `engine` is the loop itself, to stream, to abort and to let requests join.

    Raises:
        UnsupportedModel: the model cannot be a target.
        CheckpointError: the drafts are not made for a model of this size.
        ValueError: the drafts lack the method's parts, or an option is out of range.
    """

    def __init__(self, model: Any, drafts: Checkpoint, method: str | None = None, **options: Any) -> None:
        self._set_up(TransformersTarget(model), drafts, method, options)

    @classmethod
    def from_directories(
        cls,
        model: Any,
        drafter: str | Path,
        mtp: str | Path | None = None,
        method: str | None = None,
        *,
        block_size: int | None = None,
        **options: Any,
    ) -> DMTPGenerator:
        """With drafts from checkpoints in public formats (`models/README.md`), read in the model's dtype to its device.

        `block_size` runs a drafter in blocks shorter than it was trained with.
        """
        generator, target = cls.__new__(cls), TransformersTarget(model)
        drafts = read_drafts(target, drafter, mtp, dtype=target.embed_tokens.weight.dtype, block_size=block_size)
        for part in drafts.modules().values():
            if part is not target:
                part.to(target.embed_tokens.weight.device)
        generator._set_up(target, drafts, method, options)
        return generator

    def _set_up(
        self, target: TransformersTarget, drafts: Checkpoint, method: str | None, options: dict[str, Any]
    ) -> None:
        self.target = target
        checkpoint = replace(drafts, target=target)
        check_fit(checkpoint, "drafts")
        weight = target.embed_tokens.weight
        for prefix, part in checkpoint.modules().items():
            for found in part.parameters():
                if (found.dtype, found.device) != (weight.dtype, weight.device):
                    raise ValueError(
                        f"drafts: {prefix} is {found.dtype} on {found.device}, must be as the model, "
                        f"{weight.dtype} on {weight.device}"
                    )
        if method is None:
            method = next(iter(drafts.drafters)) if len(drafts.drafters) == 1 else "dmtp"
        if get_method(method).num_candidates == 0:
            raise ValueError(f"method: is {method!r}, which drafts nothing: use model.generate")
        options.setdefault("max_tokens", min(1024, target.config.max_positions - MAX_ROWS))
        self.engine: Engine = _Engine(checkpoint, method, **options)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Generated:
        """Continue every row of `input_ids[B, n]`; where `attention_mask[B, n]` is 0 there is padding.

        `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off; row b draws with `seed` + b. These are the
        arguments given here, never those of the model's `generation_config`; `eos_token_id` defaults to its. Every
        other setting of it that would change the text is refused.

        Raises:
            ValueError, TypeError: an argument is of another kind or out of range, a row has no token, or a row is
                longer than the cache.
        """
        sizes: dict[str, int] = {}
        check_tensor("input_ids", input_ids, ["B", "n"], INDEX_DTYPES, sizes, last_contiguous=False)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        check_tensor("attention_mask", mask, ["B", "n"], (torch.bool, *INDEX_DTYPES), sizes, last_contiguous=False)
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask: holds other values than 0 and 1")
        config = self.target.model.generation_config
        for name, neutral in (_NEUTRAL | (_NEUTRAL_DRAWS if temperature > 0 else {})).items():
            value = getattr(config, name, None)
            if value is not None and value != neutral:
                raise ValueError(
                    f"generation_config.{name}: is {value!r}, must be {neutral!r}: logits are used as they are"
                )
        stops = _stops(getattr(config, "eos_token_id", None) if eos_token_id is None else eos_token_id)
        prompts = [tuple(row[keep.bool()].tolist()) for row, keep in zip(input_ids, mask, strict=True)]
        done = self.engine.run(
            Request(prompt, max_new_tokens, temperature, top_k, top_p, seed + b, stops)
            for b, prompt in enumerate(prompts)
        )
        pad = getattr(config, "pad_token_id", None)
        pad = (stops or (0,))[0] if pad is None else pad
        longest = max((len(row.tokens) for row in done), default=0)
        rows = [row.tokens + [pad] * (longest - len(row.tokens)) for row in done]
        new = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device).view(len(rows), longest)
        return Generated(torch.cat([input_ids, new], dim=1), done)


def _stops(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    given = given.tolist() if isinstance(given, torch.Tensor) else given
    try:
        return tuple(map(index, given if isinstance(given, Sequence) else (given,)))
    except TypeError:
        raise TypeError(f"eos_token_id: is {given!r}, must be a token id or several") from None


class _Engine(Engine):
    """The loop over a target that keeps its rows: it is told whose caches the rows of a pass are."""

    def __init__(self, checkpoint: Checkpoint, method: str, **options: Any) -> None:
        super().__init__(checkpoint, method, **options)
        if self.graphs is not None:
            raise ValueError("graphs: a round of a model of transformers reads lengths from the host, must be None")
        self.round_function = self._round
        self._caches: WeakKeyDictionary[Seat, RowCache] = WeakKeyDictionary()

    @property
    def _target(self) -> TransformersTarget:
        assert isinstance(self.stack.target, TransformersTarget)
        return self.stack.target

    def _round(self, stack: Stack, state: BatchState) -> RoundResult:
        self._target.caches = [self._caches[seat] for seat in self.seats]
        return decode_round(stack, state)

    def _join(self, seat: Seat, completion: Completion) -> Event | None:
        self._caches[seat] = self._target.new_cache()
        self._target.caches = [self._caches[seat]]
        return super()._join(seat, completion)
