"""`dmtp doctor` tells the truth on any machine: what runs, why not a better one, what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import dmtp_kernels
from dmtp_kernels import _library, backends, doctor


def test_report_is_json_and_names_every_op() -> None:
    found = json.loads(json.dumps(doctor.report()))
    assert set(found["ops"]) == set(_library.registered())
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["dmtp_kernels"] == dmtp_kernels.__version__
    for kinds in found["ops"].values():
        assert kinds["cpu"]["runs"] in backends.NAMES


def test_every_better_backend_has_a_reason() -> None:
    for op, kinds in doctor.report()["ops"].items():
        for kind, choice in kinds.items():
            better = backends.NAMES[: backends.NAMES.index(choice["runs"])]
            assert tuple(choice["why_not"]) == better, (op, kind)
            assert all(choice["why_not"].values()), (op, kind)


def test_reasons_tell_missing_from_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        backends._implementations, "accept_prefix", {"reference": "m:f", "triton": "m:f", "cuda": "m:f"}
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = doctor.report()
    why_not = found["ops"]["accept_prefix"]["cpu"]["why_not"]
    assert why_not["cpu"] == "accept_prefix has no cpu implementation"
    assert why_not["cuda"] == "cuda kernels need CUDA tensors, got cpu"
    assert why_not["triton"].startswith("triton")
    assert found["backends"]["cuda"]["cpu"] == {"ops": 0, "why_not": "cuda kernels need CUDA tensors, got cpu"}
    said = f"has no cpu implementation; not triton: {why_not['triton']}; not cuda: {why_not['cuda']}"
    assert said in doctor.render(found)


def test_forced_backend_that_cannot_run_is_said_not_raised() -> None:
    with backends.use_backend("cuda"):
        found = doctor.report()
    choice = found["ops"]["accept_prefix"]["cpu"]
    assert choice["runs"] is None and "'cuda' was forced" in choice["why_not"]["any"]
    assert "nothing" in doctor.render(found)


def test_missing_packages_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    found = doctor.report()
    assert found["versions"]["triton"] is None and found["versions"]["torch"] == torch.__version__
    assert "not installed" in doctor.render(found)


def test_works_with_torch_alone() -> None:
    code = (
        "import sys\n"
        "blocked = ('triton', 'typer', 'rich', 'matplotlib', 'safetensors', 'nvtx', 'scipy')\n"
        "sys.modules.update(dict.fromkeys(blocked))\n"
        "from dmtp_kernels import doctor\n"
        "print(doctor.render(doctor.report()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(dmtp_kernels.__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    assert "accept_prefix" in done.stdout


def test_checkpoint_presence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "ASSETS", tmp_path)
    assert doctor.report()["checkpoint"] == {"present": False, "files": {}}
    assert "absent" in doctor.render(doctor.report())
    (tmp_path / "tiny.safetensors").write_bytes(b"12345")
    assert doctor.report()["checkpoint"] == {"present": True, "files": {"tiny.safetensors": 5}}
    assert "tiny.safetensors" in doctor.render(doctor.report())


def test_settings_in_force_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMTP_EXAMPLE", "7")
    monkeypatch.setenv("UNRELATED", "8")
    found = doctor.report()
    assert found["settings"]["DMTP_EXAMPLE"] == "7" and "UNRELATED" not in found["settings"]
    assert "DMTP_EXAMPLE=7" in doctor.render(found)
