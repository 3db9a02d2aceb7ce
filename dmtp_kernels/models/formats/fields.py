"""Typed reads of a `config.json`: whatever is missing, of another type or out of range names the file and the key."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dmtp_kernels.models.checkpoint import CheckpointError

_LARGEST = 1 << 26
"""Bytes of a JSON file that are read at most; the index of a model of 500 shards is about 10 MB."""
_MOST = 2**31 - 1


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError: absent, too large, not JSON, a key twice, NaN or Infinity."""
    try:
        if not path.is_file():
            raise CheckpointError(f"checkpoint {path}: {'is not a file' if path.exists() else 'no such file'}")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _LARGEST:
                raise ValueError(f"longer than {_LARGEST} bytes")
            raw = file.read()
        value = json.loads(raw, object_pairs_hook=_unique, parse_constant=_not_a_number)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise CheckpointError(f"checkpoint {path}: is not readable JSON (nested too deep)") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: is not readable JSON ({_short(str(error))})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint {path}: is a JSON {type(value).__name__}, must be an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {_short(repr(key))} is there twice")
        found[key] = value
    return found


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _short(text: str) -> str:
    return " ".join((text if len(text) <= 120 else text[:117] + "...").split())


class Fields:
    """One object of a configuration. Every read with a `default` takes null and an absent key for it."""

    def __init__(self, file: Path, values: dict[str, Any], section: str = "") -> None:
        self.file = file
        self.values = values
        self._section = section

    def fail(self, what: str) -> NoReturn:
        """Raise CheckpointError with the file's name."""
        raise CheckpointError(f"checkpoint {self.file}: {what}")

    def name(self, key: str) -> str:
        """`key` with the sections that it is in."""
        return f"{self._section}.{key}" if self._section else key

    def given(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def wrong(self, key: str, must: str) -> NoReturn:
        """Raise CheckpointError that says what the key is and must be."""
        if not self.given(key):
            self.fail(f"{self.name(key)} is {'null' if key in self.values else 'missing'}, must be {must}")
        self.fail(f"{self.name(key)} is {_short(repr(self.values[key]))}, must be {must}")

    def integer(self, key: str, least: int = 1, most: int = _MOST) -> int:
        """An integer, no bool and no float."""
        value: Any = self.values.get(key)
        if not _is_integer(value) or not least <= value <= most:
            self.wrong(key, f"an integer between {least} and {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        if default is not None and not self.given(key):
            return default
        value = self.values.get(key)
        # an integer of 400 digits has no float
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e300:
            self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        if default is not None and not self.given(key):
            return default
        value = self.values.get(key)
        if not isinstance(value, bool):
            self.wrong(key, "true or false")
        return value

    def integers(self, key: str, least: int = 0) -> tuple[int, ...]:
        """A list of integers that is not empty."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(_is_integer(v) and least <= v <= _MOST for v in value):
            self.wrong(key, f"a list of integers from {least}")
        return tuple(value)

    def words(self, key: str, among: Sequence[str]) -> tuple[str, ...]:
        """A list of the given words."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) and v in among for v in value):
            self.wrong(key, f"a list of {' or '.join(map(repr, among))}")
        return tuple(value)

    def word(self, key: str, among: Sequence[str]) -> str:
        """One of the given words."""
        value = self.values.get(key)
        if not isinstance(value, str) or value not in among:
            self.wrong(key, " or ".join(map(repr, among)))
        return value

    def section(self, key: str) -> Fields:
        """The object under a key, empty where there is none."""
        value = self.values.get(key, {})
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.wrong(key, "an object")
        return Fields(self.file, value, self.name(key))

    def refuse(self, key: str, neutral: Sequence[Any], why: str) -> None:
        """Fail unless the key is absent, null or one of the values that change nothing."""
        value = self.values.get(key)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            self.fail(f"{self.name(key)} is {_short(repr(value))}: {why}")

    def known(self, keys: Sequence[str]) -> None:
        """Fail on a key outside `keys`."""
        for key in self.values:
            if key not in keys:
                self.fail(f"{self.name(_short(key))} is not a key that this reader knows")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def same(first: Fields, second: Fields, key: str) -> Fields:
    """Where `key` is given: the first of the two objects that has it, once they agree."""
    a, b = first.values.get(key), second.values.get(key)
    if a is not None and b is not None and a != b:
        first.fail(f"{first.name(key)} is {_short(repr(a))} but {second.name(key)} is {_short(repr(b))}")
    return second if a is None and b is not None else first
