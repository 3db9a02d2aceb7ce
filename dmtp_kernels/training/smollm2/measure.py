"""Acceptance on chat prompts that training leaves out, by the decode loop, and identity with plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmtp_kernels.decode.evaluate import add_to_record, compare
from dmtp_kernels.models.checkpoint import load_checkpoint
from dmtp_kernels.models.smollm2 import PROMPTS, SmolLM2, load_smollm2

METHODS = ("mtp3", "dflash", "dmtp")
TEMPERATURES = (0.0, 0.6, 1.0)
NEW_TOKENS = 24


def measure(
    path: Path,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    methods: Sequence[str] = METHODS,
    new_tokens: int = NEW_TOKENS,
    smol: SmolLM2 | None = None,
    record: bool = True,
    log: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Decode `PROMPTS` with every method in fp32, all in one batch; `record`: put the figures into that beside `path`.

    Raises CheckpointError where the file cannot be used, ImportError without the model's packages.
    """
    smol = load_smollm2() if smol is None else smol
    checkpoint = load_checkpoint(path, target=smol.model)
    chats = [tuple(smol.chat(prompt)) for prompt in PROMPTS]
    results = []
    for temperature in temperatures:
        result = compare(
            checkpoint,
            chats,
            methods,
            max_new_tokens=new_tokens,
            temperature=temperature,
            batch=len(chats),
            stop_ids=(smol.end,),
            check=True,
            agreement=False,
        )
        # what this machine did beside them is no figure of the methods
        for row in result["methods"].values():
            del row["tokens_per_second"]
        if record:
            add_to_record(path, result)
        results.append(result)
        for name, row in result["methods"].items():
            if row.get("t1_acceptance") is not None:
                log(
                    f"T={temperature} {name}: T1 {100 * row['t1_acceptance']:.1f} %, "
                    f"{row['per_verify_length']:.2f} tokens per verify, identical {row['identical']}"
                )
    return results
