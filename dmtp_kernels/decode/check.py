"""Is a method's output the target's own? Compares with autoregressive decoding, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.decode.dense import target_logits
from dmtp_kernels.decode.request import Completion
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.ops.sample.philox import SAMPLE, exponential

TIE = 1e-4
"""Scores closer than this, relative to their size, count as tied: fp32 sums of a few hundred terms differ by that
little."""


@dataclass(frozen=True)
class Verdict:
    """How many prompts agree: exactly, or only with the verify-shaped run after a tie; the others are mismatches.

    `mismatches` lists (prompt index, index of the first differing token).
    """

    prompts: int
    exact: int
    ties: int
    mismatches: tuple[tuple[int, int], ...]

    @property
    def identical(self) -> bool:
        """No mismatch."""
        return not self.mismatches


def compare_outputs(
    checkpoint: Checkpoint,
    outputs: list[Completion],
    autoregressive: list[Completion],
    verify_shaped: list[Completion],
) -> Verdict:
    """Judge every output against the autoregressive one of the same request.

    A first difference is excused only where the two tokens' scores tie within float rounding (recomputed here from the
    common prefix) and the output equals the autoregressive run in the shape of a verification.
    """
    exact = ties = 0
    mismatches = []
    for index, (got, want, shaped) in enumerate(zip(outputs, autoregressive, verify_shaped, strict=True)):
        if got.tokens == want.tokens:
            exact += 1
            continue
        at = first_difference(got.tokens, want.tokens)
        both = at < min(len(got.tokens), len(want.tokens))
        if both and got.tokens == shaped.tokens and is_tie(checkpoint, want, at, got.tokens[at]):
            ties += 1
        else:
            mismatches.append((index, at))
    return Verdict(len(outputs), exact, ties, tuple(mismatches))


def first_difference(a: list[int], b: list[int]) -> int:
    """Index of the first token that differs; the shorter length where one is a prefix of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def is_tie(checkpoint: Checkpoint, completion: Completion, at: int, other: int) -> bool:
    """Whether token `at` of a completion and the token `other` have scores within `TIE` of each other."""
    request = completion.request
    ids = torch.tensor([*request.prompt, *completion.tokens[:at]])
    logits = target_logits(checkpoint, ids)[-1]
    chosen = completion.tokens[at]
    scores = logits[[chosen, other]].double()
    if request.temperature > 0:
        position = torch.tensor([len(ids)])
        race = exponential(torch.tensor([request.seed]), position, SAMPLE, logits.shape[0])[0]
        scores = scores / request.temperature - race[[chosen, other]].log()
    return bool((scores[0] - scores[1]).abs() <= TIE * scores.abs().max().clamp(min=1.0))
