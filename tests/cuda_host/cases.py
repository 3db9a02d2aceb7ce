"""Calls of an op on the reference and, under many schedules, on the emulated CUDA kernels."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch

from dmtp_kernels import _library, backends, ops, use_backend
from dmtp_kernels.ops import _workspace
from dmtp_kernels.ops._spec import Case
from dmtp_kernels.testing.poison import poison
from tests.cuda_host import host
from tests.cuda_host.fence import Fenced

CPU = torch.device("cpu")


def cuda_ops() -> list[str]:
    """Ops that have CUDA kernels."""
    return [op for op in _library.registered() if "cuda" in backends._implementations[op]]


def spec_cases() -> Iterator[tuple[str, Case]]:
    """The cases of every op that has CUDA kernels, where these are to give the reference's bits."""
    for family in pkgutil.iter_modules(ops.__path__):
        if family.ispkg:
            specs = importlib.import_module(f"{ops.__name__}.{family.name}.spec").SPECS
            yield from (
                (spec.op, case) for spec in specs if spec.op in cuda_ops() and spec.exact for case in spec.cases
            )


def outputs_of(op: str, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """Poisoned buffers, of the shapes that the op gives its outputs."""
    with use_backend("reference"):
        made = getattr(torch.ops.dmtp, op)(*_call(op, _copied(inputs))[0], **_call(op, _copied(inputs))[1])
    outs = made if isinstance(made, tuple | list) else [made]
    return [torch.full_like(out, poison(out.dtype)) for out in outs]


def _call(op: str, inputs: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    schema = getattr(torch.ops.dmtp, op).default._schema
    pairs = list(zip(schema.arguments, inputs, strict=True))
    positional = [value for argument, value in pairs if not argument.kwarg_only]
    return positional, {argument.name: value for argument, value in pairs if argument.kwarg_only}


def _copied(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    copied: tuple[Any, ...] = Fenced(inputs, True).arguments
    return copied


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of nested arguments, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    one, other = (t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)


class Compared:
    """One call: what the reference makes of it, and `differs` under a schedule on the emulated kernels."""

    def __init__(self, op: str, inputs: tuple[Any, ...]) -> None:
        self.op = op
        call = [*inputs, *outputs_of(op, inputs)]
        wanted = Fenced(call, True)
        with use_backend("reference"):
            backends.implementation(op, CPU)(*wanted.arguments)
        self._wanted = list(tensors(wanted.arguments))
        self._placed = [Fenced(call, at_end) for at_end in (True, False)]

    def differs(self, seed: int) -> str | None:
        """What is wrong after a run under schedule `seed`, None where nothing is. Guards are checked."""
        placed = self._placed[seed % 2]
        placed.restore()
        for scratch in _workspace._buffers.values():
            if scratch.dtype == torch.uint8:
                scratch.fill_(255)
        host.seed(seed)
        try:
            backends.implementation(self.op, CPU)(*placed.arguments)
            placed.check()
        except (AssertionError, RuntimeError) as error:
            return str(error)
        for i, (got, want) in enumerate(zip(tensors(placed.arguments), self._wanted, strict=True)):
            if not same(got, want):
                return f"tensor {i} of the call: got {got}, must be {want}"
        return None
