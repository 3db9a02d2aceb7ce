"""`python -m profiling.traffic` starts itself over with the interpreter on and answers in JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiling.table import table

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "profiling.traffic", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)


def test_an_op_without_cases_is_an_error() -> None:
    done = run("--op", "no_such_op")
    assert done.returncode == 2 and "--op: is no_such_op, must be an op with traffic cases" in done.stderr


def test_table_aligns_numbers_right() -> None:
    assert table(("kernel", "bytes"), [("a", 12345), ("bcd", None)]).splitlines() == [
        "kernel   bytes",
        "------  ------",
        "a       12,345",
        "bcd          -",
    ]
