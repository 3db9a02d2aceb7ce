"""Every op passes opcheck with all its utilities, compiles as one graph, and agrees between its two forms."""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels import _library, backends, ops, use_backend
from dmtp_kernels.ops._spec import Case, Spec
from dmtp_kernels.testing.capture import capture_safe

FAMILIES = [m.name for m in pkgutil.iter_modules(ops.__path__) if m.ispkg]
SPECS: list[Spec] = [s for f in FAMILIES for s in importlib.import_module(f"dmtp_kernels.ops.{f}.spec").SPECS]
CASES = [pytest.param(s, c, id=f"{s.op}-{c.name}") for s in SPECS for c in s.cases]


def _inputs(case: Case) -> tuple[object, ...]:
    return case.make(torch.Generator().manual_seed(7))


def test_every_op_has_a_spec() -> None:
    assert {s.op for s in SPECS} == set(_library.registered())


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_opcheck(spec: Spec, case: Case) -> None:
    op = _library._OPS[spec.op]
    names = [a.name for a in op.functional._schema.arguments]
    positional = sum(not a.kwarg_only for a in op.functional._schema.arguments)
    inputs = _inputs(case)
    args, kwargs = inputs[:positional], dict(zip(names[positional:], inputs[positional:], strict=True))
    result = torch.library.opcheck(op.functional, args, kwargs)
    assert set(result.values()) == {"SUCCESS"}

    outputs = op.functional(*_clone(args), **_clone_dict(kwargs))
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    labels = [a.name for a in op.out._schema.arguments if a.name not in names]
    buffers = {label: torch.empty_like(o) for label, o in zip(labels, outputs, strict=True)}
    result = torch.library.opcheck(op.out, args, {**kwargs, **buffers})
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_fullgraph_compile_and_out_form_agree(spec: Spec, case: Case) -> None:
    op = _library._OPS[spec.op]
    arguments = op.functional._schema.arguments
    positional = sum(not a.kwarg_only for a in arguments)
    keys = [a.name for a in arguments[positional:]]

    def call(*inputs: Any) -> Any:
        return op.functional(*inputs[:positional], **dict(zip(keys, inputs[positional:], strict=True)))

    compiled_inputs, eager_inputs = _inputs(case), _inputs(case)
    torch.compiler.reset()  # its limit of recompilations counts over all cases
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        got = compiled(*compiled_inputs)
    want = call(*eager_inputs)
    got = (got,) if isinstance(got, torch.Tensor) else got
    want = (want,) if isinstance(want, torch.Tensor) else want
    inputs = _inputs(case)
    labels = [a.name for a in op.out._schema.arguments if a.name not in {b.name for b in arguments}]
    buffers = {label: torch.empty_like(w) for label, w in zip(labels, want, strict=True)}
    op.out(*inputs[:positional], **dict(zip(keys, inputs[positional:], strict=True)), **buffers)
    for g, w, b in zip(got, want, buffers.values(), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(b, w, rtol=0, atol=0, equal_nan=True)
    # an op that writes into its arguments must write the same in all three forms
    for g, w, b in zip(_tensors(compiled_inputs), _tensors(eager_inputs), _tensors(inputs), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(b, w, rtol=0, atol=0, equal_nan=True)


def _record_references(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ops whose reference ran, filled in as it happens: launchers hand it what their kernels do not take."""
    ran: list[str] = []
    for name, implementations in backends._implementations.items():
        module, _, attribute = implementations["reference"].partition(":")
        original = getattr(importlib.import_module(module), attribute)

        def recorded(*args: Any, _name: str = name, _original: Any = original) -> None:
            ran.append(_name)
            _original(*args)

        monkeypatch.setattr(f"{module}.{attribute}", recorded)
    return ran


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_no_host_sync(spec: Spec, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # CPU kernels are never captured: watched is what runs on a GPU, the Triton kernels or else the reference
    op = _library._OPS[spec.op]
    inputs = _inputs(case)
    positional = sum(not a.kwarg_only for a in op.functional._schema.arguments)
    keys = [a.name for a in op.functional._schema.arguments[positional:]]
    cpu = torch.device("cpu")
    reference = backends.unavailable(spec.op, "triton", cpu) is not None
    ran = _record_references(monkeypatch)
    with use_backend("reference" if reference else "triton", spec.op):
        arguments = dict(zip(keys, _clone(inputs[positional:]), strict=True))
        outputs = op.functional(*_clone(inputs[:positional]), **arguments)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        implementation = backends.implementation(spec.op, cpu)
        eager = reference or bool(ran)
        with capture_safe(allocations=eager, numpy=eager) as mode:
            implementation(*inputs, *outputs)
    # a reference the mode cannot see would pass unwatched
    assert mode.calls > 0 or not reference or all(o.numel() == 0 for o in outputs)


def _tensors(values: object) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for v in values for t in _tensors(v)] if isinstance(values, list | tuple) else []


def _clone(values: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(_clone_one(v) for v in values)


def _clone_dict(values: dict[str, object]) -> dict[str, object]:
    return {k: _clone_one(v) for k, v in values.items()}


def _clone_one(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_clone_one(v) for v in value]
    return value


def test_kernel_tests_are_also_run_interpreted() -> None:
    # the second run of `make test` picks files by words of their name
    root = Path(__file__).parents[2]
    found = re.search(r'-k "([^"]+)"', (root / "Makefile").read_text())
    assert found is not None
    words = found[1].split(" or ")
    for path in (root / "tests" / "ops").glob("test_*.py"):
        text = path.read_text()
        if "\nKERNEL_OPS" in text or path.stem.endswith("_triton"):
            assert any(word in path.stem for word in words), path.name
