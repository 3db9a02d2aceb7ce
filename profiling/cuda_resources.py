"""Registers, spills and shared memory of the kernels of csrc/cuda, for `profiling.resources`.

Each source is compiled by nvcc as CMakeLists.txt has it compiled, to a cubin: no GPU and no driver are needed. "load
bits" is the widest global load of a kernel, since one struct carries all of its pointers; "shared" what it declares,
without what a launch asks for besides.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from profiling import machine_code
from profiling.usage import Usage

CSRC = Path(__file__).parents[1] / "csrc"
FOLDER = "csrc/cuda"
"""What stands for the sources among the modules of Triton's variants."""
FLAGS = ("-O3", "-std=c++17", "--fmad=false", f"-I{CSRC}", f"-I{CSRC / 'include'}")
FEATURES = {80: "80", 90: "90a", 100: "100a"}
"""What code is generated for."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SHARED = re.compile(r"(\d+) bytes smem")


def sources(op_family: str | None = None) -> list[Path]:
    """The files that have kernels, or those of one op family: named after it, or behind a header that these include."""
    found = sorted((CSRC / "cuda").glob("*.cu"))
    if op_family is None:
        return found
    texts = [source.read_text() for source in found if source.name.startswith(op_family)]
    return [s for s in found if s.name.startswith(op_family) or any(f'"cuda/{s.stem}.cuh"' in text for text in texts)]


def usages(source: Path, arch: int, nvcc: str = "nvcc") -> list[Usage]:
    """What every kernel of a source uses on one architecture.

    Raises:
        RuntimeError: nvcc refuses the source; its words are the message.
    """
    target = FEATURES[arch]
    with tempfile.TemporaryDirectory() as folder:
        keep = "--keep", f"--keep-dir={folder}", "-o", str(Path(folder) / "kernels.cubin")
        done = subprocess.run(
            [
                nvcc,
                *FLAGS,
                f"-gencode=arch=compute_{target},code=sm_{target}",
                "-cubin",
                "-Xptxas=-v",
                *keep,
                str(source),
            ],
            capture_output=True,
            text=True,
            preexec_fn=_interruptible,
        )
        if done.returncode != 0:
            raise RuntimeError(f"nvcc does not compile {source.name}, sm_{target}:\n{done.stderr}")
        ptx = (Path(folder) / f"{source.stem}.ptx").read_text()
    return list(_read(done.stdout + done.stderr, ptx, arch))


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the workers of profiling.resources ignore it


def _read(log: str, ptx: str, arch: int) -> Iterator[Usage]:
    bodies = {body[: body.index("(")]: body for body in re.split(r"\.entry ", ptx)[1:]}
    for part in re.split(r"(?=Compiling entry function)", log)[1:]:
        entry = _ENTRY.match(part)
        assert entry is not None
        registers, spills = machine_code.ptxas_usage(part)
        shared = _SHARED.search(part)
        loads = machine_code.global_loads(bodies[entry[1]])
        widest = max((load.bits for load in loads), default=None)
        yield Usage(_plain(entry[1]), "cuda", arch, registers, spills, int(shared[1]) if shared else 0, widest, {})


def _plain(name: str) -> str:
    """A mangled kernel's name with its template arguments, without namespaces and parameters."""
    if shutil.which("c++filt"):
        name = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    name = name.replace("(anonymous namespace)::", "").replace("dmtp::cuda::", "")
    found = re.search(r"\w+_kernel(<.*?>(?=\())?", name)
    return found[0] if found else name


if __name__ == "__main__":
    raise SystemExit("python -m profiling.resources --backend cuda [--op FAMILY]")
