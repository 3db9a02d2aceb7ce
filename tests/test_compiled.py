"""The compiled module: what it runs, on whose threads, and what is said where it is missing or does not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import dmtp_kernels
from dmtp_kernels import BackendUnavailable, backends, doctor
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep

ROOT = Path(dmtp_kernels.__file__).parents[1]
CPU = torch.device("cpu")
MISSING = backends.compiled_missing()
needs_module = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def prepare() -> torch.Tensor:
    table, ids = torch.eye(4), torch.tensor([1, 2])
    return fused_t1_prep(ids, table[:2], None, table, Fusion(), mask_id=3, t1_override=ids)[2]


def python(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **settings}
    )


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had asked for the module yet."""
    monkeypatch.setattr(backends, "_compiled", None)
    monkeypatch.setattr(backends, "_chosen", {})


@needs_module
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_are_torchs(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = backends.compiled().parallel_parts(301, 1)
        assert len(parts) == threads
        assert backends.compiled().parallel_parts(301, 301) == [(0, 301)]
    finally:
        torch.set_num_threads(before)
    assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])] and parts[-1][1] == 301


@needs_module
def test_capability_can_be_lowered_and_raised_again() -> None:
    compiled = backends.compiled()
    before = compiled.capability()
    names = compiled.capabilities()
    assert names == ["baseline", "avx2", "avx512", "amx"][: len(names)] and before in names
    try:
        for name in names:
            compiled.set_capability(name)
            assert compiled.capability() == name and doctor.report()["compiled"]["capability"] == name
        with pytest.raises(ValueError, match="name: is 'neon', must be one of baseline, avx2, avx512, amx"):
            compiled.set_capability("neon")
    finally:
        compiled.set_capability(before)


@needs_module
@pytest.mark.parametrize(("wanted", "printed"), [("baseline", "baseline"), ("", None)])
def test_the_setting_lowers_and_never_raises(wanted: str, printed: str | None) -> None:
    code = "from dmtp_kernels import backends; c = backends.compiled(); print(c.capability(), c.capabilities()[-1])"
    done = python(code, DMTP_CPU_CAPABILITY=wanted)
    assert done.returncode == 0, done.stderr
    runs, best = done.stdout.split()
    assert runs == (printed or best)


@needs_module
def test_a_setting_that_names_no_capability_is_an_error_with_a_name() -> None:
    code = (
        "from dmtp_kernels import backends, doctor\n"
        "print(doctor.render(doctor.report()))\n"
        "try: backends.compiled().capability()\n"
        "except ValueError as error: print('raised', error)\n"
    )
    done = python(code, DMTP_CPU_CAPABILITY="sse9")
    assert done.returncode == 0, done.stderr
    message = "DMTP_CPU_CAPABILITY: is 'sse9', must be one of baseline, avx2, avx512, amx"
    assert done.stdout.count(message) == 2 and f"raised {message}" in done.stdout


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (None, "dmtp_kernels._C is missing: nothing was compiled"),
        (
            SimpleNamespace(MISSING="it was built without a C++ compiler", TORCH=""),
            "it was built without a C++ compiler",
        ),
        (SimpleNamespace(MISSING="", TORCH="2.0.0+x"), "was compiled for torch 2.0.0+x, this is"),
        (SimpleNamespace(MISSING="", TORCH=torch.__version__), "dmtp_kernels._C does not load: "),
    ],
)
def test_without_the_module_the_reference_runs_and_the_reason_is_said(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, build: object, reason: str
) -> None:
    want = prepare()
    monkeypatch.setattr(backends, "_compiled", None)
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setitem(sys.modules, "dmtp_kernels._build", build)
    monkeypatch.setitem(sys.modules, "dmtp_kernels._C", None)
    assert torch.equal(prepare(), want) and backends.choose("fused_t1_prep", CPU) == "reference"
    found = doctor.report()
    assert reason in found["ops"]["fused_t1_prep"]["cpu"]["why_not"]["cpu"]
    assert reason in found["compiled"]["why_not"] and reason in doctor.render(found)
    with pytest.raises(BackendUnavailable, match="_C"):
        backends.compiled()
    with backends.use_backend("cpu"), pytest.raises(BackendUnavailable, match="'cpu' was forced, but dmtp_kernels"):
        prepare()


def test_a_file_that_is_no_module_is_a_reason(unloaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_C.abi3.so").write_bytes(b"not a shared object")
    monkeypatch.setitem(sys.modules, "dmtp_kernels._build", ModuleType("_build"))
    monkeypatch.setattr(sys.modules["dmtp_kernels._build"], "MISSING", "", raising=False)
    monkeypatch.setattr(sys.modules["dmtp_kernels._build"], "TORCH", torch.__version__, raising=False)
    monkeypatch.delitem(sys.modules, "dmtp_kernels._C", raising=False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()])
    monkeypatch.setattr(dmtp_kernels, "__path__", [str(tmp_path)])
    reason = backends.compiled_missing()
    assert reason is not None and "does not load" in reason


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.parametrize("lacking", ["compiler", "torch"])
def test_a_build_without_tools_gives_a_package_that_says_so(lacking: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    settings = {"CXX": "/nowhere/c++"} if lacking == "compiler" else {"PYTHONPATH": str(tmp_path)}
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), *generator]
    environment = {**os.environ, "CXX": "", **settings}
    if not environment["CXX"]:
        del environment["CXX"]
    done = subprocess.run(
        [*command, f"-DPython_EXECUTABLE={sys.executable}"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    installed = subprocess.run(
        ["cmake", "--install", str(tmp_path / "build"), "--prefix", str(tmp_path / "to")],
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr
    written = sorted(p.name for p in (tmp_path / "to" / "dmtp_kernels").iterdir())
    assert written == ["_build.py"]
    found: dict[str, str] = {}
    exec((tmp_path / "to" / "dmtp_kernels" / "_build.py").read_text(), found)
    assert found["TORCH"] == "" and {"compiler": "C++ compiler", "torch": "torch"}[lacking] in found["MISSING"]
