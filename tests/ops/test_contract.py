"""What every op promises whatever it computes: empty and single batches, strides, dynamic shapes, honest fakes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.optests import OpCheckError

from dmtp_kernels import _library, backends, ops
from dmtp_kernels.ops._spec import Case, Spec

FAMILIES = [m.name for m in pkgutil.iter_modules(ops.__path__) if m.ispkg]
SPECS: list[Spec] = [s for f in FAMILIES for s in importlib.import_module(f"dmtp_kernels.ops.{f}.spec").SPECS]
BY_OP = pytest.mark.parametrize("spec", SPECS, ids=[s.op for s in SPECS])


def inputs_of(case: Case) -> tuple[Any, ...]:
    return case.make(torch.Generator().manual_seed(7))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def call(spec: Spec, inputs: tuple[Any, ...], *, function: Any = None) -> tuple[torch.Tensor, ...]:
    op = _library._OPS[spec.op]
    arguments = op.functional._schema.arguments
    positional = sum(not a.kwarg_only for a in arguments)
    keywords = {a.name: v for a, v in zip(arguments[positional:], inputs[positional:], strict=True)}
    result = (function or op.functional)(*inputs[:positional], **keywords)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result or ())


def empty_cases(spec: Spec) -> list[Case]:
    """Cases with no request: nothing comes out."""
    return [c for c in spec.cases if all(o.shape[0] == 0 for o in call(spec, inputs_of(c)))]


@BY_OP
def test_row_175_empty_batch(spec: Spec) -> None:
    # https://github.com/triton-lang/triton-ascend/issues/984: a grid of size zero aborts the process
    cases = empty_cases(spec)
    assert cases, f"{spec.op} has no spec case with an empty batch"
    for case in cases:
        inputs = inputs_of(case)
        untouched = [t.clone() for t in tensors_in(inputs)]
        for _ in range(2):  # the fault showed on the second, warm call
            outputs = call(spec, inputs)
        assert all(o.numel() == 0 for o in outputs)
        for now, before in zip(tensors_in(inputs), untouched, strict=True):
            torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)


@BY_OP
def test_row_173_specs_cover_what_a_wrong_fake_hides_behind(spec: Spec) -> None:
    # https://github.com/pytorch/pytorch/issues/181851: a wrong fake shows in the shapes nobody ran; opcheck runs these
    arguments = _library._OPS[spec.op].functional._schema.arguments
    made = [dict(zip((a.name for a in arguments), inputs_of(c), strict=True)) for c in spec.cases]
    optional = {a.name for a in arguments if str(a.type) == "Optional[Tensor]"}
    assert {n for n in optional for m in made if m[n] is None} == optional, "an optional tensor is None in no case"
    assert {n for n in optional for m in made if m[n] is not None} == optional, "an optional tensor is given in no case"


def first_request(value: Any, batch: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(first_request(v, batch) for v in value)
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch:
        return value[:1].clone()
    return value


@BY_OP
def test_row_173_opcheck_with_one_request(spec: Spec) -> None:
    # compilers treat a size of 1 apart from all others
    op = _library._OPS[spec.op]
    batch, inputs = next((n, i) for i in map(inputs_of, spec.cases) if (n := call(spec, i)[0].shape[0]) > 1)
    one = first_request(inputs, batch)
    assert [o.shape[0] for o in call(spec, one)] == [1] * len(op.functional._schema.returns)

    def check(*args: Any, **kwargs: Any) -> None:
        assert set(torch.library.opcheck(op.functional, args, kwargs).values()) == {"SUCCESS"}

    call(spec, one, function=check)


def padded(value: Any) -> Any:
    """The same values inside a larger tensor full of poison: every stride but the last is odd."""
    if isinstance(value, (list, tuple)):
        return type(value)(padded(v) for v in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    poison = float("nan") if value.is_floating_point() else True if value.dtype == torch.bool else 111
    around = torch.full([size + 1 for size in value.shape], poison, dtype=value.dtype)
    inside = around[tuple(slice(0, size) for size in value.shape)]
    return inside.copy_(value)


@BY_OP
def test_row_173_non_contiguous_inputs_give_the_same(spec: Spec) -> None:
    for case in spec.cases:
        plain, odd = inputs_of(case), padded(inputs_of(case))
        wanted, got = call(spec, plain), call(spec, odd)
        # what the op writes into its inputs counts too
        for name, w, g in [("out", wanted, got), ("in", plain, odd)]:
            for x, y in zip(tensors_in(w), tensors_in(g), strict=True):
                torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True, msg=f"{case.name}: {name}puts differ")


@BY_OP
def test_row_173_dynamic_shapes_compile_as_one_graph(spec: Spec) -> None:
    # the fake runs with symbolic sizes here: any check or shape rule that needs a concrete batch breaks the graph
    op = _library._OPS[spec.op]

    def run(*args: Any, **kwargs: Any) -> Any:
        return op.functional(*args, **kwargs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=4 * len(spec.cases)):
        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        for case in spec.cases:
            got = call(spec, inputs_of(case), function=compiled)
            want = call(spec, inputs_of(case))
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)


def planted_ones(x: torch.Tensor, y: torch.Tensor) -> None:
    y.fill_(1)


@pytest.mark.parametrize("rows", [0, 1], ids=["right", "one_row_too_many"])
def test_row_173_a_wrong_shape_rule_is_caught(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    # the base form must refuse buffers that the shape rule does not give, whoever allocated them
    monkeypatch.setattr(_library, "_OPS", dict(_library._OPS))
    monkeypatch.setattr(backends, "_implementations", dict(backends._implementations))
    op = _library.define_op(
        f"planted_{rows}",
        args="Tensor x",
        outs=("y",),
        shapes=lambda x: [((x.shape[0] + rows,), x.dtype)],
        check=lambda x: None,
        implementations={"reference": f"{__name__}:planted_ones"},
    )
    monkeypatch.setitem(backends._loaded, (op.name, "reference"), planted_ones)
    x = torch.zeros(3)
    if rows:
        with pytest.raises(ValueError, match=r"y is \(3,\) torch.float32, must be \(4,\)"):
            op.out(x, y=torch.zeros(3))
    else:
        op.out(x, y=torch.zeros(3))


def test_row_173_opcheck_catches_a_fake_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("dmtp_planted", "DEF")
    try:
        library.define("double(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("double", lambda x: x * 2, "CPU")
        torch.library.register_fake("dmtp_planted::double", lambda x: x.new_empty(x.shape[0] + 1), lib=library)
        with pytest.raises(OpCheckError):
            torch.library.opcheck(torch.ops.dmtp_planted.double.default, (torch.zeros(3),))
    finally:
        library._destroy()


def test_row_174_shapes_and_dtypes_interleaved_under_compile() -> None:
    # https://github.com/pytorch/pytorch/issues/136550: a kernel cached for one signature ran for another
    from dmtp_kernels.ops.lm_head import decode_key, lm_head_select, pack_lm_head

    torch._dynamo.reset()
    heads = {
        (width, dtype): pack_lm_head(torch.randn(40, width, generator=torch.Generator().manual_seed(width)).to(dtype))
        for width in (256, 512)
        for dtype in (torch.bfloat16, torch.float16)
    }
    compiled = torch.compile(lambda hidden, head: lm_head_select(hidden, head)[0], backend="aot_eager")
    for (width, dtype), head in list(heads.items()) * 2:
        hidden = torch.randn(4, width, generator=torch.Generator().manual_seed(width + 1)).to(dtype)
        expected = (hidden.double() @ head.weight.double().T).argmax(dim=1)
        for key in (compiled(hidden, head), lm_head_select(hidden, head)[0]):
            assert torch.equal(decode_key(key)[0][:, 0], expected)
