"""Whether the outputs that a benchmark times are right: against the op's reference, at the size that is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dmtp_kernels.bench.cases import Problem
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.testing.tolerance import assert_within_budget

Part = tuple[tuple[Any, ...], Sequence[torch.Tensor]]


def disagreement(problem: Problem) -> str | None:
    """How the op's outputs differ from its reference's, or None where they agree.

    Ops that the spec calls exact, and integer outputs of any, must be equal bit for bit, in what they write into their
    inputs too; a screen may list more rows than the reference, never fewer. Other floating-point outputs must keep the
    budget of `testing.tolerance`, on a part of the batch that float64 has room for. Both start from the inputs' first
    state, which is put back.
    """
    problem.reset()
    problem.fused()()
    got = [t.clone() for t in (*problem.outputs, *problem.mutated)]
    problem.reset()
    found = _differs(problem, got)
    if found is not None and problem.device.type == "cuda":
        # a device's own exp and log may round otherwise than the host's, which the definition means
        host = Problem(problem.case, on_host(problem.inputs))
        found = _differs(host, [t.cpu() for t in got])
    return found


def on_host(value: Any) -> Any:
    """The value with all tensors in it copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return type(value)(map(on_host, value)) if type(value) in (list, tuple) else value


def _differs(problem: Problem, got: Sequence[torch.Tensor]) -> str | None:
    want = [torch.empty_like(t) for t in problem.outputs]
    problem.definition()(*problem.inputs, *want)
    want += [t.clone() for t in problem.mutated]
    problem.reset()
    if problem.case.op == "lm_head_screen":
        return _misses_rows(got, want)
    close = [] if problem.spec.exact else [i for i, t in enumerate(problem.outputs) if t.is_floating_point()]
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        same = (g == w) | ((g != g) & (w != w))
        if i not in close and not bool(same.all()):
            return f"output {i}: {int((~same).sum())} of {same.numel()} elements differ from the reference's"
    return _beyond_budget(problem, got, close) if close else None


def _misses_rows(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str | None:
    for row, (listed, count, needed) in enumerate(zip(got[0].tolist(), got[1].tolist(), want[0].tolist(), strict=True)):
        missing = set(needed) - set(listed) - {-1}
        # a count above the capacity says that the list is cut, and sends the row to the full scan
        if count <= len(listed) and missing:
            return f"row {row}: {len(missing)} rows that can be the answer are not listed"
    return None


def _beyond_budget(problem: Problem, got: Sequence[torch.Tensor], close: Sequence[int]) -> str | None:
    inputs, part = _PARTS[problem.case.op](problem.inputs, got[: len(problem.outputs)])

    def defined(values: tuple[Any, ...], dtype: torch.dtype | None) -> list[torch.Tensor]:
        outputs = [t.new_empty((part[0].shape[0], *t.shape[1:])) for t in problem.outputs]
        outputs = [t.to(dtype) if dtype and t.is_floating_point() else t for t in outputs]
        problem.definition()(*values, *outputs)
        return [outputs[i] for i in close]

    eager, truth = defined(inputs, None), defined(_double(inputs), torch.float64)
    for i, t, e in zip(close, truth, eager, strict=True):
        try:
            assert_within_budget(part[i], t, e, name=f"output {i}")
        except AssertionError as error:
            return str(error)
    return None


def _double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(map(_double, value)) if type(value) in (list, tuple) else value


def _first_request(inputs: tuple[Any, ...], got: Sequence[torch.Tensor]) -> Part:
    """Of attention: one request and its own pages."""
    q, k_cache, v_cache, table, ctx_len, block_k, block_v, *rules = inputs
    pages = table[:1].long()[0]
    own = torch.arange(len(pages), dtype=table.dtype, device=table.device)[None]
    head = (q[:1], k_cache[pages], v_cache[pages], own, ctx_len[:1], block_k[:1], block_v[:1])
    return (*head, *rules), [t[:1] for t in got]


def _used_rows(inputs: tuple[Any, ...], got: Sequence[torch.Tensor]) -> Part:
    """Of T1 preparation: the rows of the table that its block holds, T1 given."""
    args, t1 = PrepArgs(*inputs), got[0]
    batch = len(t1)
    ids, place = torch.cat((args.anchor_ids, t1, t1.new_tensor([args.mask_id]))).unique(return_inverse=True)
    fields: dict[str, Any] = {name: None for name in PrepArgs._fields if name.startswith("head_")}
    fields |= {"anchor_ids": place[:batch], "t1_override": place[batch : 2 * batch], "mask_id": int(place[-1])}
    fields |= {"head_format": args.head_format, "embedding": args.embedding[ids], "num_embeddings": len(ids)}
    return tuple(args._replace(**fields)), got


_PARTS: dict[str, Callable[[tuple[Any, ...], Sequence[torch.Tensor]], Part]] = {
    "block_attention": _first_request,
    "fused_t1_prep": _used_rows,
}
"""A part of the inputs, and of the outputs, that float64 has room for."""
