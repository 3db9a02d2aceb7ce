"""Bytes of the Python standard library's own source files, split by a hash of each file's path."""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels.models.presets import BOS, EOS

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
HELD_OUT_PROMPTS = Path(__file__).parent.parent / "assets" / "heldout.json"


def is_held_out(name: str) -> bool:
    """Whether the file of that relative POSIX path is kept out of training: one path in twenty."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 20 == 0


@dataclass(frozen=True)
class Corpus:
    """File contents by relative path, sorted."""

    files: dict[str, bytes]

    def split(self, held_out: bool) -> dict[str, bytes]:
        return {name: text for name, text in self.files.items() if is_held_out(name) == held_out}

    @cached_property
    def train(self) -> torch.Tensor:
        """Ids `[N]` int16 of the training files, each between BOS and EOS."""
        return _stream(self.split(held_out=False))

    @cached_property
    def held_out(self) -> torch.Tensor:
        """Ids `[N]` int16 of the held-out files."""
        return _stream(self.split(held_out=True))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every path and content: the data the record names."""
        total = hashlib.sha256()
        for name, text in self.files.items():
            total.update(f"{name}\0{hashlib.sha256(text).hexdigest()}\n".encode())
        return total.hexdigest()


def standard_library(root: Path | None = None) -> Corpus:
    """Read the running interpreter's `.py` files, without tests, generated tables and installed packages."""
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = {}
    for path in base.rglob("*.py"):
        relative = path.relative_to(base)
        if _SKIPPED.isdisjoint(relative.parts) and not relative.name.startswith("_sysconfigdata"):
            files[relative.as_posix()] = path.read_bytes()
    return Corpus(dict(sorted(files.items())))


def batch(stream: torch.Tensor, rows: int, length: int, *key: int) -> torch.Tensor:
    """Random windows `[rows, length]` int64 of `stream`, a function of `key` alone, so that a run can resume."""
    generator = seeded(*key)
    starts = torch.randint(0, stream.numel() - length, (rows,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)].long()


def seeded(*key: int) -> torch.Generator:
    """A generator whose state is a function of the integers in `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def held_out_prompts(path: Path | None = None) -> list[dict[str, Any]]:
    """The shipped prompts: `file`, `offset`, `text` (ASCII) and `reference`, the text that follows in the file."""
    return json.loads((path or HELD_OUT_PROMPTS).read_text())["prompts"]


def cut_prompts(corpus: Corpus, count: int = 64, seed: int = 0, reference: int = 136) -> dict[str, Any]:
    """Prompts of 16 to 120 bytes cut at arbitrary places of held-out files, as `assets/heldout.json` holds them."""
    chooser = random.Random(seed)
    files = [(name, text) for name, text in corpus.split(held_out=True).items() if len(text) > 1024]
    prompts: list[dict[str, Any]] = []
    while len(prompts) < count:
        name, text = files[len(prompts) % len(files)]
        length = 16 + round(len(prompts) * 104 / (count - 1))
        offset = chooser.randrange(len(text) - length - reference)
        piece = text[offset : offset + length + reference]
        if piece.isascii() and b"\r" not in piece and piece[:length].strip():
            cut = piece.decode()
            prompts.append({"file": name, "offset": offset, "text": cut[:length], "reference": cut[length:]})
    chooser.shuffle(prompts)
    return {
        "note": "Text of CPython's standard library, (c) Python Software Foundation, under the PSF licence version 2.",
        "python": sysconfig.get_python_version(),
        "prompts": prompts,
    }


def _stream(files: dict[str, bytes]) -> torch.Tensor:
    ids = [torch.empty(0, dtype=torch.int16)]
    for text in files.values():
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        ids += [torch.tensor([BOS], dtype=torch.int16), body.to(torch.int16), torch.tensor([EOS], dtype=torch.int16)]
    return torch.cat(ids)
