"""Two commits measured in turns: `python -m profiling.pair OLD_PYTHON NEW_PYTHON --output DIRECTORY`.

Each is the interpreter of a checkout with its own build (`OLD/.venv/bin/python`). Both stay loaded and take turns, case
by case, so that whatever else the machine does meets both alike; that is what lets `profiling.compare` tell 10 % on a
machine that others use. Writes `old.N.json` and `new.N.json` for each pair of processes, then compares them; exit codes
as `profiling.compare`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmtp_kernels.bench.progress import Progress, Report, silent
from profiling import compare

WORKER = ("-m", "dmtp_kernels.bench.worker")
SCALE, PROCESSES, SEATINGS, ROUNDS = 256, 3, 16, 2
"""Sizes over the serving ones, such that weights nearly fit a core's own cache: what moves through shared caches and
memory is others' to slow down."""


class Worker:
    """One side's process."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",  # each interpreter's own package, not the one lying here
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | (environment or {}),
        )

    def send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise compare.Refused(f"{self._process.args!r} ended") from None

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise compare.Refused(f"{self._process.args!r} ended, exit code {self._process.wait()}")
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        self.send(**command)
        return self.answer()

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def measure(
    commands: Sequence[Sequence[str]],
    output: Path,
    *,
    names: Sequence[str] | None = None,
    processes: int = PROCESSES,
    seatings: int = SEATINGS,
    rounds: int = ROUNDS,
    scale: int = SCALE,
    threads: int = 1,
    device: str = "cpu",
    tests: bool = False,
    say: Report = silent,
) -> tuple[str, str]:
    """Run both sides' workers in turns; the files of either side, joined by commas, as `compare` takes them.

    Args:
        commands: of the old and of the new worker.
        output: a directory.
        processes: pairs of processes, one after the other: where a process lies in memory moves times too.
        seatings: of a pair; `rounds` turns each.
        tests: run the tests of the ops in both checkouts first; the files say how they went.

    Raises:
        Refused: a worker ended, or the sides have other cases.
    """
    start = {"names": names, "scale": scale, "threads": threads, "device": device}
    files: tuple[list[str], list[str]] = ([], [])
    tested: list[Any] = [None, None]
    for process in range(processes):
        workers: list[Worker] = []
        try:
            workers = [Worker(command) for command in commands]
            for worker in workers:
                worker.send(start=start)
            for worker in workers:
                worker.answer()
            if tests and process == 0:
                say("tests of the ops")
                tested = [worker.ask(tests=names) for worker in workers]
            for seating in range(seatings):
                say(f"processes {process + 1} of {processes}, seating {seating + 1} of {seatings}")
                counts = [worker.ask(seat=True) for worker in workers]
                if counts[0] != counts[1]:
                    raise compare.Refused(f"the sides have {counts[0]} and {counts[1]} cases")
                for turn in range(rounds):
                    for i in range(counts[0]):
                        for worker in workers[:: 1 if (seating + turn + i) % 2 else -1]:
                            worker.ask(turn=i)
            session = uuid.uuid4().hex
            for worker, side, of, passed in zip(workers, ("old", "new"), files, tested, strict=True):
                of.append(str((output / f"{side}.{process}.json").absolute()))
                worker.ask(report=of[-1], session=session, tests=passed)
        finally:
            for worker in workers:
                worker.close()
    return ",".join(files[0]), ",".join(files[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: as `profiling.compare`."""
    parser = argparse.ArgumentParser(prog="python -m profiling.pair", description=__doc__.partition("\n")[0])
    parser.add_argument("old", help="python of the old checkout")
    parser.add_argument("new", help="python of the new checkout")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--op", action="append", help="an op, may be repeated; default all")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="pairs of them, one after the other")
    parser.add_argument("--seatings", type=int, default=SEATINGS, help="sets of inputs of a pair")
    parser.add_argument("--scale", type=int, default=SCALE, help="divides vocabulary, history and window")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tests", action="store_true", help="first run the ops' tests in both checkouts")
    parser.add_argument("--gate", type=float, default=5.0, help="percent")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    try:
        old, new = measure(
            [(options.old, *WORKER), (options.new, *WORKER)],
            options.output,
            names=options.op,
            processes=options.processes,
            seatings=options.seatings,
            scale=options.scale,
            threads=options.threads,
            device=options.device,
            tests=options.tests,
            say=progress,
        )
        progress.done()
    except compare.Refused as reason:
        print(f"pair: no verdict: {reason}", file=sys.stderr)
        return 2
    return compare.main([old, new, "--gate", str(options.gate)])


if __name__ == "__main__":
    sys.exit(main())
