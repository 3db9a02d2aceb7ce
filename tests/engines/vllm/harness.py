"""vLLM on this machine's CPU over the embedded checkpoint, and this library's loop counted as vLLM counts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed (make test-engines)")

from vllm import LLM, SamplingParams

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Request
from dmtp_kernels.engines.vllm import register
from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.formats import export_trio
from dmtp_kernels.training.data import held_out_prompts

register()


@dataclass(frozen=True)
class Outcome:
    """Tokens of every request; verification rounds, accepted candidates, and acceptances by place."""

    tokens: list[list[int]]
    rounds: int
    accepted: int
    places: list[int]
    log: str = ""

    @property
    def length(self) -> float:
        """Mean acceptance length."""
        return 1 + self.accepted / self.rounds


def prompts(count: int) -> list[list[int]]:
    """Held-out prompts, the first `count`."""
    return [list(prompt["text"].encode()) for prompt in held_out_prompts()[:count]]


def long_prompts() -> list[list[int]]:
    """Six prompts of 266 to 458 tokens, longer than the drafter's window of 128."""
    parts = prompts(36)
    return [[token for part in parts[i : i + 6] for token in part] for i in range(0, 36, 6)]


def export(root: Path, method: str) -> tuple[Path, Path]:
    """Directories of the embedded target and of the method's drafter, in public formats."""
    places = export_trio(root / method, load_checkpoint(drafters=[method]), method)
    return places.target, places.drafter


def start(target: Path, spec: dict[str, Any] | None, **options: Any) -> LLM:
    """vLLM in fp32 over a target; ids in, ids out. An engine that nobody holds is gone before this one starts."""
    gc.collect()
    settings: dict[str, Any] = {"max_model_len": 640, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20} | options
    return LLM(
        str(target),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=None if spec is None else dict(spec),
        **settings,
    )


def sampling(count: int, temperature: float = 0.0, seed: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=count, seed=seed, detokenize=False)


def run(llm: LLM, given: list[list[int]], params: SamplingParams) -> Outcome:
    """All prompts at once, and what vLLM counted since the engine started."""
    with log_lines() as lines:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
    counted = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    found = [list(output.outputs[0].token_ids) for output in outputs]
    if not counted:
        return Outcome(found, 0, 0, [], "\n".join(lines))
    return Outcome(
        found,
        int(counted["vllm:spec_decode_num_drafts"].value),
        int(counted["vllm:spec_decode_num_accepted_tokens"].value),
        [int(value) for value in counted["vllm:spec_decode_num_accepted_tokens_per_pos"].values],
        "\n".join(lines),
    )


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Lines of the plugin's log, which vLLM keeps from the root logger."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.dmtp_kernels")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def loop(checkpoint: Checkpoint, given: list[list[int]], count: int, method: str = "dmtp") -> Outcome:
    """This library's loop. vLLM counts a round's acceptances before it cuts the text to `count` tokens, so the loop
    gets room for one more round and is read up to the round that passes `count`."""
    engine = Engine(checkpoint, method, max_batch=8, max_tokens=640)
    ids = [engine.submit(Request(tuple(prompt), count + 8)) for prompt in given]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    kept: list[int] = []
    while engine.busy:
        for event in engine.step():
            so_far = tokens[event.request_id]
            if len(so_far) < count:
                if so_far:
                    kept.append(len(event.tokens) - 1)
                so_far += event.tokens
    places = [sum(k > place for k in kept) for place in range(7)]
    return Outcome([tokens[i][:count] for i in ids], len(kept), sum(kept), places)


def drafter_of(llm: LLM) -> Any:
    """The proposer of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
