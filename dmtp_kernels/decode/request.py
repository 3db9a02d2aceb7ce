"""Requests, and what the engine gives back for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import Any

from dmtp_kernels.decode.state import MAX_STOP_IDS

_MOST_ID = 2**31 - 1
_MOST_TEMPERATURE = 1e6


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True)
class Request:
    """One prompt. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    The same seed gives the same tokens whatever else is in the batch. With `Engine(verification="target")` this holds
    across preemption too. With `"rejection"` and `"block"` a sampled request that is preempted draws other tokens from
    the same distribution from there on: its new prefill emits one token by itself, so later rounds start elsewhere.

    Integers of numpy are taken and kept as `int`.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "stop_ids", "max_new_tokens", "top_k", "seed"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if not isinstance(self.prompt, tuple) or not all(_is_int(token) for token in self.prompt):
            raise ValueError("prompt: must be a tuple of token ids")
        if not self.prompt:
            raise ValueError("prompt: is empty, must hold at least one token")
        if not isinstance(self.stop_ids, tuple) or not all(_is_int(token) for token in self.stop_ids):
            raise ValueError("stop_ids: must be a tuple of token ids")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: has {len(self.stop_ids)} entries, must have at most {MAX_STOP_IDS}")
        if any(not 0 <= token <= _MOST_ID for token in self.stop_ids):
            raise ValueError(f"stop_ids: are {self.stop_ids}, must be between 0 and {_MOST_ID}")
        for name, least, most in (("max_new_tokens", 1, _MOST_ID), ("top_k", 0, _MOST_ID), ("seed", 0, 2**63 - 1)):
            value = getattr(self, name)
            if not _is_int(value) or not least <= value <= most:
                raise ValueError(f"{name}: is {value}, must be an integer between {least} and {most}")
        # the device holds both in fp32, where the limit is infinity
        if not 0 <= self.temperature <= _MOST_TEMPERATURE:
            raise ValueError(f"temperature: is {self.temperature}, must be between 0 and {_MOST_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: is {self.top_p}, must be above 0 and at most 1 (1 = off)")


def _plain(value: Any) -> Any:
    """Integers of other libraries as int, in a tuple too; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_plain(entry) for entry in value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class Completion:
    """A request's output. `histogram[k]` counts its verification rounds whose first k candidates matched."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def rounds(self) -> int:
        """Verification rounds (the prefill that emits the first token is not one)."""
        return sum(self.histogram)


@dataclass(frozen=True)
class Event:
    """New tokens of one request, and its end if it ended."""

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
