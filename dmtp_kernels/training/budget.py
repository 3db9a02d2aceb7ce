"""How long each stage trains, and on what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Steps of the stages; `rows` windows of `length` bytes a step, `anchors` blocks in each window.

    `drafter_rows` windows in the stages after the first (0: as many). `scratch` trains every drafter a second time,
    from fresh weights, for as many steps as the other way takes in all.
    """

    target_steps: int
    drafter_steps: int
    finetune_steps: int
    rows: int = 16
    length: int = 256
    anchors: int = 16
    save_every: int = 100
    eval_rows: int = 64
    drafter_rows: int = 0
    scratch: bool = False

    @property
    def steps(self) -> tuple[int, int, int, int]:
        drafters = self.drafter_steps + self.finetune_steps
        return self.target_steps, self.drafter_steps, self.finetune_steps, drafters if self.scratch else 0

    def windows(self, stage: int) -> int:
        """Windows of one step in stage number `stage`."""
        return self.drafter_rows if stage and self.drafter_rows else self.rows


BUDGETS = {
    # measured on two cores: 0.4, 0.2 and 1.1 s a step, 19 minutes in all
    "full": Budget(target_steps=1000, drafter_steps=900, finetune_steps=480),
    "smoke": Budget(4, 4, 2, rows=2, length=48, anchors=4, save_every=2, eval_rows=2),
    # 16 drafters twice, two seeds beside each other, one thread each
    "ablation": Budget(600, 600, 240, drafter_rows=8, scratch=True),
    "ablation-smoke": Budget(4, 3, 2, rows=2, length=48, anchors=4, save_every=2, eval_rows=2, scratch=True),
}
