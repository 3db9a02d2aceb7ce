"""Programs for tests to start, and whether they have ended."""

from __future__ import annotations

import signal
import time
from pathlib import Path


def script(path: Path, text: str) -> str:
    """A program of the shell."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def heed_interrupts() -> None:
    """For `preexec_fn`: a job started in the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(pid: int) -> bool:
    """Whether a process ends within five seconds; one that nobody waited for has ended too."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False
