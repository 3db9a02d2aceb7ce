"""One process per job, beside each other, with a thread each."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any


def run_beside(job: Callable[..., Any], arguments: Mapping[Any, tuple[Any, ...]]) -> dict[Any, Any]:
    """What `job(*arguments[key])` returns, by key; all run at once, in processes that end with this one.

    `job` is a function of a module. A ValueError, RuntimeError or OSError of one of them is raised here, as a
    RuntimeError that names its key where the process just ended, after the others were stopped.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[Any, Connection]] = {}
    results: dict[Any, Any] = {}
    try:
        for key, values in arguments.items():
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, job, values), daemon=True)
            process.start()
            theirs.close()
            running[key] = process, ours
        while len(results) < len(running):
            wait([ours for key, (_, ours) in running.items() if key not in results])
            for key, (process, ours) in running.items():
                if key not in results and ours.poll():
                    results[key] = _result(key, process, ours)
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()
    return {key: results[key] for key in arguments}


def _result(key: Any, process: Any, ours: Connection) -> Any:
    try:
        outcome = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{key}: its process ended with {process.exitcode}") from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome[0]


def _run(theirs: Connection, job: Callable[..., Any], values: tuple[Any, ...]) -> None:
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        theirs.send((job(*values),))
    except (ValueError, RuntimeError, OSError) as error:
        theirs.send(error)
    except KeyboardInterrupt:
        sys.exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
