"""Every way in which one value of a result can be wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

GONE = "gone"
GARBAGE: tuple[Any, ...] = (
    *(None, "x", -1, 0, float("nan"), float("inf"), 10**400, True),
    *([], {}, [None], ["x"], {"x": 1}, {"x": None}),
)


def damaged(good: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """The keys of a value, what stands in its place (`GONE`: nothing), and the whole with it; of lists the first."""
    good = json.loads(json.dumps(good))
    for keys in _places(good):
        for garbage in (GONE, *GARBAGE):
            run = copy.deepcopy(good)
            holder = run
            for key in keys[:-1]:
                holder = holder[key]
            if garbage == holder[keys[-1]] or (garbage == GONE and isinstance(keys[-1], int)):
                continue
            holder[keys[-1]] = garbage
            if garbage == GONE:
                del holder[keys[-1]]
            yield keys, garbage, run


def _places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*keys, key)
        yield from _places(one, (*keys, key))
