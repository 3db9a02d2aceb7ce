"""Every op at every shape of its spec, by the implementation that runs on this machine.

A number here compares two commits on one machine; `floor_mb` is what a perfect kernel moves.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

from dmtp_kernels import _library, backends, ops
from dmtp_kernels.ops._spec import Case, Spec

FAMILIES = [m.name for m in pkgutil.iter_modules(ops.__path__) if m.ispkg]
SPECS: list[Spec] = [s for f in FAMILIES for s in importlib.import_module(f"dmtp_kernels.ops.{f}.spec").SPECS]


@pytest.mark.parametrize(("spec", "case"), [pytest.param(s, c, id=f"{s.op}-{c.name}") for s in SPECS for c in s.cases])
def test_op(benchmark: Any, spec: Spec, case: Case) -> None:
    op = _library._OPS[spec.op]
    names = [a.name for a in op.functional._schema.arguments]
    positional = sum(not a.kwarg_only for a in op.functional._schema.arguments)

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        # an op that advances its own state must start every round from the same one
        inputs = case.make(torch.Generator().manual_seed(7))
        return inputs[:positional], dict(zip(names[positional:], inputs[positional:], strict=True))

    args, keywords = fresh()
    benchmark.group = spec.op
    benchmark.extra_info["backend"] = backends.choose(spec.op, torch.device("cpu"))
    benchmark.extra_info["floor_mb"] = spec.floor_bytes(*args, *keywords.values()) / 1e6
    # poisoning every allocation would be timed too
    torch.use_deterministic_algorithms(False)
    try:
        benchmark.pedantic(op.functional, setup=fresh, rounds=50, warmup_rounds=3)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
