"""The bandwidth probes run, see the size they are given, and are of this world."""

from __future__ import annotations

import json

import pytest
import torch

from profiling import bandwidth


@pytest.mark.parametrize("measure", [bandwidth.read_bandwidth, bandwidth.copy_bandwidth])
@pytest.mark.parametrize("nbytes", [1 << 24, (1 << 22) + 12345])
def test_a_plausible_figure(measure: object, nbytes: int) -> None:
    assert callable(measure)
    rate = measure("cpu", nbytes=nbytes, rounds=3)
    assert 1e8 < rate < 1e13  # from a cache


def test_the_fastest_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 10.0, 10.5, 20.0, 29.0])
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(clock))
    assert bandwidth.best_seconds(lambda: None, torch.device("cpu"), 3) == 0.5


def test_the_default_is_larger_than_the_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from pathlib import Path

    cache = Path(str(tmp_path)) / "size"
    monkeypatch.setattr(bandwidth, "_LAST_LEVEL_CACHE", cache)
    monkeypatch.setattr(bandwidth.os, "sysconf", {"SC_PHYS_PAGES": 1 << 23, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert bandwidth._size("cpu") == 1 << 29  # unknown caches
    cache.write_text("307200K\n")
    assert bandwidth._size("cpu") == 4 * 307200 * 1024
    cache.write_text("9000000K\n")
    assert bandwidth._size("cpu") == (1 << 35) // 8  # an eighth of the memory at most


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bandwidth, "_size", lambda device: 1 << 22)
    threads = torch.get_num_threads()
    try:
        assert bandwidth.main(["--json", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    entry = json.loads(capsys.readouterr().out)[0]
    assert entry["device"] == "cpu" and entry["threads"] == 1 and entry["read"] > 0 and entry["copy"] > 0
    assert bandwidth.main([]) == 0
    assert ("GPU: not measured" in capsys.readouterr().out) == (not torch.cuda.is_available())
