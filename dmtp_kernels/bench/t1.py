"""`dmtp bench t1`: T1 preparation, fused with each head format, against the eager chain it replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dmtp_kernels.bench.measure import compare, compiled, report
from dmtp_kernels.bench.progress import Report, silent
from dmtp_kernels.ops._spec import nbytes
from dmtp_kernels.ops.lm_head import LMHead, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep

FORMATS = {"dense": "dense", "int8": "int8", "int4": "int4_g32", "low_rank": "low_rank"}
ENTRIES = (*FORMATS, "eager", "compiled")
MASKS = 6
_OP = "fused_t1_prep"
_EPS = 1e-6
_CHUNK = 1 << 13


@dataclass(frozen=True)
class Shape:
    """Sizes of one stage: B requests, V vocabulary rows of this rank, hidden width H (E = H), rank of the factors."""

    B: int
    V: int
    H: int
    rank: int = 256


class Stage:
    """The weights of one T1 stage, shared by all entries and batch sizes."""

    def __init__(self, vocab: int, hidden: int, rank: int, device: torch.device, formats: Sequence[str], seed: int = 0):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.rank = device, rank
        self.weight = self._random(vocab, hidden, std=hidden**-0.5)
        self.embedding = self._random(vocab, hidden, std=1.0)
        self.projection = self._random(hidden, 2 * hidden, std=hidden**-0.5)
        self.norm_e, self.norm_m = self._random(hidden, std=0.1) + 1, self._random(hidden, std=0.1) + 1
        self.fusion = Fusion.residual(self.projection, norm_m=self.norm_m, norm_e=self.norm_e, eps_e=_EPS, eps_m=_EPS)
        self.heads = {name: self._head(name) for name in formats}

    def _random(self, *shape: int, std: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=std, generator=self.generator)

    def _head(self, name: str) -> LMHead:
        if name == "low_rank":
            down = self._random(self.rank, self.weight.shape[1], std=self.weight.shape[1] ** -0.5)
            up = torch.cat([part @ down.T for part in self.weight.split(_CHUNK)])
            return pack_lm_head(
                self.weight, format="low_rank", factors=(down, up), up_format="int8", fallback="none", capacity=512
            )
        # uncertified formats answer from their shortlist: with a full scan they would be the dense head and more
        fallback = "none" if name == "int4" else "full"
        return pack_lm_head(self.weight, format=FORMATS[name], fallback=fallback)

    def inputs(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchors and MTP hidden states."""
        vocab = self.weight.shape[0]
        anchors = torch.randint(vocab, (batch,), generator=self.generator, device=self.device)
        return anchors, self._random(batch, self.weight.shape[1], std=1.0)

    def eager(self, anchors: torch.Tensor, hidden: torch.Tensor, mask_id: int) -> tuple[torch.Tensor, ...]:
        """The chain as an engine writes it: logits, argmax, gathers, two norms, projection, block."""
        t1 = (hidden @ self.weight.T).argmax(dim=-1)
        token = self.embedding[t1]
        width = hidden.shape[1]
        e, h = F.rms_norm(token, (width,), self.norm_e, _EPS), F.rms_norm(hidden, (width,), self.norm_m, _EPS)
        fused = token + F.linear(torch.cat((e, h), dim=-1), self.projection)
        masks = self.embedding[mask_id].expand(anchors.shape[0], MASKS, width)
        block = torch.cat((self.embedding[anchors][:, None], fused[:, None], masks), dim=1)
        ids = torch.cat((anchors[:, None], t1[:, None], anchors.new_full((anchors.shape[0], MASKS), mask_id)), dim=1)
        return t1, ids, block

    def bytes_of(self, entry: str, batch: int) -> int:
        """What a perfect kernel moves for this entry: the screen (or the rows), the projection, the gathered rows."""
        head = self.heads.get(entry)
        if head is None or entry == "dense":
            stream = nbytes(self.weight)
        else:
            stream = nbytes(head.codes, head.scale, head.down, head.up)
        stream += 0 if head is None else nbytes(head.bound)
        row = nbytes(self.embedding[:1])
        fixed = nbytes(self.projection, self.norm_e, self.norm_m)
        return stream + fixed + batch * (2 * row + row + (2 + MASKS) * row)


def bench_t1(
    batches: Sequence[int] = (1, 8),
    vocab: int = 248_320,
    hidden: int = 2048,
    rank: int = 256,
    entries: Sequence[str] = ENTRIES,
    rounds: int = 15,
    device: torch.device | None = None,
    say: Report = silent,
) -> dict[str, Any]:
    """Time T1 preparation by entry and batch size.

    Args:
        batches, vocab, hidden, rank: sizes; weights are bf16, vocab x hidden twice (head and embedding table).
        entries: among `ENTRIES`; `eager` is always run, as the yardstick.
        rounds: timed rounds, interleaved over the entries.
        device: default CPU.
        say: told what is being done.

    Returns:
        As `measure.report`, and `skipped`: entry -> why it was not measured.

    Raises:
        ValueError: an unknown entry, or a size below 1.
    """
    unknown = [e for e in entries if e not in ENTRIES]
    if unknown:
        raise ValueError(f"entries: has {unknown[0]!r}, must be among {', '.join(ENTRIES)}")
    for name, value in (("vocab", vocab), ("hidden", hidden), ("rank", rank), ("batch", min(batches, default=0))):
        if value < 1:
            raise ValueError(f"{name}: is {value}, must be at least 1")
    device = device or torch.device("cpu")
    stage = Stage(vocab, hidden, rank, device, [e for e in entries if e in FORMATS])
    skipped: dict[str, str] = {}

    def group(batch: int) -> tuple[list[dict[str, Any]], float]:
        shape = {"B": batch, "V": vocab, "H": hidden, "E": hidden, "r": rank}
        entry_runs = runs(stage, batch, [*dict.fromkeys((*entries, "eager"))], skipped)
        return compare(_OP, shape, entry_runs, lambda entry: stage.bytes_of(entry, batch), rounds, device, say)

    return {**report(_OP, map(group, batches), rounds, device), "skipped": skipped}


def runs(stage: Stage, batch: int, entries: Sequence[str], skipped: dict[str, str]) -> dict[str, Callable[[], object]]:
    """What each entry runs at one batch size; an entry that cannot be built is named in `skipped` with the reason."""
    anchors, hidden = stage.inputs(batch)
    mask_id = stage.weight.shape[0] - 1

    def fused(head: LMHead) -> Callable[[], object]:
        return lambda: fused_t1_prep(anchors, hidden, head, stage.embedding, stage.fusion, mask_id=mask_id)

    found: dict[str, Callable[[], object]] = {}
    for entry in entries:
        if entry in FORMATS:
            found[entry] = fused(stage.heads[entry])
        elif entry == "eager":
            found[entry] = lambda: stage.eager(anchors, hidden, mask_id)
        else:
            built, reason = compiled(functools.partial(stage.eager, anchors, hidden, mask_id))
            if built is None:
                skipped[entry] = str(reason)
            else:
                found[entry] = built
    return found
