"""What nvcc says of the CUDA kernels: no spills, rows copied 16 bytes at a time; their place beside Triton's."""

from __future__ import annotations

import pkgutil
import shutil
from pathlib import Path

import pytest

from dmtp_kernels import ops
from profiling import cuda_resources, resources

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")


@needs_nvcc
def test_no_kernel_of_the_commit_spills_and_rows_are_loaded_wide() -> None:
    (source,) = (s for s in cuda_resources.sources() if s.name == "commit_kv.cu")
    found = {usage.kernel: usage for usage in cuda_resources.usages(source, 90)}
    copies = [usage for name, usage in found.items() if name.startswith("commit_copy_kernel<uint4")]
    assert len(copies) == 2 and all(usage.load_bits == 128 for usage in copies)
    assert len(found) == 8 and not any(usage.faults() for usage in found.values())


@needs_nvcc
def test_a_source_that_does_not_compile_is_said(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void wrong_kernel() { nothing(); }\n")
    with pytest.raises(RuntimeError, match=r"nvcc does not compile wrong.cu, sm_80:\n.*nothing"):
        cuda_resources.usages(source, 80)


@needs_nvcc
def test_a_source_may_be_wrong_beside_others_that_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "good.cu").write_text("__global__ void good_kernel(float* x) { x[threadIdx.x] = 1; }\n")
    (tmp_path / "cuda" / "bad.cu").write_text("__global__ void bad_kernel() { nothing(); }\n")
    monkeypatch.setattr(cuda_resources, "CSRC", tmp_path)
    found = resources._work(cuda_resources.FOLDER, "good.cu", 90)
    assert isinstance(found, list)
    (good,) = found
    assert (good.kernel, good.backend, good.arch, good.spills, good.load_bits) == ("good_kernel", "cuda", 90, 0, None)
    bad = resources._work(cuda_resources.FOLDER, "bad.cu", 90)
    assert isinstance(bad, str) and bad.startswith("nvcc does not compile bad.cu, sm_90a")


def test_every_source_is_compiled_with_an_op_family() -> None:
    families = [f.name for f in pkgutil.iter_modules(ops.__path__) if f.ispkg]
    found = {source for family in families for source in cuda_resources.sources(family)}
    assert found == set(cuda_resources.sources()) != set()


def test_a_source_goes_with_those_that_include_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cuda").mkdir()
    for name, text in {"one.cu": '#include "cuda/shared.cuh"', "two.cu": "", "shared.cu": ""}.items():
        (tmp_path / "cuda" / name).write_text(text + "\n")
    monkeypatch.setattr(cuda_resources, "CSRC", tmp_path)
    assert [source.name for source in cuda_resources.sources("one")] == ["one.cu", "shared.cu"]
    assert [source.name for source in cuda_resources.sources("two")] == ["two.cu"]
    assert cuda_resources.sources("three") == []


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """What the command would compile, where it has an nvcc."""
    asked: list[tuple[str, str, int]] = []

    def measure(rows: list[tuple[str, str, int]]) -> list[resources.Usage | str]:
        asked.extend(rows)
        return []

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(resources, "measure", measure)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return asked


def test_one_command_compiles_both_kinds(work: list[tuple[str, str, int]]) -> None:
    assert resources.main(["--op", "advance", "--arch", "90"]) == 0
    assert {module for module, _, _ in work} == {"dmtp_kernels.ops.advance.config", cuda_resources.FOLDER}
    assert (cuda_resources.FOLDER, "advance.cu", 90) in work
    work.clear()
    assert resources.main(["--op", "advance", "--arch", "90", "--backend", "cuda"]) == 0
    assert work == [(cuda_resources.FOLDER, "advance.cu", 90)]
    work.clear()
    assert resources.main(["--op", "advance", "--arch", "90", "--backend", "triton"]) == 0
    assert work and cuda_resources.FOLDER not in {module for module, _, _ in work}


def test_without_nvcc_the_sources_are_named(
    work: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert resources.main(["--op", "advance"]) == 0
    assert {module for module, _, _ in work} == {"dmtp_kernels.ops.advance.config"}
    assert capsys.readouterr().err == "not compiled, no nvcc on PATH: advance.cu\n"
    with pytest.raises(SystemExit, match="2"):
        resources.main(["--op", "advance", "--backend", "cuda"])
    assert "--backend: is cuda, there is no nvcc on PATH" in capsys.readouterr().err


def test_a_family_without_sources_is_refused(
    work: list[tuple[str, str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        resources.main(["--op", "nope", "--backend", "cuda"])
    error = capsys.readouterr().err
    known = "accept, advance, block_attention, commit_kv"
    assert f"--op: is nope, must be a family with kernels: {known}" in error and not work
