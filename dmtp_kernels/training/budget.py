"""How long each stage trains, and on what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Steps of the three stages; `rows` windows of `length` bytes a step, `anchors` blocks in each window."""

    target_steps: int
    drafter_steps: int
    finetune_steps: int
    rows: int = 16
    length: int = 256
    anchors: int = 16
    save_every: int = 100
    eval_rows: int = 64

    @property
    def steps(self) -> tuple[int, int, int]:
        return self.target_steps, self.drafter_steps, self.finetune_steps


BUDGETS = {
    # measured on two cores: 0.4, 0.2 and 1.1 s a step, 19 minutes in all
    "full": Budget(target_steps=1000, drafter_steps=900, finetune_steps=480),
    "smoke": Budget(4, 4, 2, rows=2, length=48, anchors=4, save_every=2, eval_rows=2),
}
