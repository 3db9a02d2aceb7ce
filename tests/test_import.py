"""What `import dmtp_kernels` may touch, and that it works with neither triton nor a GPU."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dmtp_kernels
from dmtp_kernels import ops

ROOT = Path(dmtp_kernels.__file__).parents[1]
FAMILIES = {f"dmtp_kernels.ops.{m.name}" for m in pkgutil.iter_modules(ops.__path__) if m.ispkg}

# torch first, so that the rest of the process is this package's own doing
PROBE = """
import json, sys, time
sys.modules["triton"] = None
import torch

def touched(*args, **kwargs):
    raise AssertionError("the driver was touched")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = touched
after_torch, before = time.process_time(), set(sys.modules)
import dmtp_kernels
seconds = time.process_time()
print(json.dumps({
    "torch": after_torch, "all": seconds, "new": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that sees no GPU and imports this checkout."""
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    settings.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """The quicker of two imports: the first may still compile bytecode or read a cold disk."""
    runs = [fresh(PROBE) for _ in range(2)]
    assert [r.returncode for r in runs] == [0, 0], runs[0].stderr
    return min((json.loads(r.stdout) for r in runs), key=lambda r: r["all"])


def test_row_167_import_without_gpu_and_triton(probe: dict[str, Any]) -> None:
    # https://github.com/deepseek-ai/DeepSeek-R1/issues/493: autotune at module level asks for a driver
    assert probe["cuda"] is False
    assert set(probe["new"]) >= FAMILIES, "importing the package registers every op's schema"


def test_import_is_quick(probe: dict[str, Any]) -> None:
    # CPU seconds of the process, torch included: unlike wall time they do not grow while other processes run
    assert probe["all"] < 3.0, f"{probe['all']:.2f} s, {probe['torch']:.2f} of them torch's own"


def test_import_brings_no_other_part(probe: dict[str, Any]) -> None:
    parts = {".".join(m.split(".")[:2]) for m in probe["new"]}
    above = {f"dmtp_kernels.{p}" for p in ("decode", "models", "training", "engines", "testing", "cli", "doctor")}
    assert not parts & above
    assert not parts & {"dmtp_kernels._C", "dmtp_kernels._build"}, "the compiled module is loaded at the first call"
    others = {"triton", "typer", "rich", "safetensors", "matplotlib", "scipy"}
    assert not {m.split(".")[0] for m in probe["new"]} & others


def test_row_167_gpu_only_backend_gives_a_clear_error() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, dmtp_kernels\n"
        "from dmtp_kernels.ops.accept import accept_prefix\n"
        "ids = torch.tensor([[1, 2, 3]])\n"
        "def run(): return accept_prefix(ids, ids, stop_ids=ids[0, :0], budget=torch.tensor([9]))\n"
        "print(run().commit_len.tolist())\n"
        "for backend in ('triton', 'cuda'):\n"
        "    with dmtp_kernels.use_backend(backend):\n"
        "        try: run()\n"
        "        except dmtp_kernels.BackendUnavailable as error: print(error)\n"
    )
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    reference, *errors = done.stdout.splitlines()
    assert reference == "[1]"
    assert len(errors) == 2
    for backend, error in zip(("triton", "cuda"), errors, strict=True):
        assert error.startswith(f"accept_prefix: backend '{backend}' was forced, but ")
