"""Kernels that one steady round launches besides the models': `python -m profiling.launches`.

A round of the decode loop runs once with the Triton kernels, in Triton's interpreter, and once with the ops' PyTorch
references; the first counts launches, the second the ATen kernels of the eager chain (views and plain allocations
launch nothing and are not counted). The models' own layers are left out; what the loop computes with PyTorch between
the ops is shown as `between`. With `--verification rejection` and `block` that includes the draft's distributions, made
in stage `t1` and between the ops. Collectives are those of a tensor-parallel round (`profiling.collectives`).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dmtp_kernels import backends, use_backend
from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import Request
from dmtp_kernels.testing.models import tiny_checkpoint
from dmtp_kernels.testing.watch import Launch, watch_launches
from profiling.collectives import of_method
from profiling.command import Parser, check_range, command
from profiling.table import table

STAGES = {
    "fused_t1_prep": "t1",
    "draft_page_table": "pages",
    "accept_prefix": "accept",
    "accept_rejection": "accept",
    "accept_block": "accept",
    "commit_kv": "commit",
    "commit_round": "commit",
    "advance_round": "bookkeeping",
    "sample_rows": "sample",
    "lm_head_select": "draft_head",
}
"""Stage that the launches of an op count for; attention belongs to the models."""
_NOTES = """\
launches: kernels of the Triton backend. eager: ATen kernels of the ops' PyTorch references.
bookkeeping is advance_round; between is what the loop itself computes in PyTorch between the ops, the same in both.
The models' layers and their attention are left out.
collectives: what a tensor-parallel round exchanges for T1, the drafted tokens and the target's, counted over gloo in 2
processes. fused: one MAX over keys for T1, with a whole embedding table on each rank (one more with a table that is
cut), and one for the drafted rows; the target's logits are gathered as by an engine. eager: gathered logits and an
embedding all-reduce for T1, gathered maxima and gathered ids for the drafted rows."""
_DRAWS = "t1 and between hold the loop's own PyTorch kernels that make the draft's distributions, which target has not."
MOST_BATCH = 64
"""Requests; interpreted kernels are slow, and their number is that of a larger batch."""
_KERNEL_FREE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::detach"}


class _Eager(TorchDispatchMode):
    """Counts ATen kernels outside the models under the name of the op that runs."""

    def __init__(self, counts: Counter[str], where: list[str]) -> None:
        super().__init__()
        self.counts, self.where = counts, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        views = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if func.namespace == "aten" and not views and func._schema.name not in _KERNEL_FREE and self.where[-1]:
            self.counts[self.where[-1]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _named(where: list[str], name: str) -> Iterator[None]:
    where.append(name)
    try:
        yield
    finally:
        where.pop()


@contextmanager
def _inside_ops(where: list[str], count_eager: Counter[str] | None) -> Iterator[None]:
    """`where[-1]` names the stage whose op runs."""
    original = backends.implementation

    def implementation(op: str, device: torch.device) -> Callable[..., None]:
        function = original(op, device)

        def run(*arguments: Any) -> None:
            inside = "t1" if where[-1] == "t1" else STAGES.get(op, "")
            with _named(where, inside), nullcontext() if count_eager is None else _Eager(count_eager, where):
                function(*arguments)

        return run

    with mock.patch.object(backends, "implementation", implementation):
        yield


@contextmanager
def _outside_models(modules: Sequence[torch.nn.Module], where: list[str]) -> Iterator[None]:
    def model(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with _named(where, ""):
                return function(*arguments, **named)

        return run

    parts = [(m, name) for m in modules for name in ("forward", "logits", "context_keys_values") if hasattr(m, name)]
    with ExitStack() as stack:
        for module, name in parts:
            stack.enter_context(mock.patch.object(module, name, model(getattr(module, name))))
        original = rounds.t1

        def t1(*arguments: Any) -> None:
            with _named(where, "t1"):
                original(*arguments)

        stack.enter_context(mock.patch.object(rounds, "t1", t1))
        yield


def _engine(method: str, batch: int, temperature: float, verification: str) -> Engine:
    checkpoint = tiny_checkpoint(7)
    engine = Engine(checkpoint, method, max_batch=batch, max_tokens=96, page_size=8, verification=verification)
    for i in range(batch):
        engine.submit(Request(tuple(range(1, 9 + i % 8)), 60, temperature=temperature, seed=i))
    engine.step()
    engine.step()
    return engine


@torch.no_grad()
def count(method: str = "dmtp", batch: int = 2, temperature: float = 0.0, verification: str = "target") -> Any:
    """`{"stages": launches by stage, "eager": ATen kernels by stage}` of one round in the steady state.

    Stages: `t1`, `pages`, `draft_head` (the head over the drafter's slots), `sample` (the target's tokens), `accept`,
    `commit` (the rows of all caches), `bookkeeping`, and `between`, PyTorch kernels of the loop itself, the same in
    both columns.
    """
    fused: Counter[str] = Counter()
    eager: Counter[str] = Counter()
    engine = _engine(method, batch, temperature, verification)
    modules = [m for m in (engine.stack.target, engine.stack.drafter, engine.stack.mtp) if m is not None]

    def launched(_: Launch) -> None:
        fused[where[-1]] += 1

    for kernels in (True, False):
        where = ["between"]
        counts = fused if kernels else eager
        chosen = use_backend("triton" if kernels else "reference", *STAGES)
        inside = _inside_ops(where, None if kernels else eager)
        with chosen, _outside_models(modules, where), watch_launches(launched), inside, _Eager(counts, where):
            engine.round_function(engine.stack, engine.seating.round_view())
        counts.pop("", None)
    order = [*dict.fromkeys(STAGES.values()), "between"]
    return {
        "stages": {name: fused[name] for name in order if fused[name] or eager[name]},
        "eager": {name: eager[name] for name in order if fused[name] or eager[name]},
    }


@command("profiling.launches")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with a message for an option that means nothing."""
    parser = Parser(prog="python -m profiling.launches", description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="dmtp", choices=list(METHODS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", default="target", choices=("target", "rejection", "block"))
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args(arguments)
    check_range("--batch", options.batch, 1, MOST_BATCH)
    check_range("--temperature", options.temperature, 0)
    if os.environ.get("TRITON_INTERPRET") != "1":
        # kernels are interpreted or compiled for the life of a process
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        os.execvpe(
            sys.executable, [sys.executable, "-m", "profiling.launches", *(arguments or sys.argv[1:])], environment
        )
    from dmtp_kernels.testing import interpreter

    interpreter.install()
    with ThreadPoolExecutor(1) as pool:
        # in processes of their own, so meanwhile
        exchanged = pool.submit(of_method, METHODS[options.method], options.verification != "target")
        found = count(options.method, options.batch, options.temperature, options.verification)
        found["collectives"] = exchanged.result()
    if options.json:
        print(json.dumps(found))
    else:
        rows = [(name, launched, found["eager"][name]) for name, launched in found["stages"].items()]
        total = ("total", *(sum(found[column].values()) for column in ("stages", "eager")))
        print(table(("stage", "launches", "eager"), [*rows, total]))
        exchanges = found["collectives"]
        rows = [(name, entry["fused"], entry["eager"]) for name, entry in exchanges["stages"].items()]
        print(table(("collectives", "fused", "eager"), [*rows, ("all", exchanges["fused"], exchanges["eager"])]))
        print(_NOTES if options.verification == "target" else f"{_NOTES}\n{_DRAWS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
