"""What the commands that measure refuse, in one line that names the option, and how Ctrl-C ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dmtp_kernels._cli_options import MOST_THREADS
from tests.profiling.processes import heed_interrupts

ROOT = Path(__file__).parents[2]
MANY = str(MOST_THREADS + 1)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("bandwidth", ["--threads", "99999999"], "--threads: is 99999999, must be between 1 and"),
        ("bandwidth", ["--threads", "0"], "--threads: is 0"),
        ("bandwidth", ["--threads", "-1"], "--threads: is -1"),
        ("roofline.__main__", ["--threads", MANY], f"--threads: is {MANY}"),
        ("roofline.__main__", ["--op", "sample_rows", "--scale", "9999999999"], "scale: is 9999999999, must be"),
        ("roofline.__main__", ["--rounds", "0"], "--rounds: is 0"),
        ("roofline.__main__", ["--context", "9" * 400], "--context: is 9"),
        ("roofline.__main__", ["--estimates", "--gpu", "H20"], "--gpu: is 'H20'"),
        ("roofline.__main__", ["--estimates", "--model", ""], "--model: is ''"),
        ("launches", ["--batch", "0"], "--batch: is 0, must be between 1 and 64"),
        ("launches", ["--batch", "-3"], "--batch: is -3"),
        ("launches", ["--temperature", "-1"], "--temperature: is -1.0"),
        ("launches", ["--temperature", "nan"], "--temperature: is nan"),
        ("launches", ["--method", "nope"], "--method: invalid choice"),
        ("resources", ["--arch", "abc"], "--arch: is 'abc', must be numbers among 80, 90, 100"),
        ("resources", ["--arch", ""], "--arch: is ''"),
        ("resources", ["--arch", "90,70"], "--arch: is '90,70'"),
        ("resources", ["--op", "nope"], "--op: is nope, must be a family with kernels: accept"),
        ("traffic", ["--op", "nope"], "--op: is nope, must be an op with traffic cases: accept"),
        ("head_report", ["--head", "/nonexistent"], "--head: cannot read /nonexistent"),
        ("head_report", ["--head", "/etc/passwd"], "--head: cannot read /etc/passwd"),
    ],
)
def test_a_line_names_the_option(
    module: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # what would start the command over with the interpreter
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("ran"))
    threads = torch.get_num_threads()
    try:
        code = import_module(f"profiling.{module}").main(arguments)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2 and message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("weight", "states", "message"),
    [
        (torch.ones(4, 8), None, "has no tensor 'states'"),
        (torch.ones(4, 8), torch.ones(4, 6), "are 6 wide, weight is 8"),
        (torch.ones(4, 8), torch.ones(1, 8), "must be at least 2 rows of floats"),
        (torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 8), "must be at least 1 rows of floats"),
        (torch.ones(8), torch.ones(4, 8), "must be at least 1 rows of floats"),
    ],
)
def test_a_file_that_holds_no_head(
    weight: torch.Tensor,
    states: torch.Tensor | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from profiling.head_report import main

    path = tmp_path / "head.safetensors"
    save_file({"weight": weight} | ({} if states is None else {"states": states}), path)
    assert main(["--head", str(path)]) == 2
    error = capsys.readouterr().err
    assert "--head: " in error and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "called", "arguments"),
    [
        ("bandwidth", "read_bandwidth", []),
        ("roofline.__main__", "_found", []),
        ("launches", "count", []),
        ("resources", "measure", ["--op", "draft_pages", "--arch", "90"]),
        ("traffic", "measure", ["--op", "draft_page_table"]),
        ("head_report", "load_smollm2", []),
        ("kernel_names", "kernel_names", []),
    ],
)
def test_an_interrupt_is_silent(
    module: str,
    called: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if module == "launches":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr("profiling.launches.of_method", lambda *_: {})
        monkeypatch.setattr("dmtp_kernels.testing.interpreter.install", lambda: None)
    if module == "traffic":
        monkeypatch.setattr("dmtp_kernels.testing.interpreter.install", lambda: None)
    command = import_module(f"profiling.{module}")
    monkeypatch.setattr(command, called, interrupted)
    assert command.main(arguments) == 130
    printed = capsys.readouterr()
    assert not printed.out and not printed.err


def test_an_interrupt_ends_the_workers_too(tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to the command and its workers at once."""
    pytest.importorskip("triton")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "profiling.resources", "--op", "lm_head", "--arch", "90"]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "start_new_session": True}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, preexec_fn=heed_interrupts, **options) as child:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        until = time.monotonic() + 60
        # two workers, which begin with imports, and the tracker of multiprocessing
        while len(children.read_text().split()) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=20)
    assert child.returncode == 130 and not out and not err
    with pytest.raises(ProcessLookupError):
        # an assembler that a worker had started may finish
        for _ in range(100):
            os.killpg(child.pid, 0)
            time.sleep(0.1)


@pytest.mark.parametrize("module", ["bandwidth", "roofline", "launches", "resources", "traffic"])
def test_an_interrupt_while_modules_load_is_silent(module: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", f"profiling.{module}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGINT and not done.stdout and not done.stderr
    (tmp_path / "torch.py").write_text("raise SystemError('shown')\n")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 1 and b"SystemError: shown" in done.stderr
