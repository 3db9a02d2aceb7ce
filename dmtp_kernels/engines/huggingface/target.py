"""A causal language model of transformers as the target of the decode loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dmtp_kernels.models.config import LayerConfig, TargetConfig
from dmtp_kernels.models.layers import Attend
from dmtp_kernels.models.target import Target, TargetOutput

_UNBOUNDED = 1 << 20
"""Positions of a model that names no limit."""

_UNREAD = {"intermediate_size": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2}
"""Sizes of layers that nobody here runs or caches."""


class UnsupportedModel(ValueError):
    """A model that cannot be a target; one line says why."""


@dataclass(eq=False)
class RowCache:
    """A request's keys and values, as the model keeps them: `length` rows."""

    cache: Any
    length: int = 0


class TransformersTarget(Target):
    """Runs the model itself, unchanged, over rows that its own cache has; `caches` are those of the rows of a pass.

    A pass begins at a position: what a cache holds from there on belonged to rejected candidates and is cropped. The
    model is neither moved nor changed; it must be in eval mode.

    Raises:
        UnsupportedModel: a hidden state, a layer or the head cannot be found, logits are not the head's, or the cache
            cannot be cropped.
    """

    keeps_rows = True
    model: Any
    blocks: list[nn.Module]
    softcap: float | None
    scale: float

    def __init__(self, model: Any) -> None:
        nn.Module.__init__(self)
        # not registered: nothing that is done to this module's parameters is done to the model
        self.__dict__["model"] = model
        if model.training:
            raise self._refusal("is in training mode, must be in eval mode (model.eval())")
        if getattr(model.config, "is_encoder_decoder", False):
            raise self._refusal("has an encoder, must be a causal language model")
        text = model.config.get_text_config(decoder=True)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear) or head.bias is not None:
            raise self._refusal("has no embedding and linear head without bias")
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.weight.detach(), freeze=True)
        self.lm_head = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
        self.blocks = self._layers(text.num_hidden_layers)
        self.softcap = getattr(text, "final_logit_softcapping", None)
        self.scale = getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1)
        self.config = TargetConfig(
            # no rows are kept for it, so that only the width is ever read
            LayerConfig(
                hidden_size=embedding.embedding_dim, intermediate_size=1, num_heads=1, num_kv_heads=1, head_dim=2
            ),
            num_layers=text.num_hidden_layers,
            vocab_size=embedding.num_embeddings,
            num_valid=min(head.out_features, embedding.num_embeddings),
            max_positions=getattr(text, "max_position_embeddings", None) or _UNBOUNDED,
            tie_embeddings=False,
        )
        self.caches: list[RowCache] = []
        self._probe()

    def new_cache(self) -> RowCache:
        """An empty cache of one request, which can be cropped."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        record = getattr(cache, "activate_past_recording", None)
        if record is not None:
            record()
        elif any(cache.is_sliding):
            raise UnsupportedModel(
                f"model: {type(self.model).__name__} has sliding layers, whose cache cannot be cropped"
            )
        return RowCache(cache)

    @torch.no_grad()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run `ids[B, T]` at `positions[B, T]`, row b on `caches[b]`; `attend` is not asked.

        Reads the rows' first positions from the device.
        """
        starts = positions[:, 0].tolist()
        passes = [
            self._pass(row, ids[b : b + 1], start, feature_layers)
            for b, (row, start) in enumerate(zip(self.caches, starts, strict=True))
        ]
        return TargetOutput(*(torch.cat(parts) for parts in zip(*passes, strict=True)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., num_valid]` logits, as the model computes them from its last hidden state."""
        logits = super().logits(hidden) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _pass(
        self, row: RowCache, ids: torch.Tensor, start: int, feature_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if row.length < start:
            raise RuntimeError(f"caches: a row of {row.length} positions is to go on at {start}")
        if row.length:
            row.cache.crop(start - row.length)
        with _outputs_of(self.blocks, feature_layers) as kept:
            hidden = self.model.base_model(input_ids=ids, past_key_values=row.cache, use_cache=True).last_hidden_state
        row.length = start + ids.shape[1]
        features = [kept[i] for i in feature_layers]
        return hidden, torch.cat(features, dim=-1) if features else hidden.new_empty((*hidden.shape[:-1], 0))

    @torch.no_grad()
    def _probe(self) -> None:
        """One forward, cropped and repeated: is everything there, and does a cropped cache give the same again?"""
        ids = torch.arange(3, device=self.embed_tokens.weight.device)[None] % self.config.num_valid
        row = self.new_cache()
        last = (self.config.num_layers - 1,)
        try:
            wanted = self.model(input_ids=ids, use_cache=False).logits
            hidden, features = self._pass(row, ids, 0, last)
            again, _ = self._pass(row, ids[:, 1:], 1, last)
        except (AttributeError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
            raise self._refusal(f"cannot be run, cropped and run again ({error})") from error
        if not hidden.shape == features.shape == (1, 3, self.config.layer.hidden_size):
            raise self._refusal(f"has hidden states of shape {list(hidden.shape)} and {list(features.shape)}")
        if not _close(self.logits(hidden), wanted[..., : self.config.num_valid]):
            raise self._refusal("computes its logits from more than its last hidden state and its head")
        if not _close(again, hidden[:, 1:]):
            raise self._refusal("has a cache that cannot be cropped: it remembers what was removed")

    def _layers(self, count: int) -> list[nn.Module]:
        for module in self.model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
        raise self._refusal(f"has no list of its {count} layers, whose outputs are needed")

    def _refusal(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"model: {type(self.model).__name__} {why}")


@contextmanager
def _outputs_of(layers: list[nn.Module], indices: tuple[int, ...]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the outputs of some layers while the model runs; unlike `output_hidden_states`, the last one's too."""
    kept: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kept[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(keep(i)) for i in indices]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to what another order of sums changes in their dtype."""
    size = b.abs().max().clamp(min=1e-3)
    return a.shape == b.shape and bool((a - b).abs().max() <= 64 * torch.finfo(b.dtype).eps * size)
