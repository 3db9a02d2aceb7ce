"""Ranges of a round and its stages, as each who can watch sees them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dmtp_kernels.decode import ranges
from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.ranges import label, ranged, watched
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES
from tests.decode.engine_cases import engine_of, prompt

ROOT = Path(__file__).parents[2]
DMTP = (
    "T1 selection+embedding+fusion",
    "DFlash",
    "verify",
    "accept",
    "MTP advance",
    "commit",
    "round advance",
)
"""What the source calls the stages, in order."""


def seen_of(method: str, graphs: str | None = None) -> list[tuple[int, str, str]]:
    """`(depth, name, label)` of the ranges of two rounds."""
    seen, depth = [], 0

    @contextmanager
    def watcher(name: str, text: str) -> Iterator[None]:
        nonlocal depth
        seen.append((depth, name, text))
        depth += 1
        yield
        depth -= 1

    engine = engine_of(method, graphs=graphs)
    engine.submit(Request(prompt(4, 1), 40))
    engine.step()
    with watched(watcher):
        engine.step()
        engine.step()
    engine.step()
    return seen


@pytest.mark.parametrize("graphs", [None, "exact", "padded"])
@torch.no_grad()
def test_stages_lie_in_their_round_eager_and_by_the_graph_runner(graphs: str | None) -> None:
    stages = [(1, name, text) for name, text in zip(STAGES, DMTP, strict=True)]
    assert seen_of("dmtp", graphs) == 2 * [(0, "round", "round"), *stages]


def test_labels_say_what_a_method_does_in_a_stage() -> None:
    def drafts(method: str) -> list[str]:
        return [label(name, METHODS[method]) for name in ("t1", "draft")]

    assert drafts("dmtp") == drafts("low_rank") == list(DMTP[:2])
    assert drafts("dflash") == ["block embedding", "DFlash"]
    assert drafts("mtp4") == ["T1 selection", "MTP chain"]
    assert drafts("autoregressive") == ["t1", "draft"]
    assert label("mtp+commit") == "MTP advance, commit"


def test_nobody_watching_costs_no_wrapper() -> None:
    assert all(rounds.stage(name) is getattr(rounds, name) for name in STAGES)
    with torch.profiler.profile():
        assert rounds.stage("verify") is not rounds.verify
    assert rounds.stage("verify") is rounds.verify


def test_an_error_closes_its_ranges() -> None:
    closed = []

    @contextmanager
    def watcher(name: str, text: str) -> Iterator[None]:
        try:
            yield
        finally:
            closed.append(name)

    def fails() -> None:
        raise KeyError("planted")

    with watched(watcher), pytest.raises(KeyError, match="planted"):
        ranged("round", ranged("verify", fails))()
    assert closed == ["verify", "round"] and not ranges._watchers


def test_torch_profiler_sees_them() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        seen_of("dflash")
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["round"] == counts["DFlash"] == counts["block embedding"] == counts["round advance"] == 4


SCRIPT = """
import sys, torch
from dmtp_kernels.decode.ranges import nvtx_ranges
from dmtp_kernels.decode.request import Request
from tests.decode.engine_cases import engine_of, prompt

with torch.no_grad():
    engine = engine_of("dmtp", graphs=sys.argv[1] if sys.argv[1:] else None)
    engine.submit(Request(prompt(4, 1), 40))
    engine.step()
    nvtx_ranges(False)
    engine.step()
"""


def test_an_nvtx_tool_sees_them(tmp_path: Path) -> None:
    pytest.importorskip("nvtx")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    tool, record = tmp_path / "recorder.so", tmp_path / "record.txt"
    source = Path(__file__).with_name("nvtx_recorder.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tool), str(source)], check=True, timeout=60)
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(tool), "NVTX_RECORD": str(record), "PYTHONPATH": str(ROOT)}
    environment.pop("NVTX_DISABLE", None)
    for arguments in ([], ["exact"]):
        command = [sys.executable, "-c", SCRIPT, *arguments]
        subprocess.run(command, check=True, timeout=120, env=environment, cwd=ROOT)
        lines = [line.split("\t") for line in record.read_text().splitlines()]
        ours = [line for line in lines if line[1] == "dmtp"]
        stages = [line for text in DMTP for line in (["push", "dmtp", text], ["pop", "dmtp"])]
        assert ours == [["push", "dmtp", "round"], *stages, ["pop", "dmtp"]]


def test_without_the_package_ranges_are_free() -> None:
    code = (
        "import sys; sys.modules['nvtx'] = None\n"
        "from dmtp_kernels.decode import ranges, round as rounds\n"
        "assert ranges.nvtx is None and rounds.stage('verify') is rounds.verify\n"
        "ranges.nvtx_ranges(True)\n"
        "assert rounds.stage('verify') is rounds.verify\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
