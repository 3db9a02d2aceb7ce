"""One side of a paired benchmark: takes turns as it is told, a line of JSON at a time, so that two commits alternate.

`python -m dmtp_kernels.bench.worker` reads `{"start": {...}}` (the arguments of `Session`), `{"tests": names}`,
`{"seat": true}`, `{"turn": i}` and `{"report": "FILE", ...}` and answers each with one line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels.bench.environment import run_tests
from dmtp_kernels.bench.ops import Session
from dmtp_kernels.bench.turns import Plant


def serve(plant: Plant | None = None) -> None:
    """Answer commands until the input ends."""
    session: Session | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any = True
        if "start" in command:
            options = command["start"]
            torch.set_num_threads(options["threads"])
            session = Session(options["names"], options["scale"], device=torch.device(options["device"]), plant=plant)
        else:
            assert session is not None
            if "report" in command:
                report = session.report() | {"session": command["session"], "tests": command["tests"]}
                Path(command["report"]).write_text(json.dumps(report) + "\n")
            elif "tests" in command:
                answer = run_tests(command["tests"])
            elif "seat" in command:
                answer = session.seat()
            else:
                session.turn(command["turn"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
