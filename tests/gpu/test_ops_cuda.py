"""Every op on a CUDA device: the CPU reference's answer, the same in a replayed graph as outside."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

from dmtp_kernels import _library, backends, ops, use_backend
from dmtp_kernels.ops._spec import Case, Spec
from dmtp_kernels.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu
FAMILIES = [m.name for m in pkgutil.iter_modules(ops.__path__) if m.ispkg]
SPECS: list[Spec] = [s for f in FAMILIES for s in importlib.import_module(f"dmtp_kernels.ops.{f}.spec").SPECS]
CASES = [pytest.param(s, c, id=f"{s.op}-{c.name}") for s in SPECS for c in s.cases]
COMPILED = [p for p in CASES if "cuda" in backends._implementations[p.values[0].op]]  # type: ignore[union-attr]
CUDA = torch.device("cuda")


def inputs_of(case: Case, seed: int = 7) -> tuple[Any, ...]:
    return case.make(torch.Generator().manual_seed(seed))


def moved(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v) for v in value)
    return value.to(CUDA) if isinstance(value, torch.Tensor) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


def run(spec: Spec, inputs: tuple[Any, ...], outputs: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    op = _library._OPS[spec.op]
    arguments = op.functional._schema.arguments
    positional = sum(not a.kwarg_only for a in arguments)
    keywords = {a.name: v for a, v in zip(arguments[positional:], inputs[positional:], strict=True)}
    if outputs is None:
        result = op.functional(*inputs[:positional], **keywords)
        return [result] if isinstance(result, torch.Tensor) else list(result or ())
    names = {a.name for a in arguments}
    labels = [a.name for a in op.out._schema.arguments if a.name not in names]
    op.out(*inputs[:positional], **keywords, **dict(zip(labels, outputs, strict=True)))
    return outputs


def same(spec: Spec, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        exact = 0.0 if spec.exact or not w.is_floating_point() else None
        torch.testing.assert_close(g.cpu(), w.cpu(), equal_nan=True, rtol=exact, atol=exact)


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_cuda_gives_the_reference(spec: Spec, case: Case) -> None:
    host, device = inputs_of(case), moved(inputs_of(case))
    with use_backend("reference"):
        want = run(spec, host)
    if spec.op == "lm_head_screen":
        # a kernel may list rows beside the survivors, never fewer
        listed = [set(row.tolist()) - {-1} for row in run(spec, device)[0]]
        for row, count, found in zip(want[0].tolist(), want[1].tolist(), listed, strict=True):
            assert count > len(row) or set(row) - {-1} <= found
        return
    same(spec, run(spec, device), want)
    same(spec, tensors_in(device), tensors_in(host))


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_replay_follows_new_inputs(spec: Spec, case: Case) -> None:
    if backends.choose(spec.op, CUDA) == "reference":
        pytest.skip("no kernel on CUDA yet")
    replays(spec, case)


def attends(inputs: tuple[Any, ...], got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Attention within its error budget, against the reference in float64; scales stay as they are."""
    scales = [a.name.endswith("_scale") for a in _library._OPS["block_attention"].functional._schema.arguments]
    exact = tuple(
        v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() and not scale else v
        for v, scale in zip(inputs, scales, strict=True)
    )
    with use_backend("reference"):
        truth = run(next(s for s in SPECS if s.op == "block_attention"), exact)
    for name, g, t, w in zip(("out", "lse"), got, truth, want, strict=True):
        assert_within_budget(g.cpu(), t, w, name=name)


@pytest.mark.skipif(backends.cuda_missing() is not None, reason=str(backends.cuda_missing()))
@pytest.mark.parametrize(("spec", "case"), COMPILED)
def test_compiled_kernels_where_triton_would_run(spec: Spec, case: Case) -> None:
    host, device = inputs_of(case), moved(inputs_of(case))
    with use_backend("reference"):
        want = run(spec, host)
    with use_backend("cuda", spec.op):
        got = run(spec, device)
        if spec.op == "block_attention":
            attends(host, got, want)
        else:
            same(spec, got, want)
        same(spec, tensors_in(device), tensors_in(host))
        replays(spec, case)


def replays(spec: Spec, case: Case) -> None:
    """Captured once, a graph gives on later inputs what a call gives on them."""
    inputs = moved(inputs_of(case))
    outputs = [torch.empty_like(o) for o in run(spec, inputs)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(spec, inputs, outputs)
    for seed in (7, 8, 9):
        for held, fresh in zip(tensors_in(inputs), tensors_in(moved(inputs_of(case, seed))), strict=True):
            held.copy_(fresh)
        graph.replay()
        same(spec, outputs, run(spec, moved(inputs_of(case, seed))))
