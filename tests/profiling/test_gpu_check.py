"""`profiling/gpu_check.sh`: a part that hangs or fails costs itself alone; nothing is said that was not measured."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dmtp_kernels._library import registered
from dmtp_kernels.bench.cases import specs
from profiling import gpu_parts
from profiling.gpu_parts import Part
from tests.profiling.processes import ended, heed_interrupts, script

ROOT = gpu_parts.ROOT
CASE = {"op": "x", "entry": "eager", "shape": {"B": 1}, "ms": 0.5, "ratio_to_eager": 2.0, "share_of_bandwidth": 0.25}


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_every_part_is_recorded(tmp_path: Path) -> None:
    held = tmp_path / "pid"
    # its child would hold the output open for a minute
    hangs = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
open({str(held)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    result = {"cases": [CASE | {"samples": [1, 2]}]}
    parts = [
        Part("good", 10, python("print('seen')"), where="both"),
        Part("hangs", 1.5, python(hangs), where="cpu", result=True),
        Part("fails", 10, python("raise SystemExit(3)"), where="cpu"),
        Part("absent", 10, ("no-such-program-here",), where="cpu"),
        Part("unmet", 10, python("pass"), needs="no-such-program-here", where="cpu"),
        Part("talks", 10, python(f"print({json.dumps(result)!r})"), where="cpu", result=True),
        Part("mutters", 10, python("print('no json')"), where="cpu", result=True),
        Part("bytes", 10, python("import os; os.write(1, b'\\xff')"), where="cpu", result=True),
        Part("gpu", 10, python("raise SystemExit(1)")),
    ]
    start = time.monotonic()
    found = gpu_parts.check(tmp_path, True, parts)
    assert time.monotonic() - start < 40
    assert found == json.loads((tmp_path / "dry-run.json").read_text())
    status = {r["part"]: r["status"] for r in found["parts"]}
    assert status["good"] == status["talks"] == "ok" and status["hangs"] == "timed out"
    assert status["fails"] == status["mutters"] == status["bytes"] == "failed" and found["parts"][2]["exit"] == 3
    assert status["absent"].startswith("not run: ") and status["unmet"].endswith("is not on PATH")
    assert status["gpu"] == "not measured: dry run"
    lost = dict.fromkeys(("hangs", "mutters", "bytes"), "not measured")
    assert found["results"] == {"talks": {"cases": [CASE]}} | lost
    assert found["dry_run"] and "seen" in (tmp_path / "dry-run.log").read_text()
    lines = gpu_parts.summary(found)
    assert "x eager B=1: 0.5000 ms, 2.00 x eager, 25 % of bandwidth" in lines and "hangs: not measured" in lines
    # what a part started ends with it
    assert ended(int(held.read_text())), "the child of a part that hung still runs"


def test_the_total_is_kept(tmp_path: Path) -> None:
    slow = [Part(f"slow{i}", 4, python("import time; time.sleep(30)"), where="cpu") for i in range(3)]
    start = time.monotonic()
    found = gpu_parts.check(tmp_path, True, slow, total=6.0)
    assert time.monotonic() - start < 25
    assert found["parts"][-1]["status"] == "not run: no time was left"
    assert sum(p.seconds for p in gpu_parts.parts() if p.where == "cpu") + 20 < 300 and gpu_parts.TOTAL_SECONDS < 300


def test_without_a_device_nothing_is_claimed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    script = ROOT / "profiling" / "gpu_check.sh"
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(script), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not list(tmp_path.glob("*.json"))


def test_the_memory_checker_sees_one_case_of_every_op() -> None:
    assert set(gpu_parts.MEMCHECK) == set(registered())
    for op, case in gpu_parts.MEMCHECK.items():
        assert case in [c.name for c in specs()[op].cases], op


STARTS = """
import sys
from profiling import gpu_parts
parts = [gpu_parts.Part("waits", 60, (sys.argv[1],), where="cpu")]
gpu_parts.parts = lambda: parts
sys.exit(gpu_parts.main(["--dry-run", "--output", sys.argv[2]]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_part_that_runs(number: int, code: int, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    waits = script(tmp_path / "waits", f"sleep 60 & echo $! >> {pids}; echo $$ >> {pids}; wait")
    command = [sys.executable, "-c", STARTS, waits, str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    end = time.monotonic() + 40
    while time.monotonic() < end and not (pids.exists() and len(pids.read_text().split()) == 2):
        time.sleep(0.05)
    process.send_signal(number)
    assert process.communicate(timeout=20)[1] == "" and process.returncode == code
    for pid in map(int, pids.read_text().split()):
        assert ended(pid), f"{pid} still runs"


def test_an_output_that_cannot_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for output, why in ((Path("/dev/null/x"), "Not a directory"), (Path(__file__), "File exists")):
        assert gpu_parts.main(["--dry-run", "--output", str(output)]) == 2
        assert capsys.readouterr().err == f"gpu_check: error: --output: is {output}, must be a directory: {why}\n"


def test_a_full_disk_leaves_the_old_results(tmp_path: Path) -> None:
    (tmp_path / "dry-run.json").write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ValueError, match=r"--output: cannot write .*dry-run\.json: File too large"):
            gpu_parts.check(tmp_path, True, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "dry-run.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dry-run.json", "dry-run.log"]
