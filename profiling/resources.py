"""Registers, spills, shared memory and load widths of every kernel: `python -m profiling.resources`.

Each `Variant` that an op's `config.variants()` lists is compiled to a cubin for sm_80, sm_90 and sm_100 with the
assembler in the triton wheel, each source of csrc/cuda with nvcc where there is one: no GPU and no driver are needed.
See README.md for what that does and does not show.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import pkgutil
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

from dmtp_kernels import ops
from dmtp_kernels.ops._variant import Variant
from profiling import cuda_resources, machine_code
from profiling.command import Parser, command
from profiling.table import table
from profiling.usage import SHARED_LIMIT, Usage

ARCHITECTURES = (80, 90, 100)
BACKENDS = ("triton", "cuda")
PROCESSES = 2


def variants(op_family: str | None = None) -> Iterator[tuple[str, Variant]]:
    """`(module of the config, variant)` of every op family that lists variants, or of one."""
    for family in pkgutil.iter_modules(ops.__path__):
        module = f"{ops.__name__}.{family.name}.config"
        if family.ispkg and op_family in (None, family.name) and importlib.util.find_spec(module):
            listed: Callable[[], tuple[Variant, ...]] = getattr(importlib.import_module(module), "variants", tuple)
            yield from ((module, variant) for variant in listed())


def compile_triton(variant: Variant, arch: int) -> tuple[str, str, int]:
    """`(PTX, what ptxas printed, bytes of shared memory)`; cached by Triton, and the log beside it.

    Raises:
        Exception: whatever Triton's compiler raises.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.cache import get_cache_manager

    module, _, attribute = variant.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    names = kernel.arg_names
    known = {*variant.signature, *variant.constants}
    if known != set(names) or set(variant.signature) & set(variant.constants):
        raise ValueError(f"{variant.name}: arguments differ from the kernel's: {sorted(known ^ set(names))}")
    source = ASTSource(
        fn=kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={path: [["tt.divisibility", 16]] for name in variant.aligned for path in _paths(variant, name, names)},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    target = GPUTarget("cuda", arch, 32)
    key = f"{triton.__version__} {source.hash()} {target} {sorted(options.items())}"
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    path = cache.get_file("ptxas.log")
    printed = io.StringIO()
    with _on(target), knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.compilation.always_compile = path is None
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    if path is None:
        path = cache.put(printed.getvalue(), "ptxas.log", binary=False)
    with open(path) as file:
        return compiled.asm["ptx"], file.read(), compiled.metadata.shared


@contextlib.contextmanager
def _on(target: Any) -> Iterator[None]:
    """As on a machine with this GPU: kernels ask the active driver what it is, not the compiler's target."""
    from triton.runtime import driver

    before = dict(vars(driver))
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        vars(driver).update(before)


def _paths(variant: Variant, name: str, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Where Triton keeps the attributes of an argument, or of every value of a tuple."""
    kind = variant.signature[name]
    index = names.index(name)
    return [(index,)] if isinstance(kind, str) else [(index, i) for i in range(len(kind))]


def _parameters(variant: Variant, name: str) -> range:
    """The PTX parameters of an argument: a tuple has one for each of its values."""
    sizes = {n: 1 if isinstance(kind, str) else len(kind) for n, kind in variant.signature.items()}
    start = sum(sizes[n] for n in list(sizes)[: list(sizes).index(name)])
    return range(start, start + sizes[name])


def usage(variant: Variant, arch: int) -> Usage:
    """Compile one variant and read its code."""
    ptx, log, shared = compile_triton(variant, arch)
    registers, spills = machine_code.ptxas_usage(log)
    loads = machine_code.global_loads(ptx)
    # of a tuple the first tensor stands for all: one instruction loads from whichever is picked
    shares = {name: machine_code.widths(loads, _parameters(variant, name)[0]) for name in variant.streams}
    bits = min((machine_code.narrowest(s) for s in shares.values()), default=None)
    return Usage(variant.name, "triton", arch, registers, spills, shared, bits, shares)


def _work(module: str, name: str, arch: int) -> list[Usage] | str:
    if module == cuda_resources.FOLDER:
        try:
            return cuda_resources.usages(cuda_resources.CSRC / "cuda" / name, arch)
        except RuntimeError as error:
            return str(error)
    (variant,) = (v for v in importlib.import_module(module).variants() if v.name == name)
    try:
        return [usage(variant, arch)]
    except Exception as error:
        return f"{name}, sm_{arch}: {type(error).__name__}: {str(error).strip().splitlines()[0]}"


def measure(work: Sequence[tuple[str, str, int]]) -> list[Usage | str]:
    """Usage of every `(module, variant, arch)` in two processes, a message for one that does not compile.

    A source of csrc/cuda stands as `(cuda_resources.FOLDER, its name, arch)`, and may have several kernels.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(PROCESSES, len(work)), mp_context=context) as pool, _interruptible():
        # Ctrl-C goes to the whole group; workers inherit that they ignore it and are ended from here
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        results = [pool.submit(_work, *row) for row in work]
        signal.signal(signal.SIGINT, handler)
        found = [result.result() for result in results]
    return [one for several in found for one in ([several] if isinstance(several, str) else several)]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """An interrupt ends the workers instead of waiting for all they have to do."""
    try:
        yield
    except KeyboardInterrupt:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise


def report(results: Sequence[Usage | str], as_json: bool) -> int:
    """Print the results; 1 when one did not compile or has a fault."""
    rows = [r for r in results if isinstance(r, Usage)]
    if as_json:
        print(json.dumps([vars(r) for r in rows], indent=1))
    else:
        headers = ("kernel", "backend", "arch", "registers", "spills", "shared", "load bits", "")
        body: list[tuple[Any, ...]] = [
            (r.kernel, r.backend, f"sm_{r.arch}", r.registers, r.spills, r.shared, r.load_bits, "; ".join(r.faults()))
            for r in rows
        ]
        print(table(headers, body))
        print(
            "spills: bytes stored and loaded. load bits: of the streams, the bulk of what the kernel reads; - without."
        )
    failed = [r for r in results if isinstance(r, str)]
    for message in [*failed, *(f"{r.kernel}, sm_{r.arch}: {f}" for r in rows for f in r.faults())]:
        print(message, file=sys.stderr)
    return 1 if failed or any(r.faults() for r in rows) else 0


def architectures(text: str) -> list[int]:
    """The numbers of a comma-separated list.

    Raises:
        ValueError: one is no architecture that kernels are compiled for.
    """
    known = {str(arch): arch for arch in SHARED_LIMIT}
    names = text.split(",")
    if not set(names) <= set(known):
        raise ValueError(f"--arch: is {text!r}, must be numbers among {', '.join(known)}, with commas between")
    return [known[name] for name in names]


@command("profiling.resources")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 when a kernel has a fault or does not compile, 2 when there is none."""
    parser = Parser(prog="python -m profiling.resources", description=__doc__.partition("\n")[0])
    parser.add_argument("--op", help="one op family, e.g. lm_head; default all")
    parser.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)), help="default %(default)s")
    parser.add_argument("--backend", choices=BACKENDS, help="default both, cuda where there is an nvcc")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    options = parser.parse_args(arguments)
    wanted = architectures(options.arch)
    work: list[tuple[str, str, int]] = []
    families = {module.split(".")[-2] for module, _ in variants()} if options.backend != "cuda" else set()
    if options.backend != "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ValueError("TRITON_INTERPRET: is 1, must not be: kernels are interpreted, not compiled")
        work += [(module, variant.name, arch) for module, variant in variants(options.op) for arch in wanted]
    if options.backend != "triton":
        sources = cuda_resources.sources(options.op)
        families |= {f.name for f in pkgutil.iter_modules(ops.__path__) if cuda_resources.sources(f.name)}
        if shutil.which("nvcc") is not None:
            work += [(cuda_resources.FOLDER, source.name, arch) for source in sources for arch in wanted]
        elif options.backend == "cuda":
            parser.error("--backend: is cuda, there is no nvcc on PATH")
        elif sources:
            names = ", ".join(source.name for source in sources)
            print(f"not compiled, no nvcc on PATH: {names}", file=sys.stderr)
    if not work:
        parser.error(f"--op: is {options.op}, must be a family with kernels: {', '.join(sorted(families))}")
    return report(measure(work), options.json)


if __name__ == "__main__":
    sys.exit(main())
