"""How a command of `dmtp` ends when it cannot go on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Bad input and a refusing disk end a command with one line on stderr and exit code 2."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except BrokenPipeError:
            raise typer.Exit(1) from None
        except (ValueError, OSError, RuntimeError) as error:
            if type(error) is RuntimeError and "allocate memory" not in str(error):
                raise  # a fault of ours, not of the input: keep its traceback
            print(f"dmtp: error: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None

    return guarded
