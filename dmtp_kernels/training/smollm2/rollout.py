"""The target's own answers, with what it computed on the way: a drafter's whole training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from dmtp_kernels.models.layers import Attend
from dmtp_kernels.models.target import Target
from dmtp_kernels.training.attention import attend_with_bias

LENGTH = 256
"""Tokens of a prompt and its answer together, at most."""
SOFT = 16
"""Likeliest tokens kept of the target's distribution."""
DRAWN_FROM = 64
"""Likeliest tokens that an answer is drawn from."""


@dataclass(frozen=True)
class Rollouts:
    """N texts, padded on the right.

    `ids[N, LENGTH]` int32; the answer of text i is tokens `answer[i]` to `length[i] - 1`. Row p of
    `features[N, LENGTH, n*H]` is what the target's layers computed at token p; rows of the last token and behind it are
    zero. `soft_ids[N, LENGTH, SOFT]` int32 and `soft_logits` are the target's likeliest successors of token p, for
    every p whose successor is part of the answer.
    """

    ids: torch.Tensor
    answer: torch.Tensor
    length: torch.Tensor
    features: torch.Tensor
    soft_ids: torch.Tensor
    soft_logits: torch.Tensor


@torch.no_grad()
def roll_out(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    layers: tuple[int, ...],
    temperature: torch.Tensor,
    generator: torch.Generator,
    length: int = LENGTH,
) -> Rollouts:
    """Answer every prompt, in one batch, with up to `length` tokens in all; an answer stops after `end`.

    Args:
        target: decodes in the dtype of its weights.
        prompts: token ids, each shorter than `length`.
        end: the token that ends an answer.
        layers: whose outputs are kept.
        temperature: `[N]`, 0 is greedy.
        generator: of the draws.
    """
    count, width = len(prompts), target.config.layer.hidden_size
    start = torch.tensor([len(p) for p in prompts])
    longest = int(start.max())
    dtype = target.embed_tokens.weight.dtype
    ids = torch.full((count, length), end, dtype=torch.int32)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    features = torch.zeros(count, length, len(layers) * width, dtype=dtype)
    soft_ids = torch.zeros(count, length, SOFT, dtype=torch.int32)
    soft_logits = torch.zeros(count, length, SOFT)
    last = start.clone()  # tokens so far
    cache = _Cache(target, count, longest + length - int(start.min()))

    pad = longest - start
    tokens = torch.full((count, longest), end)
    for i, prompt in enumerate(prompts):
        tokens[i, pad[i] :] = torch.tensor(prompt)
    out = target(tokens, (torch.arange(longest) - pad[:, None]).clamp(min=0), cache.prefill(pad, longest), layers)
    for i, prompt in enumerate(prompts):
        features[i, : len(prompt)] = out.features[i, pad[i] :]
    hidden = out.hidden[:, -1]
    text = torch.arange(count)  # of each row
    on = torch.ones(count, dtype=torch.bool)
    while True:
        logits, best = target.logits(hidden).float().topk(DRAWN_FROM, dim=1)
        token = best.gather(1, _draw(logits, temperature[text], generator)[:, None])[:, 0]
        going = text[on]
        soft_ids[going, last[going] - 1] = best[on, :SOFT].int()
        soft_logits[going, last[going] - 1] = logits[on, :SOFT]
        ids[going, last[going]] = token[on].int()
        last[going] += 1
        on &= (token != end) & (last[text] < length)
        if not on.any():
            return Rollouts(ids, start, last, features, soft_ids, soft_logits)
        if on.float().mean() < 0.75:
            cache.keep(on)
            text, token, on = text[on], token[on], on[on]
        place = last[text] - 1
        # a row that has ended runs on, unread, until it is dropped
        out = target(token[:, None], place[:, None], cache.step(), layers)
        features[text[on], place[on]] = out.features[on, 0]
        hidden = out.hidden[:, 0]


def _draw(logits: torch.Tensor, temperature: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Index `[B]` of a draw from `logits[B, n]`, sorted from the likeliest, at `temperature[B]`."""
    weights = (logits / temperature.clamp(min=1e-3)[:, None]).softmax(dim=1)
    drawn = torch.multinomial(weights, 1, generator=generator)[:, 0]
    return torch.where(temperature > 0, drawn, 0)


class _Cache:
    """Keys and values `[B, Hkv, size, D]` of every layer; all rows are equally long, padded on the left."""

    def __init__(self, target: Target, rows: int, size: int) -> None:
        layer, dtype = target.config.layer, target.embed_tokens.weight.dtype
        shape = (target.config.num_layers, 2, rows, layer.num_kv_heads, size, layer.head_dim)
        self.rows = torch.zeros(shape, dtype=dtype)
        self.bias = torch.zeros(rows, 1, size, dtype=dtype)
        self.past = 0

    def prefill(self, pad: torch.Tensor, count: int) -> Attend:
        """Store and attend to the first `count` rows, of which `pad[B]` are padding."""
        place = torch.arange(self.bias.shape[2])
        self.bias.masked_fill_((place < pad[:, None])[:, None], float("-inf"))
        ahead = place[:count] > place[:count, None]
        bias = self.bias[..., :count].masked_fill(ahead, float("-inf"))
        # a padded row sees itself, so that nothing is NaN
        bias = bias.masked_fill(torch.eye(count, dtype=torch.bool), 0.0)
        self.past = count

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.rows[layer, 0, :, :, :count] = k.transpose(1, 2)
            self.rows[layer, 1, :, :, :count] = v.transpose(1, 2)
            return attend_with_bias(q, k, v, bias)

        return attend

    def step(self) -> Attend:
        """Store and attend to one more row."""
        at, self.past = self.past, self.past + 1
        stop = self.past

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.rows[layer, :, :, :, :stop]
            keys[:, :, at], values[:, :, at] = k[:, 0], v[:, 0]
            out = functional.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=self.bias[:, None, :, :stop], enable_gqa=True
            )
            return out.transpose(1, 2)

        return attend

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the rows whose flag is false."""
        self.rows, self.bias = self.rows[:, :, rows], self.bias[rows]
