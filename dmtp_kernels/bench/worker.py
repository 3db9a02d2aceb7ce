"""One side of a paired benchmark: takes turns as it is told, a line of JSON at a time, so that two commits alternate.

`python -m dmtp_kernels.bench.worker` reads `{"start": {...}}` (the arguments of `Session`), `{"tests": names}`,
`{"seat": true}`, `{"turn": i}` and `{"report": "FILE", ...}` and answers each with one line: the start with its package
and commit, `{"error": why}` where it is asked for what cannot be, and ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dmtp_kernels
from dmtp_kernels._files import write_text
from dmtp_kernels.bench.environment import open_device, run_tests
from dmtp_kernels.bench.measure import commit
from dmtp_kernels.bench.ops import Session
from dmtp_kernels.bench.turns import Plant


def serve(plant: Plant | None = None) -> int:
    """Answer commands until the input ends; the exit code."""
    session: Session | None = None
    for line in sys.stdin:
        try:
            session, answer = _answer(json.loads(line), session, plant)
        except (ValueError, OSError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return 2
        print(json.dumps(answer), flush=True)
    return 0


def _answer(command: dict[str, Any], session: Session | None, plant: Plant | None) -> tuple[Session, Any]:
    if "start" in command:
        options = command["start"]
        device = open_device(options["device"], options["threads"])
        session = Session(options["names"], options["scale"], options.get("clock"), device, plant=plant)
        return session, {"package": str(Path(dmtp_kernels.__file__).parent), "commit": commit()}
    assert session is not None
    if "report" in command:
        report = session.report() | {"session": command["session"], "tests": command["tests"]}
        write_text("report", Path(command["report"]), json.dumps(report) + "\n")
    elif "tests" in command:
        return session, run_tests(command["tests"])
    elif "seat" in command:
        return session, session.seat()
    else:
        session.turn(command["turn"])
    return session, True


if __name__ == "__main__":
    sys.exit(serve())
