"""How often a proposer names the target's own first choice, on the same text for every method.

Acceptance is counted at the positions a method's rounds happen to start from, which differ between methods; here every
method proposes at every position of the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmtp_kernels.decode.dense import target_logits
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import Method
from dmtp_kernels.decode.request import Completion
from dmtp_kernels.decode.round import finish_round, propose
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.models.checkpoint import Checkpoint


@torch.no_grad()
def teacher_forced_agreement(
    checkpoint: Checkpoint, method: Method, texts: Sequence[Completion], batch: int = 32
) -> list[float]:
    """Share of positions whose candidate k equals the target's argmax given the text before it, for k = 1..K.

    `texts` are autoregressive completions. Their requests are decoded again one token a round, whatever is proposed,
    so the same tokens come back; a proposal counts at every position that leaves K more tokens.
    """
    hits = torch.zeros(method.num_candidates, dtype=torch.int64)
    count = 0
    long_enough = [c for c in texts if len(c.tokens) > method.num_candidates]
    for start in range(0, len(long_enough), batch):
        more, positions = _agree(checkpoint, method, long_enough[start : start + batch])
        hits += more
        count += positions
    return [h / count for h in hits.tolist()] if count else []


def _agree(checkpoint: Checkpoint, method: Method, texts: Sequence[Completion]) -> tuple[torch.Tensor, int]:
    width = method.num_candidates
    lengths = torch.tensor([len(c.tokens) for c in texts])
    choice = torch.full((len(texts), int(lengths.max())), -1)  # the target's argmax for every emitted token
    for row, completion in enumerate(texts):
        prompt = completion.request.prompt
        logits = target_logits(checkpoint, torch.tensor([*prompt, *completion.tokens]))
        choice[row, : len(completion.tokens)] = logits[len(prompt) - 1 : -1].argmax(dim=-1)
    longest = max(len(c.request.prompt) + c.request.max_new_tokens for c in texts)
    engine = Engine(checkpoint, method, max_batch=len(texts), max_tokens=longest)
    row_of = {engine.submit(completion.request): row for row, completion in enumerate(texts)}
    engine.admit()
    engine.state.num_candidates.fill_(0)  # decode one token a round
    hits, count = torch.zeros(width, dtype=torch.int64), 0
    anchor = torch.zeros(len(texts), dtype=torch.int64)  # which emitted token each text's round starts from

    def counted_round(stack: Stack, state: BatchState) -> None:
        nonlocal count
        rows = torch.tensor([row_of[seat.request_id] for seat in engine.seats])
        after = anchor[rows, None] + torch.arange(1, width + 1)
        live = after[:, -1] < lengths[rows]
        matches = propose(stack, state).candidates[:, 1 : width + 1] == choice[rows[:, None], after * live[:, None]]
        hits.add_((matches & live[:, None]).sum(dim=0))
        count += int(live.sum())
        anchor[rows] += 1
        finish_round(stack, state)

    engine.round_function = counted_round
    while engine.busy:
        engine.step()
    return hits, count
