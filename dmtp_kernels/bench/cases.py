"""Inputs of every op at serving size, with the bytes its own spec says a perfect kernel moves.

Sizes are those of the source's 35B model on one device: hidden 2,048, vocabulary 248,320, a round of eight rows, an MTP
layer of 16 query and 2 KV heads of 256, a drafter of 32 and 8 heads of 128 over a window of 4,096 rows of a history of
8,192. `scale` divides the vocabulary, the history and the window by one factor.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from dmtp_kernels import _library, backends, ops
from dmtp_kernels.bench.chains import CHAINS
from dmtp_kernels.bench.inputs import WINDOW, Inputs
from dmtp_kernels.ops._spec import Spec

BATCHES = (1, 8)
CHARACTERS = ("memory", "compute", "dispatch")


@dataclass(frozen=True)
class BenchCase:
    """One op at one size.

    Attributes:
        op, name: what `dmtp bench ops` calls it.
        shape: sizes by their name in the op's README.
        character: what bounds it here, one of `CHARACTERS`: the control that its times are compared with.
        make: its inputs in schema order, new at every call except for the weights, of the same values.
    """

    op: str
    name: str
    shape: dict[str, int]
    character: str
    make: Callable[[], tuple[Any, ...]]

    def load(self) -> Problem:
        """Make the inputs."""
        return Problem(self, self.make())


class Problem:
    """The inputs of a case, the output buffers of its op, and what can run on them.

    `inputs` are in schema order, `outputs` as the op's `_out` form takes them. An op that writes into its inputs goes
    on from what it wrote; `reset` puts back what they held at first.
    """

    def __init__(self, case: BenchCase, inputs: tuple[Any, ...]) -> None:
        self.case, self.inputs = case, inputs
        self.op = _library._OPS[case.op]
        self.spec = specs()[case.op]
        arguments = self.op.functional._schema.arguments
        self._names = [a.name for a in arguments]
        self._positional = sum(not a.kwarg_only for a in arguments)
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self._mutated = [t for value, w in zip(inputs, written, strict=True) if w for t in tensors_in(value)]
        self._held = [t.clone() for t in self._mutated]
        self.device = tensors_in(inputs)[0].device
        self.floor_bytes = self.spec.floor_bytes(*inputs)
        self.flops = self.spec.flops(*inputs)
        found = self.op.functional(*inputs[: self._positional], **self._keywords())
        self.outputs = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        self.reset()

    def _keywords(self) -> dict[str, Any]:
        return dict(zip(self._names[self._positional :], self.inputs[self._positional :], strict=True))

    @property
    def backend(self) -> str:
        """Name of the backend that runs the op."""
        return backends.choose(self.case.op, self.device)

    @property
    def eager_is(self) -> str:
        """`chain`: what an engine writes, of `bench.chains`; `reference`: the op's own definition."""
        return "chain" if self.case.op in CHAINS else "reference"

    def fused(self) -> Callable[[], object]:
        """A call of the op in its `_out` form, by the backend that runs."""
        labels = [a.name for a in self.op.out._schema.arguments if a.name not in set(self._names)]
        buffers = dict(zip(labels, self.outputs, strict=True))
        return partial(self.op.out, *self.inputs[: self._positional], **self._keywords(), **buffers)

    def eager(self) -> Callable[[], object]:
        """The same step in eager PyTorch, without the dispatcher."""
        chain = CHAINS.get(self.case.op)
        return self.reference() if chain is None else partial(chain, *self.inputs)

    def reference(self) -> Callable[[], object]:
        """The op's definition, which writes the same outputs."""
        return partial(self.definition(), *self.inputs, *self.outputs)

    def definition(self) -> Callable[..., None]:
        """The op's reference: all inputs, then the outputs."""
        with backends.use_backend("reference", self.case.op):
            return backends.implementation(self.case.op, self.device)

    def reset(self) -> None:
        """Put back what the op's calls wrote into its inputs."""
        for tensor, held in zip(self._mutated, self._held, strict=True):
            tensor.copy_(held)

    @property
    def mutated(self) -> list[torch.Tensor]:
        """Inputs that the op writes into."""
        return list(self._mutated)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a value, of a list, or of a tuple of such."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


@cache
def specs() -> dict[str, Spec]:
    """The spec of every op."""
    families = [m.name for m in pkgutil.iter_modules(ops.__path__) if m.ispkg]
    found = [s for f in families for s in importlib.import_module(f"dmtp_kernels.ops.{f}.spec").SPECS]
    return {spec.op: spec for spec in found}


@dataclass
class Suite:
    """Cases that share one set of weights."""

    device: torch.device
    scale: int = 1

    def __post_init__(self) -> None:
        # more would leave no window
        if not 1 <= self.scale <= WINDOW:
            raise ValueError(f"scale: is {self.scale}, must be between 1 and {WINDOW:,}")

    @cached_property
    def inputs(self) -> Inputs:
        return Inputs(self.device, self.scale)

    def cases(self, names: Sequence[str] | None = None) -> Iterator[BenchCase]:
        """All cases, or those of the ops named.

        Raises:
            ValueError: a name that is no op's.
        """
        known = _library.registered()
        unknown = [n for n in names or () if n not in known]
        if unknown:
            raise ValueError(f"op: is {unknown[0]!r}, must be among {', '.join(known)}")
        for op, (character, kinds) in KINDS.items():
            if op not in known or op not in (names or known):
                continue
            for name, options in kinds.items():
                for batch in BATCHES:
                    # the inputs, and with them the weights, are made when a case is loaded
                    make = partial(self._make, op, batch, options)
                    shape = Inputs.shape(op, batch, self.scale, **options)
                    yield BenchCase(op, f"{name}b{batch}", shape, character, make)

    def _make(self, op: str, batch: int, options: dict[str, Any]) -> tuple[Any, ...]:
        # the same values whichever cases were made before
        self.inputs.generator.manual_seed(zlib.crc32(f"{op} {batch} {options}".encode()))
        made: tuple[Any, ...] = getattr(self.inputs, op)(batch, **options)
        return made


_PLAIN: dict[str, dict[str, Any]] = {"": {}}
KINDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "fused_t1_prep": ("memory", _PLAIN),
    "lm_head_select": ("memory", {"int8_": {"format": "int8"}, "dense_": {"format": "dense"}}),
    "lm_head_screen": ("memory", _PLAIN),
    "lm_head_rescore": ("memory", _PLAIN),
    "block_attention": ("compute", {"mtp_": {"drafter": False}, "drafter_": {"drafter": True}}),
    "draft_page_table": ("dispatch", _PLAIN),
    "draft_page_table_from_slots": ("dispatch", _PLAIN),
    "sample_rows": ("compute", _PLAIN),
    "accept_prefix": ("dispatch", _PLAIN),
    "accept_rejection": ("compute", _PLAIN),
    "accept_block": ("compute", _PLAIN),
    "commit_round": ("dispatch", _PLAIN),
    "commit_kv": ("dispatch", _PLAIN),
    "advance_round": ("dispatch", _PLAIN),
}
"""Op -> its character, and the options of `Inputs.<op>` by the first part of the case's name; the T1 stage first."""
