"""What `dmtp generate` makes of text: bytes for the embedded model, the words of a chat for SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dmtp_kernels.decode.method import Method
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.presets import EOS
from dmtp_kernels.models.smollm2 import load_smollm2

SmolLM2Option = Annotated[
    bool,
    typer.Option("--smollm2", help="ask SmolLM2-135M-Instruct, with --checkpoint for other drafters of it"),
]


@dataclass(frozen=True)
class Words:
    """How a model reads and writes text: `encode` a prompt, `decode` what it produced, end at one of `stop`; the text
    `continues` the prompt, or answers it."""

    encode: Callable[[bytes], tuple[int, ...]]
    decode: Callable[[Sequence[int]], bytes]
    stop: tuple[int, ...]
    continues: bool


def as_bytes(tokens: Sequence[int]) -> bytes:
    """The text of byte tokens; special ids have none."""
    return bytes(token for token in tokens if token < 256)


BYTES = Words(tuple, as_bytes, (EOS,), continues=True)


def load_chat(checkpoint: Path | None, method: Method) -> tuple[Words, Checkpoint]:
    """SmolLM2 with what `method` needs besides, of `checkpoint` or of the file that ships with the package.

    Raises:
        ValueError: the packages that hold the model are missing, or the file cannot be used; names what is wrong.
    """
    try:
        smol = load_smollm2()
    except ImportError as error:
        raise ValueError(f"smollm2: {error}") from None

    def decode(tokens: Sequence[int]) -> bytes:
        return smol.tokenizer.to_bytes([token for token in tokens if token != smol.end])

    words = Words(lambda text: tuple(smol.chat(text.decode("utf-8", "replace"))), decode, (smol.end,), continues=False)
    if not method.uses_mtp and method.drafter is None:
        return words, Checkpoint(smol.model, None, {})
    return words, smol.with_drafters(checkpoint, [method.drafter] if method.drafter else [])
