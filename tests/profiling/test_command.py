"""How the commands of `profiling` end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from profiling.command import Parser, check_range, command

FULL = """
import sys
from profiling.command import command

@command("x")
def main(arguments):
    print("text")
    return 0

sys.exit(main())
"""


def ends(act: Callable[[], object]) -> int:
    @command("prog")
    def main(arguments: Sequence[str] | None = None) -> int:
        """Its docstring."""
        act()
        return 7

    assert main.__doc__ == "Its docstring."
    return main([])


def failing(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("op: is\n  'x'"), 2, "prog: error: op: is 'x'\n"),
        (FileNotFoundError(2, "No such file", "a"), 2, "prog: error: [Errno 2] No such file: 'a'\n"),
        (RuntimeError("can't allocate memory"), 2, "prog: error: can't allocate memory\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_errors_are_a_line(error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(failing(error)) == code
    assert capsys.readouterr().err == text
    assert ends(lambda: None) == 7


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    for error in (RuntimeError("shapes"), KeyError("x")):
        with pytest.raises(type(error)):
            ends(failing(error))


def test_a_full_disk_behind_stdout_is_a_line() -> None:
    with open("/dev/full", "w") as full:
        # buffered, so that what is printed fails when it ends
        env = os.environ | {"PYTHONUNBUFFERED": ""}
        done = subprocess.run([sys.executable, "-c", FULL], stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.returncode == 2 and done.stderr == "x: error: [Errno 28] No space left on device\n"


def test_the_parser_says_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="prog")
    parser.add_argument("--gate", type=float)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--gate", "x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "prog: error: argument --gate: invalid float value: 'x'\n"


def test_ranges() -> None:
    for value in (1, 5.5, 8):
        check_range("--gate", value, 1, 8)
    check_range("--gate", 1e9, 1)
    for value, most, bounds in ((0, 8, "between 1 and 8"), (9, 8, "between 1 and 8"), (0, None, "at least 1")):
        with pytest.raises(ValueError, match=f"^--gate: is {value}, must be {bounds}$"):
            check_range("--gate", value, 1, *([] if most is None else [most]))
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^--gate: is {value}, must be at least 1$"):
            check_range("--gate", value, 1)
