"""The page of plots: it opens in a browser without network, shows every op, and says what was not measured."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmtp_kernels._library import registered
from profiling import page
from profiling.results import KIND
from tests.profiling.damaged_results import GONE, damaged

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1280,1800"),
)


def result(ops: Sequence[str], **changes: Any) -> dict[str, Any]:
    """A made-up result of `dmtp bench ops`."""

    def around(x: float) -> dict[str, float]:
        return {"median": x, "q1": 0.9 * x, "q3": 1.2 * x}

    cases = [
        {
            "op": op,
            "case": f"b{batch}",
            "shape": {"B": batch, "S": 8, "Hq": 32, "Hkv": 8, "D": 128, "history": 8192, "window": 4096},
            "backend": "cpu",
            "eager_is": "chain",
            "agrees": True,
            "disagreement": None,
            "entries": {"op": around(0.5 * batch)},
            "speedup": {"eager": around(0.6 + i)},
            "share_of_bandwidth": 0.07 * (i + 1) % 1.1,
        }
        for i, op in enumerate(ops)
        for batch in (1, 8)
    ]
    where = {"device": "Some <CPU>", "threads": 1, "clock": "cpu", "scale": 1, "load": [0.5, 1.5], "commit": "abc1234"}
    where["versions"] = {"torch": "2.13.0", "triton": None}
    return {"kind": KIND, "environment": where, "bandwidth_gb_s": 17.2, "cases": cases} | changes


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium on PATH")
    return found


def opened(path: Path, *arguments: str) -> str:
    command = [browser(), *FLAGS, f"--user-data-dir={path.parent / 'profile'}", *arguments, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_it_opens_without_network(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    source = tmp_path / "results.json"
    source.write_text(json.dumps(result(registered())))
    assert page.main([str(source), "--output", str(path)]) == 0
    dom = opened(path, "--dump-dom")
    for op in registered():
        assert re.search(rf"<td class=\"op\">{op}<", dom), op
    assert "abc1234" in dom and "torch 2.13.0" in dom and "Some &lt;CPU&gt;" in dom


def test_its_screenshot_is_not_blank(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path, shot = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page.page([result(registered())]))
    opened(path, f"--screenshot={shot}")
    rows = (image.imread(shot)[:, :, :3] * 255).astype(int)  # [height, width, 3]
    assert rows.shape[:2] == (1800, 1280)
    colours = np.unique(rows.reshape(-1, 3), axis=0)
    assert len(colours) > 20
    # text and bars all the way down, and a background between them
    inked = (rows != rows[:, :1]).any(axis=(1, 2))
    assert 0.3 < inked[:1500].mean() < 1
    assert (rows[:, -12:] == rows[:, :12]).all(), "the table is wider than the window"
    assert all(inked[i : i + 100].any() for i in range(0, 1500, 100))


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = page.page([result(registered())])
    assert not re.search(r"(src|href)=|url\(|@import|https?:", text)
    assert "prefers-color-scheme:dark" in text


def test_the_headline_comes_first_and_the_unmeasured_are_named() -> None:
    ops = [op for op in registered() if op not in ("commit_kv", page.FIRST)]
    text = page.page([result([*ops, page.FIRST], bandwidth_gb_s=None)])
    order = re.findall(r'<td class="op">(\w+)<', text)
    assert order[0] == page.FIRST and sorted(order) == sorted({*registered()} - {"commit_kv"})
    assert "<p>not measured: commit_kv, torch.compile</p>" in text and "bandwidth not measured" in text


def test_figures_are_those_of_the_result() -> None:
    run = result(["commit_kv"])
    run["cases"][0]["speedup"]["compiled"] = {"median": 1.25, "q1": 1.2, "q3": 1.3}
    run["cases"][1] |= {"agrees": False, "disagreement": "output 0: x", "share_of_bandwidth": None, "speedup": {}}
    text = page.page([run])
    assert "0.60&times;" in text and "torch.compile 1.25&times;" in text and "7 %" in text
    assert "wrong: output 0: x" in text and text.count("not measured</span>") == 2
    rest = ", ".join(op for op in registered() if op != "commit_kv")
    assert f"<p>not measured: {rest}</p>" in text


def test_results_of_the_gpu_check_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, path = tmp_path / "gpu.json", tmp_path / "page.html"
    inner = result(["commit_kv"])
    source.write_text(json.dumps({"results": {"ops": inner, "t1_tp4": {"cases": []}, "attention": "not measured"}}))
    assert page.main([str(source), "--output", str(path)]) == 0
    assert path.read_text() == page.page([inner])
    source.write_text('{"results": {"ops": "not measured"}}')
    assert page.main([str(source), "--output", str(path)]) == 2
    assert "holds no result" in capsys.readouterr().err


FINE: dict[str, tuple[Any, ...]] = {
    **{"commit": ("x", None), "torch": ("x", None, GONE), "triton": ("x", GONE), "disagreement": ("x",)},
    **{"bandwidth_gb_s": (None,), "share_of_bandwidth": (None, 0), "load": ([],), "load.0": (0,)},
    **{"versions": ({}, {"x": None}), "shape": ({}, {"x": 1}), "speedup": ({},), "eager": (GONE,), "B": (0, GONE)},
    **{key: ("x",) for key in ("device", "clock", "0.op", "case", "backend", "eager_is")},
}
"""What need not be as it was, by its last key or its last two."""


def test_whatever_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = result(["commit_kv"])
    good["cases"][0]["shape"] = {"B": 1}
    source, path = tmp_path / "r.json", tmp_path / "page.html"
    for keys, garbage, run in damaged(good):
        source.write_text(json.dumps(run))
        path.write_text("old")
        code, said = page.main([str(source), "--output", str(path)]), capsys.readouterr()
        fine = garbage in FINE.get(keys[-1], FINE.get(".".join(map(str, keys[-2:])), ()))
        where = f"{keys} = {garbage!r}: {code}, {said.err}"
        assert code == (0 if fine else 2), where
        if code == 2:
            assert said.err.count("\n") == 1 and said.err.startswith(f"page: error: {source}: "), where
            assert path.read_text() == "old"
        else:
            assert not re.search(r"\b(nan|inf|None)\b", path.read_text()), where


def test_text_of_the_file_is_no_markup(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>\"'&\ud800"
    run = result(["commit_kv"])
    run["environment"] |= {"device": script, "clock": script, "commit": script, "versions": {script: script}}
    run["cases"][0] |= {"agrees": False, "eager_is": script, "speedup": {script: {"median": 1, "q1": 1, "q3": 1}}}
    run["cases"][0] |= dict.fromkeys(("op", "case", "backend", "disagreement"), script) | {"shape": {script: 1}}
    source, path = tmp_path / "r.json", tmp_path / "page.html"
    source.write_text(json.dumps(run))
    assert page.main([str(source), "--output", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text and text.count("&lt;script&gt;alert(1)") == 10


def test_an_output_that_cannot_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "r.json"
    text = json.dumps(result(["commit_kv"]))
    source.write_text(text)
    (tmp_path / "link").symlink_to(source)
    for output, why in (
        (source, "which is one of the results"),
        (tmp_path / "link", "which is one of the results"),
        (tmp_path, "must be a file in a directory"),
        (Path("/nonexistent/p.html"), "must be a file in a directory"),
        (Path("/dev/full"), "must be a regular file"),
    ):
        assert page.main([str(source), "--output", str(output)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"page: error: --output: is {output}") and why in said and said.count("\n") == 1
    assert source.read_text() == text and sorted(tmp_path.iterdir()) == [tmp_path / "link", source]


def test_a_full_disk_leaves_the_old_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, path = tmp_path / "r.json", tmp_path / "page.html"
    source.write_text(json.dumps(result(registered())))
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert page.main([str(source), "--output", str(path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old" and f"--output: cannot write {path}" in capsys.readouterr().err
