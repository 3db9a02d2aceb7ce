"""One line on stderr that says what a benchmark is doing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Report = Callable[[str], None]
_SECONDS = 5.0


def silent(_: str) -> None:
    """Say nothing."""


class Progress:
    """A line that is written over on a terminal; elsewhere a new one, at most one in five seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._last = -_SECONDS

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif sys.stderr is not None and now - self._last >= _SECONDS:
            self._last = now
            print(text, file=sys.stderr, flush=True)

    def done(self) -> None:
        """Clear the line."""
        if self._terminal:
            print(end="\r\x1b[K", file=sys.stderr, flush=True)
