"""Bytes that each Triton kernel moves over the bytes a perfect one must move: `python -m profiling.traffic`.

Kernels run in Triton's interpreter, planned as for a GPU, and every access is counted. Each kernel has two figures.

`moved`: every load and store, lane by lane; masked-off lanes move nothing.

`bytes`: what of that reaches DRAM, by this model: a tensor of at most 16 MiB at the case's full, unscaled size stays in
the L2 cache (A100 40 MB, H100 and H200 50 MB), so each of its 32-byte sectors that is loaded, or stored, counts once a
launch. Of a larger tensor every access counts, and at least each sector that a program touches, once a program.

The figure proves what the kernel asks for, not what a cache serves; see README.md.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dmtp_kernels import _library, ops, use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops._spec import Traffic
from dmtp_kernels.ops._variant import Variant
from dmtp_kernels.testing.watch import Access, Launch, watch
from profiling import cuda_traffic
from profiling.command import Parser, command
from profiling.launched import closest
from profiling.resources import variants
from profiling.traffic_rows import CACHED, PROCESSORS, SECTOR, Row, report


@dataclass
class Stream:
    """What one launch loads from, or stores to, one tensor."""

    cached: bool
    first_sector: int
    seen: np.ndarray  # per sector: the last program that touched it, -1 for none
    moved: int = 0
    program: int = -1
    asked: int = 0  # by the current program
    sectors: int = 0  # new to the current program, or to the launch
    finished: int = 0

    def add(self, access: Access, program: int) -> None:
        count = access.addresses.size * access.size
        self.moved += count
        if self.cached:
            program = 0
        elif program != self.program:
            self._close()
        self.program = program
        self.asked += count
        ends = access.addresses[:, None] + np.array([0, access.size - 1], np.uint64)
        sectors = np.unique(ends >> np.uint64(5)).astype(np.int64) - self.first_sector
        new = sectors[self.seen[sectors] != program]
        self.seen[new] = program
        self.sectors += new.size

    def _close(self) -> None:
        self.finished += SECTOR * self.sectors if self.cached else max(self.asked, SECTOR * self.sectors)
        self.asked = self.sectors = 0

    def total(self) -> int:
        """Bytes of the DRAM model."""
        self._close()
        return self.finished


@dataclass
class Counter:
    """Watches launches and keeps one `Stream` per launch, argument and direction."""

    scale: float
    unscaled: tuple[str, ...]
    streams: dict[tuple[Launch, str, bool], Stream] = field(default_factory=dict)
    _programs: int = 0
    _current: tuple[Launch, tuple[int, int, int]] | None = None

    def __call__(self, access: Access) -> None:
        if self._current != (access.launch, access.launch.program):
            self._current = access.launch, access.launch.program
            self._programs += 1
        if access.addresses.size == 0:
            return
        owner = access.owner()
        if owner is None:
            raise ValueError(
                f"{access.launch.kernel}: an access to no argument; pointers from memory cannot be counted"
            )
        # an atomic reads and writes
        for store in {"load": (False,), "store": (True,), "atomic": (False, True)}[access.kind]:
            key = (access.launch, owner, store)
            if key not in self.streams:
                self.streams[key] = self._stream(access.launch.tensors[owner], owner)
            self.streams[key].add(access, self._programs)

    def _stream(self, tensor: torch.Tensor, name: str) -> Stream:
        full = tensor.nbytes * (1 if name in self.unscaled else self.scale)
        span = tensor.element_size() * (
            1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))
        )
        first = tensor.data_ptr() // SECTOR
        return Stream(full <= CACHED, first, np.full((tensor.data_ptr() + span) // SECTOR + 1 - first, -1, np.int64))


def measure(traffic: Traffic, run: Callable[..., object], variants: Sequence[Variant] = ()) -> list[Row]:
    """Count the kernels that `run(*inputs)` launches on the inputs of `traffic.case`, and find them among `variants`.

    Raises:
        ValueError: a kernel was launched that `traffic.kernels` does not list, or one listed was not launched.
    """
    inputs = traffic.case.make(torch.Generator().manual_seed(7))
    counter = Counter(traffic.scale, traffic.unscaled)
    with watch(counter), planned_for(PROCESSORS):
        run(*inputs)
    launched = {launch.kernel for launch, _, _ in counter.streams}
    if launched != set(traffic.kernels):
        listed = sorted(traffic.kernels)
        raise ValueError(f"{traffic.op}, {traffic.case.name}: launches {sorted(launched)}, its Traffic lists {listed}")
    rows = []
    for kernel, floor_bytes in traffic.kernels.items():
        streams = [(launch, name, s) for (launch, name, _), s in counter.streams.items() if launch.kernel == kernel]
        tensors: dict[str, int] = {}
        for _, name, stream in streams:
            tensors[name] = tensors.get(name, 0) + stream.total()
        count = sum(tensors.values())
        floor = None if floor_bytes is None else floor_bytes(*inputs)
        ratio = None if floor is None else count / floor
        moved = sum(s.moved for _, _, s in streams)
        launches = {id(launch): launch for launch, _, _ in streams}.values()
        found = [closest(launch, variants) for launch in launches]
        names = [name for name, differs in found if name is not None and not differs]
        rows.append(
            Row(
                op=traffic.op,
                backend="triton",
                kernel=kernel,
                case=traffic.case.name,
                bytes=count,
                floor=floor,
                ratio=ratio,
                moved=moved,
                launches=len(launches),
                limit=traffic.limit,
                tensors=tensors,
                variant=", ".join(sorted(set(names))) if len(names) == len(launches) else None,
                differs=sorted({d for _, differs in found for d in differs}),
            )
        )
    return rows


def cases(op: str | None = None) -> Iterator[Traffic]:
    """The traffic cases of every op, or of one."""
    for family in pkgutil.iter_modules(ops.__path__):
        if family.ispkg:
            spec = importlib.import_module(f"{ops.__name__}.{family.name}.spec")
            yield from (t for t in getattr(spec, "TRAFFIC", ()) if op in (None, t.op))


def run_op(name: str, backend: str = "triton") -> Callable[..., object]:
    """The op on one backend, called with inputs in schema order."""
    op = _library._OPS[name]
    arguments = op.functional._schema.arguments
    positional = sum(not a.kwarg_only for a in arguments)

    def run(*inputs: Any) -> object:
        keywords = {a.name: v for a, v in zip(arguments[positional:], inputs[positional:], strict=True)}
        with use_backend(backend, name):
            return op.functional(*inputs[:positional], **keywords)

    return run


@command("profiling.traffic")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 when a ratio exceeds its limit, 2 when there is nothing to measure."""
    parser = Parser(prog="python -m profiling.traffic", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", help="one op, e.g. lm_head_select; default all")
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    options = parser.parse_args(arguments)
    found = list(cases(options.op))
    if not found:
        known = ", ".join(sorted({t.op for t in cases()}))
        parser.error(f"--op: is {options.op}, must be an op with traffic cases: {known}")
    if options.backend == "cuda":
        counted = [t for t in found if t.cuda is not None]
        if not counted:
            known = ", ".join(sorted({t.op for t in cases() if t.cuda is not None}))
            parser.error(f"--op: is {options.op}, must be an op whose CUDA kernels record all they access: {known}")
        if shutil.which("g++") is None:
            parser.error("--backend: is cuda, there is no g++ on PATH to compile the sources for the CPU")
        left = sorted({t.op for t in found} - {t.op for t in counted})
        if left:
            print(f"not counted, no CUDA kernels that record all they access: {', '.join(left)}", file=sys.stderr)
        return report([r for t in counted for r in cuda_traffic.measure(t, run_op(t.op, "cuda"))], options.json)
    from dmtp_kernels.testing import interpreter

    interpreter.install()
    compiled = [variant for _, variant in variants()]
    return report([row for t in found for row in measure(t, run_op(t.op), compiled)], options.json)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        # read when a kernel is decorated, so it must be set before anything is imported
        os.execve(
            sys.executable,
            [sys.executable, "-m", "profiling.traffic", *sys.argv[1:]],
            os.environ | {"TRITON_INTERPRET": "1"},
        )
    sys.exit(main())
