"""The compiled library of CUDA kernels where there is no GPU: it loads, says what it lacks, and refuses CPU tensors."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmtp_kernels import BackendUnavailable, backends
from tests.cuda_host.cases import CPU, cuda_ops
from tests.cuda_host.host import ROOT

CUDA = torch.device("cuda")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had asked for the library yet."""
    monkeypatch.setattr(backends, "_cuda", None)
    monkeypatch.setattr(backends, "_chosen", {})


@pytest.mark.skipif(backends.cuda_missing() is not None, reason=str(backends.cuda_missing()))
def test_it_loads_without_a_gpu_and_refuses_cpu_tensors() -> None:
    code = (
        "import torch\n"
        "from dmtp_kernels import backends\n"
        "ids = torch.zeros(1, 2, dtype=torch.int64)\n"
        "one = ids[:, 0]\n"
        "try: backends.cuda_library().accept_prefix(ids, ids, ids[:, :0], one, None, one, one, one, ids, one)\n"
        "except NotImplementedError as error: print(str(error).splitlines()[0])\n"
        "print(torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    refusal, touched = done.stdout.splitlines()
    assert refusal.startswith("Could not run 'dmtp_cuda::accept_prefix' with arguments from the 'CPU' backend")
    assert touched == "False"


@pytest.mark.parametrize("op", cuda_ops())
def test_a_forced_cuda_backend_refuses_cpu_tensors(op: str) -> None:
    assert backends.unavailable(op, "cuda", CPU) == "cuda kernels need CUDA tensors, got cpu"
    with (
        backends.use_backend("cuda", op),
        pytest.raises(BackendUnavailable, match=f"{op}: backend 'cuda' was forced, but cuda kernels need CUDA tensors"),
    ):
        backends.implementation(op, CPU)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (None, r"_cuda.so is missing: nothing was compiled \(`make setup` does\)"),
        (SimpleNamespace(), "_cuda.so is missing: it was not asked for"),
        (SimpleNamespace(NO_CUDA="it was built without a usable nvcc"), "is missing: it was built without a usable"),
        (SimpleNamespace(NO_CUDA="", __file__="/nowhere/_build.py"), "_cuda.so does not load: .*/nowhere/_cuda.so"),
    ],
)
def test_what_is_missing_is_said(unloaded: None, monkeypatch: pytest.MonkeyPatch, build: Any, reason: str) -> None:
    monkeypatch.setitem(sys.modules, "dmtp_kernels._build", build)
    with pytest.raises(BackendUnavailable, match=reason):
        backends.cuda_library()
    said = backends.unavailable("accept_prefix", "cuda", CUDA)
    assert said is not None and said == backends.cuda_missing()


@pytest.mark.parametrize(("runs", "chosen"), [(("cuda", "triton"), "triton"), (("cuda", "reference"), "cuda")])
def test_triton_goes_first_since_nothing_was_measured(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, runs: tuple[str, ...], chosen: str
) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda op, backend, device: None if backend in runs else "not here")
    assert backends.choose("accept_prefix", CUDA) == chosen
