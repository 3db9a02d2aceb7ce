"""Files of `dmtp bench ops`, read by tools that must not trust them: what is missing or wrong is named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIND = "dmtp bench ops"


class Refused(ValueError):
    """Why there is no verdict."""


@dataclass(frozen=True)
class Place:
    """A value of a JSON file, the file's name and the value's keys in it."""

    value: Any
    file: str
    keys: str = ""

    def refuse(self, why: str) -> Refused:
        """An error that says where."""
        return Refused(f"{self.file}: {self.keys} {why}" if self.keys else f"{self.file}: {why}")

    def __getitem__(self, key: str) -> Place:
        inner = Place(self.object().get(key), self.file, f"{self.keys}.{key}" if self.keys else key)
        if key not in self.value:
            raise inner.refuse("is missing")
        return inner

    def object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.refuse("must be an object")
        return self.value

    def items(self) -> Iterator[Place]:
        """What an object holds."""
        return (self[key] for key in self.object())

    def entries(self, least: int = 0) -> list[Place]:
        """What a list holds."""
        if not isinstance(self.value, list) or len(self.value) < least:
            raise self.refuse("must be a list" + (f" of at least {least}" if least else ""))
        return [Place(value, self.file, f"{self.keys}[{i}]") for i, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.refuse("must be a string")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.refuse("must be true or false")
        return self.value

    def count(self, least: int = 1) -> int:
        """A whole number."""
        if not isinstance(self.value, int) or not _number(self.value) or self.value < least:
            raise self.refuse(f"must be a whole number of at least {least}")
        return self.value

    def positive(self) -> float:
        """A finite number above 0."""
        if not _number(self.value) or self.value <= 0:
            raise self.refuse("must be a finite number above 0")
        return float(self.value)

    def amount(self) -> float:
        """A finite number, 0 or more."""
        if not _number(self.value) or self.value < 0:
            raise self.refuse("must be a finite number, 0 or more")
        return float(self.value)


def _number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def load(name: str) -> Place:
    """A JSON file.

    Raises:
        Refused: it cannot be read or is no JSON.
    """
    try:
        return Place(json.loads(Path(name).read_text(encoding="utf-8")), name)
    except RecursionError:
        raise Refused(f"{name}: is nested too deeply") from None
    except OSError as error:
        raise Refused(f"{name}: {error.strerror or error}") from None
    except ValueError as error:
        raise Refused(f"{name}: {error}") from None


def is_result(place: Place) -> bool:
    """Whether it says of itself that it is a result of `dmtp bench ops`."""
    return isinstance(place.value, dict) and place.value.get("kind") == KIND


def cases(run: Place) -> list[Place]:
    """The cases of a result, each with its op and its name in `keys`.

    Raises:
        Refused: there are none, or one has no name, or two have one.
    """
    found: dict[tuple[str, str], Place] = {}
    for entry in run["cases"].entries(least=1):
        key = entry["op"].text(), entry["case"].text()
        if key in found:
            raise entry.refuse(f"is {key[0]} {key[1]} once more")
        found[key] = Place(entry.value, entry.file, f"{entry.keys} ({key[0]} {key[1]})")
    return list(found.values())


def check_verdict(case: Place) -> None:
    """Raise `Refused` unless the case says whether its outputs were right."""
    case["agrees"].flag()
    if case["disagreement"].value is not None:
        case["disagreement"].text()
