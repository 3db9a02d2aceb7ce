"""Two commits measured in turns: `python -m profiling.pair OLD_PYTHON NEW_PYTHON --output DIRECTORY`.

Each is the interpreter of a checkout with its own build (`OLD/.venv/bin/python`). Both stay loaded and take turns,
case by case, so that whatever else the machine does meets both alike; that is what lets `profiling.compare` tell 10 %
on a machine that others use. Says which packages they are. Writes `old.N.json` and `new.N.json` for each pair of
processes, then compares them; exit codes as `profiling.compare`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmtp_kernels._cli_options import set_threads
from dmtp_kernels.bench.cases import Suite
from dmtp_kernels.bench.environment import open_device
from dmtp_kernels.bench.progress import Progress, Report, silent
from profiling import compare
from profiling.command import Parser, check_range, command, ends_on_signals, make_directory

SIDES = ("old", "new")
_UNKNOWN = "a package that does not say which"
WORKER = ("-m", "dmtp_kernels.bench.worker")
SCALE, PROCESSES, SEATINGS, ROUNDS = 256, 3, 16, 2
"""Sizes over the serving ones, such that weights nearly fit a core's own cache: what moves through shared caches and
memory is others' to slow down."""


class Worker:
    """One side's process, with all that it starts in a session of its own: Ctrl-C is the parent's to answer."""

    def __init__(self, side: str, command: Sequence[str]) -> None:
        self._name = f"{side} ({command[0]})"
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",  # each interpreter's own package, not the one lying here
                env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
                start_new_session=True,
            )
        except OSError as error:
            raise compare.Refused(f"{self._name}: cannot be run: {error.strerror or error}") from None

    def send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        try:
            found = json.loads(line)
        except ValueError:
            raise compare.Refused(f"{self._name}: is no worker, it said {line.strip()[:80]!r}") from None
        if isinstance(found, dict) and "error" in found:
            raise compare.Refused(f"{self._name}: {found['error']}")
        return found

    def _ended(self) -> compare.Refused:
        return compare.Refused(f"{self._name}: ended with exit code {self._process.wait()}")

    def ask(self, **command: Any) -> Any:
        self.send(**command)
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
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
    clock: str | None = None,
    tests: bool = False,
    same: bool = False,
    say: Report = silent,
) -> tuple[str, str]:
    """Run both sides' workers in turns; the files of either side, joined by commas, as `compare` takes them.

    Args:
        commands: of the old and of the new worker.
        output: a directory.
        processes: pairs of processes, one after the other: where a process lies in memory moves times too.
        seatings: of a pair; `rounds` turns each.
        clock: `cpu` or `wall`; default as `bench_ops`.
        same: both sides may be one and the same package.
        tests: run the tests of the ops in both checkouts first; the files say how they went.

    Raises:
        Refused: a worker ended, or the sides have other cases, or are the same package.
    """
    start = {"names": names, "scale": scale, "threads": threads, "device": device, "clock": clock}
    files: tuple[list[str], list[str]] = ([], [])
    tested: list[Any] = [None, None]
    for process in range(processes):
        workers: list[Worker] = []
        try:
            for side, words in zip(SIDES, commands, strict=True):
                workers.append(Worker(side, words))
            for worker in workers:
                worker.send(start=start)
            packages = [_package(worker.answer()) for worker in workers]
            if process == 0:
                print(*map("{}: {}".format, SIDES, packages), sep="\n", file=sys.stderr)
            if packages[0] == packages[1] != _UNKNOWN and not same:
                raise compare.Refused(f"both sides are {packages[0]}; --same compares it with itself")
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
            for worker, side, of, passed in zip(workers, SIDES, files, tested, strict=True):
                of.append(str((output / f"{side}.{process}.json").absolute()))
                worker.ask(report=of[-1], session=session, tests=passed)
        finally:
            for worker in workers:
                worker.close()
    return ",".join(files[0]), ",".join(files[1])


@command("pair")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: as `profiling.compare`."""
    parser = Parser(prog="python -m profiling.pair", description=__doc__.partition("\n")[0])
    parser.add_argument("old", help="python of the old checkout")
    parser.add_argument("new", help="python of the new checkout")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--op", action="append", help="an op, may be repeated; default all")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="pairs of them, one after the other")
    parser.add_argument("--seatings", type=int, default=SEATINGS, help="sets of inputs of a pair")
    parser.add_argument("--scale", type=int, default=SCALE, help="divides vocabulary, history and window")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=("cpu", "wall"), help="default: cpu on one thread, else wall")
    parser.add_argument("--same", action="store_true", help="compare a package with itself, to see the noise")
    parser.add_argument("--tests", action="store_true", help="first run the ops' tests in both checkouts")
    parser.add_argument("--gate", type=float, default=5.0, help="percent")
    options = parser.parse_args(arguments)
    old, new = (_worker(side, getattr(options, side)) for side in SIDES)
    _check(options)
    make_directory("--output", options.output)
    progress = Progress()
    try:
        with ends_on_signals():
            files = measure(
                [old, new],
                options.output,
                names=options.op,
                processes=options.processes,
                seatings=options.seatings,
                scale=options.scale,
                threads=options.threads,
                device=options.device,
                clock=options.clock,
                tests=options.tests,
                same=options.same,
                say=progress,
            )
    except compare.Refused as reason:
        print(f"pair: no verdict: {' '.join(str(reason).split())}", file=sys.stderr)
        return 2
    finally:
        progress.done()
    return compare.main([*files, "--gate", str(options.gate)])


def _package(answer: Any) -> str:
    """Where a worker's package lies and its commit; workers of before answer with less."""
    return f"{answer['package']} at commit {answer['commit']}" if isinstance(answer, dict) else _UNKNOWN


def _worker(side: str, interpreter: str) -> tuple[str, ...]:
    found = shutil.which(interpreter)
    if found is None:
        raise ValueError(f"{side}: is {interpreter}, must be the Python of a checkout")
    # a relative name would be looked up where the worker runs; a link stays, it says whose environment it is
    return (os.path.abspath(found), *WORKER)


def _check(options: argparse.Namespace) -> None:
    """What the workers and `compare` would refuse, before anything runs."""
    check_range("--gate", options.gate, compare.PAIRED)
    check_range("--processes", options.processes, 1)
    check_range("--seatings", options.seatings, 1)
    set_threads(options.threads, option="--threads", least=1)
    if options.clock == "cpu" and options.threads > 1:
        raise ValueError(f"--clock: is cpu, must be wall with {options.threads} threads")
    for _ in Suite(open_device(options.device, 0), options.scale).cases(options.op):
        break
    if "," in str(options.output.absolute()):
        raise ValueError(f"--output: is {options.output.absolute()}, must have no comma, which joins names of files")


if __name__ == "__main__":
    sys.exit(main())
