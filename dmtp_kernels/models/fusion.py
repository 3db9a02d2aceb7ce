"""Trainable form of the first-candidate fusion; decoding hands the same weights to `fused_t1_prep`."""

from __future__ import annotations

import torch
from torch import nn

from dmtp_kernels.models.layers import RMSNorm

MODES = ("residual", "residual_low_rank", "replace", "mask_residual")


class FusionModule(nn.Module):
    """Two norms and a projection of the MTP hidden (and the candidate's embedding).

    `residual`: `W [RMS_e(E); RMS_m(h)]`, W `[H, 2H]`, zero at the start, added to the T1 slot. `replace`: the same
    product in place of E(T1). `residual_low_rank`: `up(down(RMS_m(h)))` added to the T1 slot, up zero at the start.
    `mask_residual`: `W RMS_m(h)`, W `[H, H]`, zero at the start, added to every MASK slot.
    """

    def __init__(self, mode: str, width: int, eps: float, rank: int = 32) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: is {mode!r}, must be one of {', '.join(MODES)}")
        self.mode = mode
        self.norm_m = RMSNorm(width, eps)
        if mode in ("residual", "replace"):
            self.norm_e = RMSNorm(width, eps)
            self.proj = nn.Linear(2 * width, width, bias=False)
            nn.init.zeros_(self.proj.weight)
        elif mode == "mask_residual":
            self.proj = nn.Linear(width, width, bias=False)
            nn.init.zeros_(self.proj.weight)
        else:
            self.down = nn.Linear(width, rank, bias=False)
            self.up = nn.Linear(rank, width, bias=False)
            nn.init.zeros_(self.up.weight)

    def forward(self, embed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The fused vector `[..., H]` of `embed[..., H]` = E(T1) and `hidden[..., H]` = the MTP hidden that predicted
        T1."""
        hidden = self.norm_m(hidden)
        if self.mode in ("residual", "replace"):
            return self.proj(torch.cat([self.norm_e(embed), hidden], dim=-1))
        return self.proj(hidden) if self.mode == "mask_residual" else self.up(self.down(hidden))
