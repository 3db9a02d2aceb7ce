"""Requests, and what the engine gives back for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from dmtp_kernels.decode.state import MAX_STOP_IDS


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True)
class Request:
    """One prompt. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; the same seed gives the same tokens
    whatever else is in the batch.

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
        if not self.prompt:
            raise ValueError("prompt: is empty, must hold at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: is {self.max_new_tokens}, must be at least 1")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature: is {self.temperature}, must be finite and at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k: is {self.top_k}, must be at least 0 (0 = off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: is {self.top_p}, must be above 0 and at most 1 (1 = off)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: is {self.seed}, must be between 0 and 2^63 - 1")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: has {len(self.stop_ids)} entries, must have at most {MAX_STOP_IDS}")


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
