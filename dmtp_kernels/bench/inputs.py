"""Inputs of the ops at the sizes of the source's 35B model, on any device."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from dmtp_kernels.ops.lm_head import LMHead, pack_lm_head
from dmtp_kernels.ops.t1_prep.fusion import Fusion

HIDDEN, VOCABULARY, ROWS = 2048, 248_320, 8
HISTORY, WINDOW, PAGE = 8192, 4096, 16
MASKS, SHORTLIST = 6, 512
MTP_HEADS, MTP_DIM = (16, 2), 256
DRAFTER_HEADS, DRAFTER_DIM = (32, 8), 128
CACHES = ((10, MTP_HEADS[1], MTP_DIM), (5, DRAFTER_HEADS[1], DRAFTER_DIM), (1, MTP_HEADS[1], MTP_DIM))
"""Layers, KV heads and head dimension of the target's attention layers, of the drafter and of MTP."""
_PAGES = 4096  # of a request's table where a round moves on: thousands of rounds fit


class Inputs:
    """One method per op: `method(batch, ...)` gives its inputs in schema order, random, every request live."""

    def __init__(self, device: torch.device, scale: int = 1) -> None:
        self.device = device
        self.vocab, self.history, self.window = VOCABULARY // scale, HISTORY // scale, WINDOW // scale
        self.generator = torch.Generator(device).manual_seed(0)

    @staticmethod
    def shape(op: str, batch: int, scale: int, **options: Any) -> dict[str, int]:
        """The sizes of a case by name."""
        vocab, history, window = VOCABULARY // scale, HISTORY // scale, WINDOW // scale
        if op in ("fused_t1_prep", "lm_head_select", "lm_head_screen"):
            return {"B": batch, "V": vocab, "H": HIDDEN}
        if op == "lm_head_rescore":
            return {"B": batch, "V": vocab, "H": HIDDEN, "N": SHORTLIST}
        if op == "block_attention":
            heads, dim = (DRAFTER_HEADS, DRAFTER_DIM) if options["drafter"] else (MTP_HEADS, MTP_DIM)
            sizes = {"B": batch, "S": ROWS, "Hq": heads[0], "Hkv": heads[1], "D": dim, "history": history}
            return sizes | ({"window": window} if options["drafter"] else {})
        if op in ("sample_rows", "accept_rejection", "accept_block"):
            return {"B": batch, "R": ROWS, "V": vocab}
        if op.startswith("draft_page_table"):
            return {"B": batch, "history": history, "window": window, "P": PAGE}
        if op == "commit_kv":
            return {"B": batch, "R": ROWS, "L": 1, "Hkv": MTP_HEADS[1], "D": MTP_DIM, "H": HIDDEN}
        if op == "commit_round":
            return {"B": batch, "R": ROWS, "caches": len(CACHES), "L": sum(c[0] for c in CACHES), "H": HIDDEN}
        return {"B": batch, "R": ROWS}

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=std, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def shuffled(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)

    def full(self, value: float, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    @cached_property
    def weight(self) -> torch.Tensor:
        """The head's rows, which are the embedding table too `[V, H]`."""
        return self.normal(self.vocab, HIDDEN, std=HIDDEN**-0.5)

    @cached_property
    def int8(self) -> LMHead:
        return pack_lm_head(self.weight)

    @cached_property
    def dense(self) -> LMHead:
        return pack_lm_head(self.weight, format="dense")

    @cached_property
    def fusion(self) -> Fusion:
        norm_e, norm_m = (self.normal(HIDDEN, std=0.1) + 1 for _ in range(2))
        projection = self.normal(HIDDEN, 2 * HIDDEN, std=HIDDEN**-0.5)
        return Fusion.residual(projection, norm_m=norm_m, norm_e=norm_e, eps_e=1e-6, eps_m=1e-6)

    def fused_t1_prep(self, batch: int) -> tuple[Any, ...]:
        anchors, hidden = self.integers(0, self.vocab, batch), self.normal(batch, HIDDEN)
        head, fusion = self.int8.args(), self.fusion.args()
        own = (anchors, hidden, self.weight, None, None, None, None)
        scalars = (2, self.vocab - 1, MASKS, 1.0, 0, self.vocab, "float32")
        return (*own, *head[:7], *fusion[:5], *head[7:], *fusion[5:], *scalars)

    def lm_head_select(self, batch: int, format: str) -> tuple[Any, ...]:
        head = self.int8 if format == "int8" else self.dense
        return (self.normal(batch, HIDDEN), *head.args(), 1, "float32")

    def lm_head_screen(self, batch: int) -> tuple[Any, ...]:
        return (self.normal(batch, HIDDEN), *self.int8.args(), 1)

    def lm_head_rescore(self, batch: int) -> tuple[Any, ...]:
        ids = torch.stack([self.shuffled(self.vocab)[:SHORTLIST] for _ in range(batch)])
        count = self.full(SHORTLIST, batch)
        return self.normal(batch, HIDDEN), self.weight, ids, count, 1, 0, self.vocab, "float32"

    def block_attention(self, batch: int, drafter: bool) -> tuple[Any, ...]:
        """A full history in shuffled pages and a dense block: causal over all of it, or a window both ways."""
        (q_heads, kv_heads), dim = (DRAFTER_HEADS, DRAFTER_DIM) if drafter else (MTP_HEADS, MTP_DIM)
        pages = self.history // PAGE
        caches = [self.normal(batch * pages, PAGE, kv_heads, dim) for _ in range(2)]
        block = [self.normal(batch, ROWS, kv_heads, dim) for _ in range(2)]
        table = self.shuffled(batch * pages).view(batch, pages).to(torch.int32)
        ctx_len = self.full(self.history, batch, dtype=torch.int32)
        window = self.window if drafter else None
        rules = (None, window, "anchor", not drafter, None, None, None, None, None, None)
        return (self.normal(batch, ROWS, q_heads, dim), *caches, table, ctx_len, *block, *rules)

    def draft_page_table(self, batch: int) -> tuple[Any, ...]:
        pages = self.history // PAGE
        table = self.shuffled(batch * pages).view(batch, pages).to(torch.int32)
        return table, self._anchors(batch), self.window, PAGE, ROWS, None, None

    def draft_page_table_from_slots(self, batch: int) -> tuple[Any, ...]:
        pages = self.history // PAGE
        page = self.shuffled(batch * pages).view(batch, pages, 1)
        slots = (page * PAGE + torch.arange(PAGE, device=self.device)).flatten(1).to(torch.int32)
        rows = torch.arange(batch, dtype=torch.int32, device=self.device)
        return slots, self._anchors(batch), self.window, PAGE, rows, ROWS, None, None

    def _anchors(self, batch: int) -> torch.Tensor:
        """Histories that leave room for the block and start their window in mid-page."""
        return self.full(self.history - ROWS, batch, dtype=torch.int32)

    def sample_rows(self, batch: int) -> tuple[Any, ...]:
        rows = ROWS * batch
        logits = self.normal(rows, self.vocab, std=2.0, dtype=torch.float32)
        temperature = self.full(1.0, rows, dtype=torch.float32)
        return logits, temperature, self.integers(0, 1 << 31, rows), self.integers(0, 1 << 20, rows), *(None,) * 3, 0

    def accept_prefix(self, batch: int) -> tuple[Any, ...]:
        candidates, target = (self.integers(0, 2, batch, ROWS) for _ in range(2))
        return candidates, target, self._stop_ids(batch), self.full(1000, batch), None

    def accept_rejection(self, batch: int) -> tuple[Any, ...]:
        """A draft that drew from its own dense distributions, close to the target's."""
        logits = self.normal(batch, ROWS, self.vocab, std=2.0, dtype=torch.float32)
        noise = self.normal(batch, ROWS - 1, self.vocab, dtype=torch.float32)
        draft = torch.softmax(noise.add_(logits[:, :-1]), dim=2)
        race = torch.empty_like(draft).exponential_(generator=self.generator)
        drawn = race.reciprocal_().mul_(draft).argmax(dim=2)
        candidates = torch.cat((self.integers(0, self.vocab, batch, 1), drawn), dim=1)
        temperature = self.full(1.0, batch, dtype=torch.float32)
        keys = self.integers(0, 1 << 31, batch), self.integers(0, 1 << 20, batch)
        given = (self._stop_ids(batch), self.full(1000, batch), draft)
        return (candidates, logits, temperature, *keys, *given, *(None,) * 4)

    def accept_block(self, batch: int) -> tuple[Any, ...]:
        return self.accept_rejection(batch)

    def _stop_ids(self, batch: int) -> torch.Tensor:
        return self.full(self.vocab - 1, batch, 2)

    def _cache(self, batch: int, layers: int, heads: int, dim: int) -> tuple[Any, ...]:
        """Rows of K and V, their caches, and all slots of each request `[B, 18]`."""
        used = 2 * ROWS + 2
        pages = -(-used * batch // PAGE) + 1
        rows = [[self.normal(batch, ROWS, heads, dim) for _ in range(layers)] for _ in range(2)]
        caches = [[self.normal(pages, PAGE, heads, dim) for _ in range(layers)] for _ in range(2)]
        return (*rows, *caches, self.shuffled(used * batch).view(batch, used))

    def _mtp_state(self, batch: int, slots: torch.Tensor) -> tuple[Any, ...]:
        """Pending slot, where it is promoted to, scratch, hidden, next hidden, lengths, live."""
        parts = (slots[:, -1].contiguous(), slots[:, -2].contiguous(), slots[:, ROWS : 2 * ROWS].contiguous())
        return (*parts, self.normal(batch, ROWS, HIDDEN), self.normal(batch, HIDDEN), self.full(0, batch), None)

    def commit_kv(self, batch: int) -> tuple[Any, ...]:
        """The MTP state's: one layer, pending slot, scratch and the predictor's hidden."""
        *cache, slots = self._cache(batch, 1, MTP_HEADS[1], MTP_DIM)
        count, dst = self.integers(1, ROWS + 1, batch), slots[:, :ROWS].contiguous()
        return (*cache, count, dst, *self._mtp_state(batch, slots), 0, None, None, None, 1e-6, 0.0, None, None)

    def commit_round(self, batch: int) -> tuple[Any, ...]:
        """The target's cache, the drafter's and MTP's in one call."""
        made = [self._cache(batch, *sizes) for sizes in CACHES]
        lists = [[tensor for cache in made for tensor in cache[i]] for i in range(4)]
        count, dst = self.integers(1, ROWS + 1, batch), [cache[4][:, :ROWS].contiguous() for cache in made]
        layers = [sizes[0] for sizes in CACHES]
        return (*lists, count, dst, layers, *self._mtp_state(batch, made[-1][4]), [0], None, None)

    def advance_round(self, batch: int) -> tuple[Any, ...]:
        """Three tables, nothing granted, a block of ids; every request commits."""
        tables = [self.integers(1, 9999, batch, _PAGES, dtype=torch.int32) for _ in range(3)]
        position, left = self.full(self.history, batch), self.full(1 << 40, batch)
        state = (position, self.integers(0, self.vocab, batch), left, self.full(0, batch, dtype=torch.int32))
        commits = (self.integers(1, ROWS + 1, batch, dtype=torch.int32), self.integers(0, self.vocab, batch))
        grants = self.full(-1, batch, 6, 3, dtype=torch.int32)
        ended = self.full(0, batch, dtype=torch.int32)
        return (*state, *commits, ended, tables, [PAGE] * 3, ROWS, grants, ROWS, self.vocab - 1, 1)
