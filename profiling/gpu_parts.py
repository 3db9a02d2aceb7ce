"""The parts of `profiling/gpu_check.sh`, each in a process group of its own with its own time limit.

A part that fails, hangs or cannot run costs itself alone and is recorded as such. Needs nothing but Python here: what a
part needs, it may lack. Results go to `<output>/<device>.json`, what the parts printed to `<device>.log`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from profiling.command import Parser, command, ends_on_signals, make_directory

ROOT = Path(__file__).parents[1]
TOTAL_SECONDS = 295.0
PEERS = ("flash_attn", "flash_attn_interface", "flashinfer", "vllm", "sglang")
MEMCHECK = {
    **{"accept_prefix": "ragged", "accept_rejection": "ragged", "accept_block": "ragged", "sample_rows": "filters"},
    **{"advance_round": "page_one", "block_attention": "bf16", "commit_kv": "scaled", "commit_round": "scaled"},
    **{"draft_page_table": "page_one", "draft_page_table_from_slots": "page_one", "fused_t1_prep": "dual"},
    **{"lm_head_select": "odd", "lm_head_screen": "int8", "lm_head_rescore": "list"},
}
"""The small case of each op that runs under compute-sanitizer."""
_PROBE_SECONDS = 60
_PROBE = """
import importlib.util, json, torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
peers = {p: importlib.util.find_spec(p) is not None for p in %r}
print(json.dumps({"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "peers": peers}))
"""


@dataclass(frozen=True)
class Part:
    """One command and what is kept of it.

    Attributes:
        seconds: its time limit.
        needs: program that must be on PATH.
        where: `gpu`, `cpu` (a dry run's stand-in) or `both`.
        result: it prints one JSON object, which is kept under its name.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    needs: str | None = None
    where: str = "gpu"
    result: bool = False


def parts() -> list[Part]:
    """All parts, in their order."""
    py = sys.executable
    pytest = (py, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    bench = (py, "-m", "dmtp_kernels.cli", "bench")
    cases = " or ".join(f"{op}-{case}" for op, case in MEMCHECK.items())
    # a compiler takes seconds a case: three ops against torch.compile
    heavy = [w for op in ("fused_t1_prep", "lm_head_select", "block_attention") for w in ("--op", op)]
    t1 = ("t1", "--device", "cuda", "--vocab", "62080", "--batch", "1,8,32", "--rounds", "50", "--json")
    # which of triton and cuda goes first in `backends.choose` is for this comparison to say
    backends = ("--entries", "triton,cuda,flash,eager")
    attention = ("block_attention", "--device", "cuda", "--batch", "1,8", *backends, "--json")
    return [
        Part("build", 60, ("make", "system", "SYSTEM=1", f"PYTHON={py}"), needs="cmake"),
        Part("doctor", 20, (py, "-m", "dmtp_kernels.cli", "doctor"), where="both"),
        Part("correctness", 70, (*pytest, "tests/gpu", "--ignore", "tests/gpu/test_graphs_cuda.py")),
        Part("graphs", 45, (*pytest, "tests/gpu/test_graphs_cuda.py")),
        Part(
            "memcheck",
            60,
            ("compute-sanitizer", "--error-exitcode", "9", *pytest, "tests/gpu", "-k", f"reference and ({cases})"),
            needs="compute-sanitizer",
        ),
        Part("ops", 60, (*bench, "ops", "--device", "cuda", "--rounds", "20", "--json"), result=True),
        Part("t1_tp4", 45, (*bench, *t1), result=True),
        Part("attention", 30, (*bench, *attention), result=True),
        Part(
            "compiled",
            60,
            (*bench, "ops", "--device", "cuda", *heavy, "--entries", "op,eager,compiled", "--rounds", "10", "--json"),
            result=True,
        ),
        Part("configure", 30, ("cmake", "-S", ".", "-B", "build/dry", f"-DPython_EXECUTABLE={py}"), "cmake", "cpu"),
        Part("cpu_correctness", 90, (*pytest, "tests/test_bench_cases.py"), where="cpu"),
        Part("machine_code", 60, (py, "-m", "profiling.resources", "--op", "draft_pages"), where="cpu"),
        Part("cpu_ops", 60, (*bench, "ops", "--quick", "--threads", "1", "--json"), where="cpu", result=True),
    ]


def run(part: Part, limit: float, log: TextIO) -> tuple[dict[str, Any], Any]:
    """Run one part; its record, and the JSON object it printed or None."""
    record: dict[str, Any] = {"part": part.name, "limit_s": round(limit, 1), "exit": None, "seconds": 0.0}
    if part.needs is not None and shutil.which(part.needs) is None:
        return record | {"status": f"not run: {part.needs} is not on PATH"}, None
    if limit <= 0:
        return record | {"status": "not run: no time was left"}, None
    print(f"== {part.name}", file=log, flush=True)
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if part.result else log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        return record | {"status": f"not run: {error}"}, None
    printed = ""
    try:
        printed = process.communicate(timeout=limit)[0] or ""
        status = "ok" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        status = "timed out"
    finally:
        # what it started may outlive it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    record |= {"exit": process.returncode, "seconds": round(time.monotonic() - start, 1), "status": status}
    if not part.result:
        return record, None
    try:
        return record, _without_samples(json.loads(printed))
    except ValueError:
        return record | {"status": "failed" if status == "ok" else status}, None


def _without_samples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_samples(v) for k, v in value.items() if k != "samples"}
    return [_without_samples(v) for v in value] if isinstance(value, list) else value


def check(
    output: Path, dry: bool, chosen: Sequence[Part] | None = None, total: float = TOTAL_SECONDS
) -> dict[str, Any]:
    """Run all parts and write the results; also what they are.

    Raises:
        ValueError: nothing can run here, or the results cannot be written.
    """
    start = time.monotonic()
    make_directory("--output", output)
    words = [sys.executable, "-c", _PROBE % (PEERS,)]
    try:
        probe = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{sys.executable} has not imported torch in {_PROBE_SECONDS} s") from None
    if probe.returncode != 0:
        raise ValueError(f"{sys.executable} has no torch: {probe.stderr.strip()[-200:]}")
    machine = json.loads(probe.stdout)
    if machine["device"] is None and not dry:
        raise ValueError("no CUDA device; --dry-run runs what a CPU can")
    name = "dry-run" if dry else machine["device"].lower().replace(" ", "-")
    records, results = [], {}
    with (output / f"{name}.log").open("w") as log:
        for part in parts() if chosen is None else chosen:
            if part.where not in ("both", "cpu" if dry else "gpu"):
                if dry:
                    records.append({"part": part.name, "status": "not measured: dry run", "exit": None, "seconds": 0.0})
                continue
            limit = min(part.seconds, total - (time.monotonic() - start))
            record, printed = run(part, limit, log)
            records.append(record)
            if part.result:
                results[part.name] = printed if printed is not None else "not measured"
            print(f"{part.name}: {record['status']}, {record['seconds']:.0f} s", flush=True)
    found = {
        "device": machine["device"] or "not measured",
        "dry_run": dry,
        "torch": machine["torch"],
        "cuda": machine["cuda"],
        "peers": {p: "installed" if there else "not installed" for p, there in machine["peers"].items()},
        "seconds": round(time.monotonic() - start, 1),
        "parts": records,
        "results": results,
    }
    _replace(output / f"{name}.json", json.dumps(found, indent=1) + "\n")
    return found


def _replace(path: Path, text: str) -> None:
    # not by dmtp_kernels._files: a package that cannot be imported is a finding here
    part = path.with_suffix(".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"--output: cannot write {path}: {error.strerror or error}") from None


def summary(found: dict[str, Any]) -> str:
    """A line a part and a line a timed case."""
    lines = [f"{r['part']:<16} {r['status']}" for r in found["parts"]]
    for name, result in found["results"].items():
        if not isinstance(result, dict):
            lines.append(f"{name}: not measured")
            continue
        for case in result["cases"]:
            lines.append(f"{name:<10} " + _case_line(case))
    return "\n".join(lines)


def _case_line(case: dict[str, Any]) -> str:
    share = f"{100 * case['share_of_bandwidth']:.0f} % of bandwidth"
    if "entries" not in case:
        sizes = " ".join(f"{k}={v}" for k, v in case["shape"].items() if v is not None)
        return (
            f"{case['op']} {case['entry']} {sizes}: {case['ms']:.4f} ms, {case['ratio_to_eager']:.2f} x eager, {share}"
        )
    against = ", ".join(f"{v['median']:.2f} x {k}" for k, v in case["speedup"].items()) or "no baseline"
    wrong = "" if case["agrees"] else f" WRONG: {case['disagreement']}"
    return f"{case['op']} {case['case']}: {case['entries']['op']['median']:.4f} ms, {against}, {share}{wrong}"


@command("gpu_check")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where a part failed or timed out, 2 where nothing can run."""
    parser = Parser(prog="profiling/gpu_check.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="only the parts that a CPU can run")
    parser.add_argument("--output", type=Path, help="default: profiling/results, of a dry run build/gpu_check")
    options = parser.parse_args(arguments)
    output = options.output or ROOT / ("build/gpu_check" if options.dry_run else "profiling/results")
    with ends_on_signals():
        found = check(output, options.dry_run)
    print(summary(found))
    if options.dry_run:
        print("dry run: nothing was measured on a GPU")
    print(f"{found['seconds']:.0f} s; results in {output}")
    return int(any(r["status"] in ("failed", "timed out") for r in found["parts"]))


if __name__ == "__main__":
    sys.exit(main())
