"""A profile's trace and figure."""

from __future__ import annotations

import gzip
import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

from dmtp_kernels.cli import app
from dmtp_kernels.decode.profile import profile_methods
from dmtp_kernels.decode.profile_files import COLORS, check_trace, plot_stages, trace_rounds
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES
from tests.decode.engine_cases import engine_of, prompt
from tests.decode.test_ranges import DMTP

REQUESTS = [Request(prompt(4 + i, i), 60, temperature=1.0, seed=i) for i in range(2)]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that takes so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def figures() -> list[dict[str, Any]]:
    """A profile whose stages are all tall enough to be seen."""
    found, other = profile_methods([engine_of("dmtp"), engine_of("dflash")], REQUESTS, rounds=2, warmup=1)
    for result, unit in ((found, 1.0), (other, 0.5)):
        for index, row in enumerate(result["stages"].values()):
            row |= {"ms": unit * (1 + index), "share": 1 / 7}
        result["round_ms"] = unit * 28
    return [other, found]


def is_grey(color: int) -> bool:
    channels = color >> 16, color >> 8 & 255, color & 255
    return max(channels) - min(channels) < 32


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_holds_every_stage_inside_its_round(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    trace_rounds(engine_of("dmtp"), REQUESTS, path, rounds=3, warmup=2)
    assert list(tmp_path.iterdir()) == [path]
    text = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    ranges = [(e["ts"], e["ts"] + e["dur"], e["name"], e["tid"]) for e in events if e["cat"] == "user_annotation"]
    rounds = sorted(r for r in ranges if r[2] == "round")
    assert len(rounds) == 3
    for begin, end, _, thread in rounds:
        inside = sorted(r for r in ranges if begin <= r[0] and r[1] <= end and r[2] != "round")
        assert tuple(r[2] for r in inside) == DMTP and {r[3] for r in inside} == {thread}
        assert all(a[1] <= b[0] for a, b in pairwise(inside)), "stages overlap"
    assert len(ranges) == 3 * (1 + len(DMTP))
    verify = min(r for r in ranges if r[2] == "verify")
    assert [e for e in events if e["cat"] == "cpu_op" and verify[0] <= e["ts"] <= verify[1] and "mm" in e["name"]]


def test_a_figure_has_a_colour_per_stage(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "stages.png"
    plot_stages(figures(), path)
    assert list(tmp_path.iterdir()) == [path]
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    counts = dict(zip(*map(list, numpy.unique(pixels, return_counts=True)), strict=True))
    wanted = {name: int(COLORS[name][1:], 16) for name in STAGES}
    assert len(set(wanted.values())) == len(STAGES)
    # besides greys, of text and frames, and what lies between these and a bar
    assert {color for color, count in counts.items() if count > 2000 and not is_grey(color)} == set(wanted.values())
    # the taller of two bars has twice the other's of each colour: columns of pixels tell
    columns = {name: (pixels == wanted[name]).sum(0) for name in STAGES}
    for column in columns.values():
        heights = sorted(Counter(column[column > 8].tolist()).most_common(2))
        assert len(heights) == 2 and heights[1][0] == pytest.approx(2 * heights[0][0], rel=0.25)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["profile", "--plot", str(tmp_path / "a.png")])
    assert result.exit_code == 2 and "plot: matplotlib is not installed" in result.stderr
    assert "dmtp_kernels[plot]" in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--trace", "a.txt", "must end in .json or .json.gz"),
        ("--trace", ".json", "must end in .json or .json.gz"),
        ("--trace", "missing/a.json", "must be a file in a directory that exists"),
        ("--plot", "a.svg", "must end in .png"),
        ("--plot", "missing/a.png", "must be a file in a directory that exists"),
        ("--plot", "folder.png", "must be a file in a directory that exists"),
    ],
)
def test_a_bad_path_names_its_option_before_anything_runs(
    option: str, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr("dmtp_kernels.cli_profile.load_drafts", lambda *_, **__: pytest.fail("ran"))
    result = CliRunner().invoke(app, ["profile", option, str(tmp_path / name)])
    assert result.exit_code == 2 and f"error: {option[2:]}: is {tmp_path / name}, {message}" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]


def test_a_directory_that_the_profiler_cannot_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    monkeypatch.setattr("dmtp_kernels.cli_profile.load_drafts", lambda *_, **__: pytest.fail("ran"))
    result = CliRunner().invoke(app, ["profile", "--trace", str(folder / "a.json")])
    assert result.exit_code == 2 and "its directory must have a name in UTF-8" in result.stderr


@pytest.mark.parametrize("name", ["\udcff.json", f"{'a' * 250}.json", "dangling.json"])
def test_a_trace_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "dangling.json").symlink_to("new.json")
    path = tmp_path / name
    check_trace("trace", path)
    trace_rounds(engine_of("dmtp"), REQUESTS, path, rounds=1, warmup=1)
    assert json.loads(path.read_bytes())["traceEvents"] and (tmp_path / "dangling.json").is_symlink()


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_full_disk_leaves_no_half_trace(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("old")
    with files_of_at_most(1000), pytest.raises(ValueError, match=f"trace: cannot write .*{name}"):
        trace_rounds(engine_of("dmtp"), REQUESTS, path, rounds=1, warmup=1)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"


def test_half_a_trace_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler that does not say that the disk took a part only."""
    export = torch.profiler.profile.export_chrome_trace

    def cut(profile: torch.profiler.profile, path: str) -> None:
        export(profile, path)
        os.truncate(path, os.path.getsize(path) // 2)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    with pytest.raises(ValueError, match=r"trace: cannot write .*the profiler wrote no whole trace"):
        trace_rounds(engine_of("dmtp"), REQUESTS, tmp_path / "a.json", rounds=1, warmup=1)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_half_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    with files_of_at_most(1000), pytest.raises(ValueError, match=r"plot: cannot write .*a\.png: File too large"):
        plot_stages(figures(), path)
    assert not list(tmp_path.iterdir())


def test_command_writes_both(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, plot = tmp_path / "t.json", tmp_path / "p.png"
    arguments = ["--batch", "1", "--rounds", "2", "--warmup", "0", "--json", "--trace", str(trace), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["profile", *arguments])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rounds"] == 2
    names = Counter(
        e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "user_annotation"
    )
    assert names["round"] == names["MTP advance"] == 2 and plot.read_bytes()[:4] == b"\x89PNG"
