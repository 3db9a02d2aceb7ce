"""How the commands of `profiling` end: bad input is one line on stderr and exit code 2, Ctrl-C is 130 and silent.

Needs nothing but Python: `gpu_parts` runs where even torch may be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Never

INTERRUPTED = 130

Main = Callable[[Sequence[str] | None], int]


class Parser(argparse.ArgumentParser):
    """Its errors are one line, without the usage."""

    def error(self, message: str) -> Never:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def command(prog: str) -> Callable[[Main], Callable[..., int]]:
    """Decorates `main(arguments) -> exit code`, with the name that stands before its errors."""

    def decorate(main: Main) -> Callable[..., int]:
        @functools.wraps(main)
        def guarded(arguments: Sequence[str] | None = None) -> int:
            try:
                code = main(arguments)
                sys.stdout.flush()
                return code
            except KeyboardInterrupt:
                return INTERRUPTED
            except BrokenPipeError:
                _drop_output()
                return 1
            except (ValueError, OSError, RuntimeError) as error:
                if type(error) is RuntimeError and "allocate memory" not in str(error):
                    raise  # a fault of ours, not of the input: keep its traceback
                _drop_output()
                print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
                return 2

        return guarded

    return decorate


def check_range(option: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise ValueError, which names the option, unless `least <= value <= most` and `value` is finite."""
    if least <= value <= most and abs(value) != math.inf:
        return
    bounds = f"at least {least:,g}" if math.isinf(most) else f"between {least:,g} and {most:,g}"
    raise ValueError(f"{option}: is {value}, must be {bounds}")


def make_directory(option: str, path: Path) -> None:
    """Make a directory that files are written to, with those above it.

    Raises:
        ValueError: it cannot be made or written to; names the option.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: is {path}, must be a directory: {error.strerror or error}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: is {path}, must be a directory that can be written")


@contextlib.contextmanager
def ends_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block as an error would, exit code 128 + N, so that what it started is ended."""

    def end(number: int, _: object) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _drop_output() -> None:
    """What stdout still holds and could not write: the interpreter would try again when it ends, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
