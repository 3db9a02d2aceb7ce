"""The compiled module. Functions of ops are called by the ops' `cpu.py` with checked arguments, by position."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

_Tensors = Sequence[torch.Tensor]

class _BuildInfo(TypedDict):
    version: str
    torch: str
    compiler: str
    flags: str
    capabilities: dict[str, str]
    cuda_compiler: str
    cuda_architectures: list[str]

def accept_prefix(
    candidates: torch.Tensor,
    target: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    num_candidates: torch.Tensor | None,
    accept_len: torch.Tensor,
    commit_len: torch.Tensor,
    bonus: torch.Tensor,
    out_tokens: torch.Tensor,
    finished: torch.Tensor,
    /,
) -> None: ...
def accept_sampled(
    block: bool,
    candidates: torch.Tensor,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    stop_ids: torch.Tensor,
    budget: torch.Tensor,
    draft_probs: torch.Tensor | None,
    num_candidates: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    draft_ids: torch.Tensor | None,
    accept_len: torch.Tensor,
    commit_len: torch.Tensor,
    bonus: torch.Tensor,
    out_tokens: torch.Tensor,
    finished: torch.Tensor,
    status: torch.Tensor,
    /,
) -> None: ...
def advance_round(
    state: _Tensors,
    tables: _Tensors,
    page_sizes: Sequence[int],
    grants: torch.Tensor | None,
    mask_id: int,
    first_page: int,
    outputs: _Tensors,
    /,
) -> None: ...
def allocate(wanted: list[Any], device: torch.device) -> list[Any]: ...
def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    ctx_len: torch.Tensor,
    block_k: torch.Tensor | None,
    block_v: torch.Tensor | None,
    block_len: torch.Tensor | None,
    window: int,
    by_query: bool,
    block_causal: bool,
    valid_from: torch.Tensor | None,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    /,
) -> None: ...
def build_info() -> _BuildInfo: ...
def capabilities() -> list[str]: ...
def capability() -> str: ...
def commit_kv(
    rows_k: _Tensors,
    rows_v: _Tensors,
    k_caches: _Tensors,
    v_caches: _Tensors,
    valid: torch.Tensor,
    dst: torch.Tensor,
    pending_slot: torch.Tensor | None,
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
    lengths: torch.Tensor | None,
    live: torch.Tensor | None,
    first_slot: int,
    k_scale: _Tensors,
    v_scale: _Tensors,
    k_norm: _Tensors,
    k_norm_eps: float,
    k_norm_offset: float,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    error: torch.Tensor,
    /,
) -> None: ...
def commit_round(
    rows_k: _Tensors,
    rows_v: _Tensors,
    k_caches: _Tensors,
    v_caches: _Tensors,
    valid: torch.Tensor,
    dst: _Tensors,
    counts: Sequence[int],
    pending_slot: torch.Tensor | None,
    promote_dst: torch.Tensor | None,
    scratch_dst: torch.Tensor | None,
    hidden: torch.Tensor | None,
    next_hidden: torch.Tensor | None,
    lengths: torch.Tensor | None,
    live: torch.Tensor | None,
    first_slot: Sequence[int],
    k_scale: Sequence[torch.Tensor | None],
    v_scale: Sequence[torch.Tensor | None],
    error: torch.Tensor,
    /,
) -> None: ...
def draft_pages(
    source: torch.Tensor,
    pool: torch.Tensor | None,
    ctx_len: torch.Tensor,
    valid_from: torch.Tensor | None,
    window: int,
    page_size: int,
    block_slots: int,
    slots: bool,
    draft_table: torch.Tensor,
    draft_len: torch.Tensor,
    kv_skip: torch.Tensor,
    /,
) -> None: ...
def lm_head_rescore(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    count: torch.Tensor,
    k: int,
    id_offset: int,
    num_valid: int,
    logit_dtype: str,
    key: torch.Tensor,
    /,
) -> bool: ...
def lm_head_screen(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    codes: torch.Tensor | None,
    scale: torch.Tensor | None,
    bound: torch.Tensor | None,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    id_map: torch.Tensor | None,
    format: str,
    num_valid: int,
    id_offset: int,
    id_map_mode: str,
    capacity: int,
    full_scan: bool,
    k: int,
    ids: torch.Tensor,
    count: torch.Tensor,
    lower_bound: torch.Tensor,
    /,
) -> bool: ...
def lm_head_select(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    codes: torch.Tensor | None,
    scale: torch.Tensor | None,
    bound: torch.Tensor | None,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    id_map: torch.Tensor | None,
    format: str,
    num_valid: int,
    id_offset: int,
    id_map_mode: str,
    capacity: int,
    full_scan: bool,
    k: int,
    logit_dtype: str,
    key: torch.Tensor,
    status: torch.Tensor,
    /,
) -> bool: ...
def parallel_parts(n: int, grain: int) -> list[tuple[int, int]]: ...
def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    num_valid: int | None,
    stream: int,
    token: torch.Tensor,
    status: torch.Tensor,
    /,
) -> None: ...
def set_capability(name: str) -> None: ...
def signature(values: list[Any]) -> bytes | None: ...
def t1_prep(
    anchor_ids: torch.Tensor,
    token: torch.Tensor,
    status: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding: torch.Tensor,
    mask_embed: torch.Tensor | None,
    folded: torch.Tensor | None,
    first: torch.Tensor | None,
    up: torch.Tensor | None,
    norm_e: torch.Tensor | None,
    norm_m: torch.Tensor | None,
    mode: str,
    at_masks: bool,
    eps_e: float,
    eps_m: float,
    offset_e: float,
    offset_m: float,
    anchors: int,
    num_masks: int,
    mask_id: int,
    embed_scale: float,
    embedding_start: int,
    num_embeddings: int,
    t1: torch.Tensor,
    block_ids: torch.Tensor,
    block_embeds: torch.Tensor,
    certified: torch.Tensor,
    /,
) -> bool: ...
