"""Which of this library's ops run, each asked once whether it takes the call, with one line in the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger

from dmtp_kernels import supports

# below `vllm`, whose handlers and level are the user's
logger = init_logger("vllm.dmtp_kernels")


class Switches:
    """The ops that are switched on. One that refuses its first call stays off."""

    def __init__(self, ops: Iterable[str]) -> None:
        self._on = set(ops)
        self._asked: set[str] = set()

    def is_on(self, op: str) -> bool:
        """Whether `op` is switched on and has refused nothing."""
        return op in self._on

    def takes(self, op: str, *inputs: Any, **keywords: Any) -> bool:
        """Whether `op` is to run on these inputs, those of its Python function; its first call decides."""
        if op in self._on and op not in self._asked:
            self.decide(op, supports(op, *inputs, **keywords))
        return op in self._on

    def decide(self, op: str, reason: str | None) -> None:
        """Run `op` from now on, or never for a reason; says so in the log."""
        self._asked.add(op)
        if op not in self._on:
            return
        if reason is None:
            logger.info("dmtp: %s runs in place of vLLM's own", op)
        else:
            self._on.discard(op)
            logger.warning("dmtp: %s falls back to vLLM's own: %s", op, reason)
