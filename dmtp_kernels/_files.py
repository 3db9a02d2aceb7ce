"""Files that a command leaves on disk: refused before anything is measured, and whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def check_file(option: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """See that a file of that name can be written, before anything is measured.

    Raises:
        ValueError: another suffix than one of `suffixes`, a name that is too long, no directory to write to, or
            something there that is no regular file; names the option.
    """
    if suffixes and (not path.name.endswith(tuple(suffixes)) or path.name in suffixes):
        raise ValueError(f"{option}: is {path}, must end in {' or '.join(suffixes)}")
    target = _target(option, path)
    writable = os.access(target.parent, os.W_OK | os.X_OK)
    if writable:
        longest = os.pathconf(target.parent, "PC_NAME_MAX")
        if len(os.fsencode(target.name)) > longest:
            raise ValueError(f"{option}: is {path}, its name must have at most {longest} bytes")
        if target.exists() and not target.is_dir() and not target.is_file():
            raise ValueError(f"{option}: is {path}, must be a regular file")
    if not writable or target.is_dir():
        raise ValueError(f"{option}: is {path}, must be a file in a directory that exists and can be written")


def check_directory(option: str, path: Path) -> None:
    """See that files can be written to a directory, which need not exist, before anything is measured.

    Raises:
        ValueError: it is something else, or it cannot be made; names the option.
    """
    there = _target(option, path)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: is {path}, must be a directory that can be written or made")


@contextmanager
def replacing(option: str, path: Path) -> Iterator[Path]:
    """A file to write, which becomes `path`, or what `path` is a link to, if nothing fails; else nothing is left of it.

    Raises:
        ValueError: the system refuses; names the option.
    """
    path = _target(option, path)
    try:
        # a directory: the profiler has temporary files of its own beside what it writes
        with TemporaryDirectory(prefix=".dmtp.", dir=path.parent) as directory:
            yield Path(directory, path.name)
            os.replace(Path(directory, path.name), path)
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror or error}") from error


def write_text(option: str, path: Path, text: str) -> None:
    """Replace a file by one that holds `text`.

    Raises:
        ValueError: the system refuses; names the option. What was there before is still there.
    """
    with replacing(option, path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _target(option: str, path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a link to itself
        raise ValueError(f"{option}: is {path}, must be a file in a directory that exists and can be written") from None
