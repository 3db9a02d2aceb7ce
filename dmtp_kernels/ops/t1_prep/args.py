"""The inputs of `fused_t1_prep` as the op takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmtp_kernels.ops.lm_head.head import HeadArgs
from dmtp_kernels.ops.t1_prep.fusion import FusionArgs

SCHEMA = (
    "Tensor anchor_ids, Tensor h_mtp, Tensor embedding, "
    "Tensor? fusion_hidden, Tensor? t1_override, Tensor? mask_embed, Tensor? folded, "
    "Tensor? head_weight, Tensor? head_codes, Tensor? head_scale, Tensor? head_bound, Tensor? head_down, "
    "Tensor? head_up, Tensor? head_id_map, "
    "Tensor? fusion_weight, Tensor? fusion_down, Tensor? fusion_up, Tensor? norm_e, Tensor? norm_m, "
    "str head_format, int num_valid, int id_offset, str id_map_mode, int capacity, bool full_scan, "
    "str fusion_mode, str fusion_slots, float eps_e, float eps_m, float offset_e, float offset_m, "
    "int anchors, int mask_id, int num_masks, float embed_scale, int embedding_start, int num_embeddings, "
    "str logit_dtype='float32'"
)
"""All by position: keywords would double the dispatcher's 30 us."""


class PrepArgs(NamedTuple):
    """One field per argument of `SCHEMA`, in its order."""

    anchor_ids: torch.Tensor  # [B]
    h_mtp: torch.Tensor  # [B, H]
    embedding: torch.Tensor  # [Ve, E]
    fusion_hidden: torch.Tensor | None  # [B, Hf]
    t1_override: torch.Tensor | None  # [B]
    mask_embed: torch.Tensor | None  # [E]
    folded: torch.Tensor | None  # [Ve, E]
    head_weight: torch.Tensor | None
    head_codes: torch.Tensor | None
    head_scale: torch.Tensor | None
    head_bound: torch.Tensor | None
    head_down: torch.Tensor | None
    head_up: torch.Tensor | None
    head_id_map: torch.Tensor | None
    fusion_weight: torch.Tensor | None
    fusion_down: torch.Tensor | None
    fusion_up: torch.Tensor | None
    norm_e: torch.Tensor | None
    norm_m: torch.Tensor | None
    head_format: str
    num_valid: int
    id_offset: int
    id_map_mode: str
    capacity: int
    full_scan: bool
    fusion_mode: str
    fusion_slots: str
    eps_e: float
    eps_m: float
    offset_e: float
    offset_m: float
    anchors: int
    mask_id: int
    num_masks: int
    embed_scale: float
    embedding_start: int
    num_embeddings: int
    logit_dtype: str

    def head(self) -> HeadArgs | None:
        """The head, when there is one."""
        if self.head_weight is None:
            return None
        return HeadArgs(
            weight=self.head_weight,
            codes=self.head_codes,
            scale=self.head_scale,
            bound=self.head_bound,
            down=self.head_down,
            up=self.head_up,
            id_map=self.head_id_map,
            format=self.head_format,
            num_valid=self.num_valid,
            id_offset=self.id_offset,
            id_map_mode=self.id_map_mode,
            capacity=self.capacity,
            full_scan=self.full_scan,
        )

    def fusion(self) -> FusionArgs:
        """The fusion."""
        return FusionArgs(
            weight=self.fusion_weight,
            down=self.fusion_down,
            up=self.fusion_up,
            norm_e=self.norm_e,
            norm_m=self.norm_m,
            mode=self.fusion_mode,
            slots=self.fusion_slots,
            eps_e=self.eps_e,
            eps_m=self.eps_m,
            offset_e=self.offset_e,
            offset_m=self.offset_m,
        )

    def hidden(self) -> torch.Tensor:
        """The MTP hidden state that the fusion reads."""
        return self.h_mtp if self.fusion_hidden is None else self.fusion_hidden
