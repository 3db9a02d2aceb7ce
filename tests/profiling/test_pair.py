"""`profiling.pair`: what cannot be is refused before anything runs, and no worker outlives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dmtp_kernels._cli_options import MOST_THREADS
from profiling import pair
from tests.profiling.processes import ended, heed_interrupts, script

ROOT = Path(pair.__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent", "PY"], "old: is /nonexistent, must be the Python of a checkout"),
        (["PY", "/etc/passwd"], "new: is /etc/passwd, must be the Python of a checkout"),
        (["PY", "/"], "new: is /, must be the Python of a checkout"),
        (["PY", "PY", "--output", "/dev/null/x"], "--output: is /dev/null/x, must be a directory: Not a directory"),
        (["PY", "PY", "--output", __file__], f"--output: is {__file__}, must be a directory: File exists"),
        (["PY", "PY", "--output", "a,b"], f"--output: is {Path('a,b').absolute()}, must have no comma"),
        (["PY", "PY", "--gate", "1"], "--gate: is 1.0, must be at least 2"),
        (["PY", "PY", "--gate", "inf"], "--gate: is inf, must be at least 2"),
        (["PY", "PY", "--gate", "x"], "argument --gate: invalid float value: 'x'"),
        (["PY", "PY", "--processes", "0"], "--processes: is 0, must be at least 1"),
        (["PY", "PY", "--seatings", "0"], "--seatings: is 0, must be at least 1"),
        (["PY", "PY", "--scale", "0"], "scale: is 0, must be between 1 and 4,096"),
        (["PY", "PY", "--scale", "9999999999"], "scale: is 9999999999, must be between 1 and 4,096"),
        (["PY", "PY", "--threads", "0"], f"--threads: is 0, must be between 1 and {MOST_THREADS}"),
        (["PY", "PY", "--threads", "99999999"], "--threads: is 99999999, must be between 1 and"),
        (["PY", "PY", "--clock", "cpu", "--threads", "2"], "--clock: is cpu, must be wall with 2 threads"),
        (["PY", "PY", "--device", "foo"], "device: is 'foo', must be cpu"),
        (["PY", "PY", "--op", "nope"], "op: is 'nope', must be among"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pair, "measure", lambda *_, **__: pytest.fail("ran"))
    words = [sys.executable if word == "PY" else word for word in arguments]
    threads = torch.get_num_threads()
    try:
        code: int | str | None = pair.main(["--output", str(tmp_path / "out"), *words])
    except SystemExit as ended:
        code = ended.code
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1, said.err
    assert said.err.partition("error: ")[2].startswith(message), said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("""read line; echo '{"error": "is in '$PWD'"}'""", "is in /"),
        ("read line; echo 'no worker'", "is no worker, it said 'no worker'"),
        ("exit 3", "ended with exit code 3"),
    ],
)
def test_what_is_no_worker_is_no_verdict(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path / "python", text)
    monkeypatch.chdir(tmp_path)
    # a relative name is one of this directory, not of the worker's
    assert pair.main(["./python", sys.executable, "--output", "out", "--op", "accept_prefix"]) == 2
    said = capsys.readouterr().err
    assert f"pair: no verdict: old ({tmp_path}/python): {message}\n" in said


def test_a_package_against_itself_must_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, sys.executable, "--output", str(tmp_path), "--op", "accept_prefix"]
    assert pair.main(words) == 2
    package = ROOT / "dmtp_kernels"
    assert f"pair: no verdict: both sides are {package} at commit " in capsys.readouterr().err
    assert pair.main([*words, "--same", "--processes", "1", "--seatings", "1", "--clock", "wall"]) == 0
    said = capsys.readouterr()
    assert f"old: {package} at commit" in said.err and f"new: {package} at commit" in said.err
    assert "2 undecided" in said.out
    assert json.loads((tmp_path / "new.0.json").read_text())["environment"]["clock"] == "wall"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_workers_too(number: int, code: int, tmp_path: Path) -> None:
    # like the tests of a worker: a child of its own, which would go on for a minute
    waits = script(tmp_path / "python", f"sleep 60 & echo $! >> {tmp_path}/pids; echo $$ >> {tmp_path}/pids; wait")
    process = subprocess.Popen(
        [sys.executable, "-m", "profiling.pair", waits, waits, "--output", str(tmp_path / "out")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    pids = tmp_path / "pids"
    end = time.monotonic() + 40
    while time.monotonic() < end and not (pids.exists() and len(pids.read_text().split()) == 4):
        time.sleep(0.05)
    process.send_signal(number)
    assert process.communicate(timeout=20)[1] == "" and process.returncode == code
    for pid in map(int, pids.read_text().split()):
        assert ended(pid), f"{pid} still runs"
