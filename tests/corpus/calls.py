"""The corpus: what every backend of an op must make of the same calls, and digests of what the reference makes of them.

`python -m tests.corpus.calls` writes the digests again, after a contract has changed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.corpus import commits, preps, tables, verdicts
from tests.corpus.entry import Entry
from tests.cuda_host.cases import outputs_of, same, tensors
from tests.cuda_host.fence import Fenced

ENTRIES: tuple[Entry, ...] = (*tables.ENTRIES, *verdicts.ENTRIES, *commits.ENTRIES, *preps.ENTRIES)
DIGESTS = Path(__file__).with_name("digests.json")
CPU = torch.device("cpu")
PREP = "fused_t1_prep"


class Call:
    """One entry, and what the reference makes of it: every tensor of the call, since ops write into arguments too."""

    def __init__(self, entry: Entry) -> None:
        self.op = entry.op
        self.inputs = entry.inputs()
        self._call = [*self.inputs, *outputs_of(self.op, self.inputs)]
        self.wanted = self._run("reference", self._call)
        self._free = _fused_slots(PrepArgs(*self.inputs)) if self.op == PREP else None

    def batch(self) -> int:
        """Its requests."""
        return len(self.wanted[-1])

    def _run(self, backend: str, call: list[Any], at_end: bool = True) -> list[Any]:
        placed = Fenced(call, at_end)
        with use_backend(backend, self.op):
            backends.implementation(self.op, CPU)(*placed.arguments)
        placed.check()
        return list(placed.arguments)

    def digest(self) -> str:
        """Of the inputs that are drawn and of all that is pinned bit for bit."""
        taken = hashlib.sha256()
        for i, value in enumerate(self.inputs):
            # scales, bounds and folded tables are computed, the last bits of which are torch's
            if self.op != PREP or PrepArgs._fields[i] not in ("head_scale", "head_bound", "folded"):
                for t in tensors(value):
                    taken.update(f"{i} {t.dtype} {tuple(t.shape)}".encode() + _bytes(t))
        for t in self._pinned(self.wanted):
            taken.update(_bytes(t))
        return taken.hexdigest()[:16]

    def _pinned(self, call: list[Any]) -> list[torch.Tensor]:
        found = list(tensors(call))
        if self._free is not None:
            found[-2] = found[-2][~self._free]  # [.., E]
        return found

    def check(self, backend: str, at_end: bool) -> None:
        """Fail where a backend differs from the reference, in the bits of what is pinned, or by more than it may."""
        call = self._run(backend, self._call, at_end)
        for i, (got, want) in enumerate(zip(self._pinned(call), self._pinned(self.wanted), strict=True)):
            assert same(got, want), f"tensor {i} of the call: {_first_difference(got, want)}"
        if self._free is not None and self._free.any():
            got, want = call[-2][self._free], self.wanted[-2][self._free]
            assert_within_budget(got, self._truth()[self._free], want, name="block_embeds")

    @functools.cache  # noqa: B019 - calls live as long as the tests do
    def _truth(self) -> torch.Tensor:
        """Embeddings in float64, with T1 as the reference has it."""
        args = PrepArgs(*(_double(v) for v in self.inputs))
        given = {**args._asdict(), **dict.fromkeys(_HEAD), "t1_override": self.wanted[-4]}
        outputs = [_double(torch.empty_like(t)) for t in self.wanted[-4:]]
        truth: torch.Tensor = self._run("reference", [*given.values(), *outputs])[-2]
        return truth


_HEAD = tuple(name for name in PrepArgs._fields if name.startswith("head_") and name != "head_format")


def _fused_slots(args: PrepArgs) -> torch.Tensor:
    """`[B, S]`: the slots whose numbers a fusion makes."""
    fused = torch.zeros(len(args.anchor_ids), args.anchors + args.num_masks, dtype=torch.bool)
    if args.fusion_mode != "none":
        first = args.anchors if args.fusion_slots == "masks" else args.anchors - 1
        fused[:, first : None if args.fusion_slots == "masks" else args.anchors] = True
    return fused


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.clone(memory_format=torch.contiguous_format).flatten()
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    one, other = (np.frombuffer(_bytes(t), np.uint8).reshape(*t.shape, t.element_size()) for t in (got, want))
    at = tuple(np.argwhere((one != other).any(axis=-1))[0].tolist())
    return f"at {at} is {got[at].item()}, must be {want[at].item()}"


def digests() -> dict[str, str]:
    """What the file should hold."""
    return {entry.id: Call(entry).digest() for entry in ENTRIES}


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps(digests(), indent=1) + "\n")
