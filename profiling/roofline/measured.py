"""Every op at serving size on this machine: its floor, its time, and how much of the floor it reaches."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dmtp_kernels.bench.cases import BenchCase, Problem, Suite, tensors_in
from dmtp_kernels.bench.measure import medians, readers
from dmtp_kernels.bench.progress import Report, silent
from dmtp_kernels.ops._spec import Spec
from profiling.bandwidth import best_seconds
from profiling.table import table

ABOVE = (
    "* above 100 %: what the op reads was partly in the caches, or memory was slower in the passes that measured the "
    "bandwidth than in the op's calls; read it as: at the floor."
)
SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}


@dataclass(frozen=True)
class Limits:
    """Bytes/s and FLOP/s of a machine; products of 16-bit inputs run at `bf16`, all others at `fp32`."""

    bandwidth: float
    bf16: float
    fp32: float


@dataclass(frozen=True)
class Floor:
    """The least time of one call and what sets it, `memory` or `compute`."""

    nbytes: int
    flops: int
    seconds: float
    bound: str


def floor(spec: Spec, inputs: Sequence[Any], limits: Limits) -> Floor:
    """`max(bytes / bandwidth, flops / rate)` of the spec's bytes and flops at these inputs."""
    nbytes, flops = spec.floor_bytes(*inputs), spec.flops(*inputs)
    floats = (t.dtype.itemsize for t in tensors_in(tuple(inputs)) if t.is_floating_point())
    rate = limits.bf16 if next(floats, 4) <= 2 else limits.fp32
    memory, compute = nbytes / limits.bandwidth, flops / rate
    return Floor(nbytes, flops, max(memory, compute), "memory" if memory >= compute else "compute")


def matrix_rate(
    dtype: torch.dtype, device: torch.device, *, sizes: Sequence[int] | None = None, rounds: int = 5
) -> float:
    """FLOP/s of the fastest square matrix product over `sizes`, the best of `rounds` each."""
    rates = []
    for n in sizes or SIZES[device.type]:
        generator = torch.Generator(device).manual_seed(0)
        a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def product(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            torch.mm(a, b, out=out)

        rates.append(2 * n**3 / best_seconds(product, device, rounds))
    return max(rates)


@dataclass(frozen=True)
class Row:
    """One op at one size: `ms` with cold caches, `again_ms` of a second call right after, `share` = floor_ms / ms.

    The bandwidth was measured in the rounds that timed the op.
    """

    op: str
    case: str
    shape: dict[str, int]
    backend: str
    bytes: int
    flops: int
    bound: str
    floor_ms: float
    ms: float
    again_ms: float
    share: float
    bandwidth_gb_s: float


def measure(
    cases: Iterable[BenchCase], rates: dict[str, float], device: torch.device, rounds: int = 9, say: Report = silent
) -> Iterator[Row]:
    """Time the op of each case, by the backend that runs, in turn with streaming passes that measure the bandwidth.

    Medians. The passes displace what the caches hold, data and code alike. What a call wrote into its inputs is put
    back after it.
    """
    passes, passed = readers(device)
    for case in cases:
        say(f"{case.op} {case.name}")
        problem = case.load()
        yield _row(problem, passes, passed, rates, device, rounds)
        del problem
        gc.collect()


def _row(
    problem: Problem, passes: dict[str, Any], passed: int, rates: dict[str, float], device: torch.device, rounds: int
) -> Row:
    call = problem.fused()
    first, second = ({f"reset {i}": problem.reset} if problem.mutated else {} for i in range(2))
    times = medians({"op": call, **first, "again": call, **second, **passes}, rounds, device)
    bandwidth = passed / min(times[name] for name in passes) * 1e3
    least = floor(problem.spec, problem.inputs, Limits(bandwidth, **rates))
    return Row(
        problem.case.op,
        problem.case.name,
        problem.case.shape,
        problem.backend,
        least.nbytes,
        least.flops,
        least.bound,
        1e3 * least.seconds,
        times["op"],
        times["again"],
        1e3 * least.seconds / times["op"],
        bandwidth / 1e9,
    )


def machine(
    device: torch.device, names: Sequence[str] | None, scale: int, rounds: int, say: Report = silent
) -> dict[str, Any]:
    """`{"device", "threads", "bf16_tflop_s", "fp32_tflop_s", "rounds", "ops": [Row as a dict]}`.

    Raises:
        ValueError: `names` has one that is no op's.
    """
    chosen = list(Suite(device, scale).cases(names))
    say("matrix products")
    rates = {name: matrix_rate(dtype, device) for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    rows = [asdict(row) for row in measure(chosen, rates, device, rounds, say)]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        **{f"{name}_tflop_s": rate / 1e12 for name, rate in rates.items()},
        "rounds": rounds,
        "scale": scale,
        "ops": rows,
    }


def machine_table(found: dict[str, Any]) -> str:
    """Text of `machine`."""
    bandwidths = [row["bandwidth_gb_s"] for row in found["ops"]]
    title = (
        f"MEASURED on {found['device']}, {found['threads']} threads: memory {min(bandwidths):.1f} to "
        f"{max(bandwidths):.1f} GB/s, matrix products {found['bf16_tflop_s']:.2f} TFLOP/s bf16, "
        f"{found['fp32_tflop_s']:.2f} fp32; medians of {found['rounds']} rounds"
    )
    rows = [
        (
            row["op"],
            row["case"],
            row["backend"],
            row["bytes"],
            row["bound"],
            1e3 * row["floor_ms"],
            1e3 * row["ms"],
            1e3 * row["again_ms"],
            _percent(row["share"]),
        )
        for row in found["ops"]
    ]
    headers = ("op", "case", "backend", "floor bytes", "bound by", "floor us", "us", "us again", "% of floor")
    note = f"\n{ABOVE}" if any(row["share"] > 1 for row in found["ops"]) else ""
    return f"{title}\n{table(headers, rows)}{note}"


def _percent(share: float) -> str:
    return f"{100 * share:7.3f}{'*' if share > 1 else ''}"
