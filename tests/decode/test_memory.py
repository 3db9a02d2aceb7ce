"""Bytes of an engine's caches, what is free, and who says no before they are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dmtp_kernels.cli import app
from dmtp_kernels.decode import memory
from dmtp_kernels.decode.method import METHODS
from tests.decode.engine_cases import CHECKPOINT, caches, engine_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["autoregressive", "mtp4", "dflash", "dmtp"])
@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_bytes_are_those_of_the_engine(method: str, page_size: int) -> None:
    engine = engine_of(method, max_batch=3, max_tokens=90, page_size=page_size)
    nbytes = sum(tensor.nbytes for cache in caches(engine) for tensor in (*cache.k, *cache.v))
    assert memory.cache_bytes(CHECKPOINT, METHODS[method], 3, 90, page_size) == nbytes


def test_both_methods_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [METHODS["dmtp"], METHODS["dflash"]]
    wanted = sum(memory.cache_bytes(CHECKPOINT, method, 40, 96) for method in methods)
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(wanted / 0.9) + 9)
    memory.check_fits("batch", 40, CHECKPOINT, methods, 96)
    monkeypatch.setattr(memory, "free_bytes", lambda device: wanted // 2)
    with pytest.raises(ValueError, match=r"^batch: is 40, whose caches of 96 tokens take .* enough for 1[78]$"):
        memory.check_fits("batch", 40, CHECKPOINT, methods, 96)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.check_fits("batch", 10**9, CHECKPOINT, methods, 96)


@pytest.mark.parametrize(
    ("version", "entry", "names"),
    [
        (1, "4:cpu,memory:/a/b", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        (2, "0::/a/b", ("memory.max", "memory.current", "inactive_file")),
    ],
)
def test_the_narrowest_limit_counts(
    version: int, entry: str, names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used, inactive = names
    root = tmp_path / "cgroup"
    for path, most, now in (("a/b", "max" if version == 2 else str(1 << 62), 10), ("a", str(1 << 30), 1 << 29)):
        folder = (root / "memory" if version == 1 else root) / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text(f"{now}\n")
    (folder / "memory.stat").write_text(f"cache 7\n{inactive} 4096\n")
    (tmp_path / "group").write_text(f"3:cpuset:/\n{entry}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable:    2097152 kB\n")
    for attribute, name in (("_GROUPS", "cgroup"), ("_GROUP", "group"), ("_MEMORY", "meminfo")):
        monkeypatch.setattr(memory, attribute, tmp_path / name)
    assert memory.free_bytes(CPU) == (1 << 29) + 4096
    (tmp_path / "group").unlink()
    assert memory.free_bytes(CPU) == 2 << 30
    (tmp_path / "meminfo").unlink()
    assert memory.free_bytes(CPU) is None


def test_this_machine_has_memory() -> None:
    free = memory.free_bytes(CPU)
    assert free is None or 1 << 26 < free < 1 << 50


@pytest.mark.parametrize(
    "arguments", [["profile", "--batch", "4096"], ["generate", "a", "--batch", "4096"], ["compare", "--batch", "4096"]]
)
def test_a_batch_that_does_not_fit_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 28)
    monkeypatch.setattr("dmtp_kernels.decode.engine.build_stack", lambda *_, **__: pytest.fail("made"))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "error: batch: is 4096, whose caches of" in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
