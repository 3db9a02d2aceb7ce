"""nsys.sh and ncu.sh without these tools: their commands, and what they say when something is missing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dmtp_kernels.decode.ranges import DOMAIN, TIMED
from profiling.kernel_names import kernel_names
from profiling.kernel_names import main as print_names
from profiling.resources import variants

ROOT = Path(__file__).parents[2]
NEEDED = ("bash", "basename", "dirname", "sed", "awk", "mkdir", "env")


def run(script: str, *arguments: str, path: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | more
    if path is not None:
        environment["PATH"] = str(path)
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, f"profiling/{script}.sh", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def commands(script: str, *arguments: str) -> list[list[str]]:
    result = run(script, "--dry-run", *arguments)
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with what the scripts themselves use, and no profiler."""
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return tmp_path


def test_kernel_names_are_those_of_every_variant_that_a_launch_picks() -> None:
    assert kernel_names() == sorted({variant.kernel.partition(":")[2] for _, variant in variants()})
    assert kernel_names("t1_prep") == ["t1_prep_down_kernel", "t1_prep_tail_kernel"]


def test_the_expression_matches_the_names_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_names(["--regex"]) == 0
    expression = re.compile(capsys.readouterr().out.strip())
    assert all(expression.search(name) for name in kernel_names())
    assert not expression.search("lm_head_screen") and not expression.search("my_lm_head_screen_kernel_2")
    for family in ("nothing", "*", "", "../ops/lm_head", "/"):
        with pytest.raises(SystemExit) as stop:
            print_names(["--op", family])
        assert stop.value.code == 2 and f"--op: is {family}, must be a family" in capsys.readouterr().err


def test_nsys_captures_the_timed_rounds() -> None:
    profile, stages, kernels = commands("nsys", "--method", "mtp4", "--batch", "3", "--out", "x/y.nsys-rep")
    assert profile[:2] == ["nsys", "profile"]
    assert {"--capture-range=nvtx", f"--nvtx-capture={TIMED}@{DOMAIN}", "--output=x/y"} <= set(profile)
    program = profile[profile.index(sys.executable) :]
    assert program[1:6] == ["-m", "dmtp_kernels.cli", "profile", "--device", "cuda"]
    assert program[6:] == ["--method", "mtp4", "--against", "none", "--batch", "3", "--rounds", "20"]
    assert stages[-1] == kernels[-1] == "x/y.nsys-rep"


def test_ncu_takes_our_kernels_in_the_timed_rounds_or_a_stage() -> None:
    (command,) = commands("ncu", "--op", "lm_head", "--set", "basic")
    assert f"--nvtx-include={DOMAIN}@{TIMED}/" in command and "--set=basic" in command
    (filters,) = (word for word in command if word.startswith("--kernel-name=regex:"))
    assert filters.removeprefix("--kernel-name=regex:^(").removesuffix(")$").split("|") == kernel_names("lm_head")
    (command,) = commands("ncu", "--stage", "t1", "--", "--verification", "block")
    # + means something to ncu
    assert rf"--nvtx-include={DOMAIN}@{TIMED}/*/T1 selection\+embedding\+fusion" in command
    assert command[-2:] == ["--verification", "block"]


@pytest.mark.parametrize("script", ["nsys", "ncu"])
def test_help_names_every_option(script: str) -> None:
    text = run(script, "--help").stdout
    shared = (ROOT / "profiling/nsight.bash").read_text()
    options = set(re.findall(r"--[a-z-]+(?=\))", shared)) - ({"--stage", "--set"} if script == "nsys" else set())
    assert options >= {"--method", "--batch", "--out", "--op", "--dry-run"}
    assert not {option for option in options - {"--help"} if option not in text}
    assert "Exit codes" in text and "#" not in text


@pytest.mark.parametrize("script", ["nsys", "ncu"])
def test_what_is_missing_is_named(script: str, tools: Path) -> None:
    result = run(script, path=tools)
    assert result.returncode == 3 and f"{script}.sh: {script} is not on PATH" in result.stderr
    # found, but must not be started: there is no device
    (tools / script).symlink_to(shutil.which("false") or "/bin/false")
    pytest.importorskip("nvtx")
    result = run(script, path=tools)
    assert result.returncode == 4 and "no CUDA device" in result.stderr


def test_the_missing_package_is_named(tools: Path, tmp_path: Path) -> None:
    (tools / "ncu").symlink_to(shutil.which("false") or "/bin/false")
    # an interpreter without site-packages
    python = tmp_path / "bare-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    result = run("ncu", path=tools, PYTHON=str(python))
    assert result.returncode == 5 and "the package nvtx is not installed" in result.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("nsys", ["--stage", "t1"], "no option --stage"),
        ("nsys", ["--rows", "3"], "no option --rows"),
        ("ncu", ["--batch"], "--batch: needs a value"),
        ("ncu", ["--stage", "rest"], "--stage: is rest, must be one of t1, draft"),
        ("ncu", ["--op", "attention"], "--op: is attention, must be a family with Triton kernels: accept"),
        ("nsys", ["--op", ""], "--op: needs a value"),
        ("nsys", ["--batch", "abc"], "--batch: is abc, must be a whole number between 1 and 4096"),
        ("ncu", ["--rounds", "0"], "--rounds: is 0"),
        ("nsys", ["--method", "nope"], "--method: is nope, must be one of"),
        ("nsys", ["--out", "profiling"], "--out: is profiling, must be a file"),
    ],
)
def test_bad_options(script: str, arguments: list[str], message: str) -> None:
    result = run(script, "--dry-run", *arguments)
    assert result.returncode == 2 and f"{script}.sh: {message}" in result.stderr and not result.stdout
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("python", "dry"),
    # without a dry run the missing nvtx of the last is named first
    [("/nonexistent", True), ("/nonexistent", False), ("/bin/true", True), ("no-torch", True)],
)
def test_a_wrong_interpreter_is_named(python: str, dry: bool, tools: Path, tmp_path: Path) -> None:
    bare = tmp_path / "no-torch"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    python = str(bare) if python == "no-torch" else python
    (tools / "nsys").symlink_to(shutil.which("false") or "/bin/false")
    result = run("nsys", *(["--dry-run"] if dry else []), path=tools, PYTHON=python)
    assert result.returncode == 2 and "nsys.sh: PYTHON: is " in result.stderr and not result.stdout
    assert result.stderr.count("\n") == 1
