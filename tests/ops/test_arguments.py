"""Bad arguments of the T1 path and of attention are named; `supports` says what a call would."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dmtp_kernels
from dmtp_kernels.ops.accept import accept_prefix
from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.draft_pages import draft_page_table
from dmtp_kernels.ops.lm_head import (
    canonical_dot,
    combine_keys,
    decode_key,
    encode_key,
    lm_head_report,
    lm_head_rescore,
    lm_head_screen,
    lm_head_select,
    pack_lm_head,
)
from dmtp_kernels.ops.lm_head.op import LM_HEAD_SELECT
from dmtp_kernels.ops.t1_prep import Fusion, check_mask_id, fold_fusion, fused_t1_prep
from dmtp_kernels.ops.t1_prep.distributed import fused_t1_prep_sharded

W = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
HEAD, ONE = pack_lm_head(W, capacity=4), torch.ones(1, dtype=torch.int64)
RESIDUAL = Fusion.residual(W[:32], norm_m=torch.ones(32))


def prep(hidden: Any = W[:1], head: Any = HEAD, table: Any = W, fusion: Any = RESIDUAL, **options: Any) -> Any:
    return fused_t1_prep(ONE, hidden, head, table, fusion, **{"mask_id": 1, **options})


def head_with(**fields: Any) -> Any:
    return dataclasses.replace(HEAD, **fields)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "ids": (lambda: lm_head_rescore(W[:1], W, [1], torch.ones(1).int()), "ids: is a list"),  # type: ignore[arg-type]
    "map": (lambda: pack_lm_head(W, id_map=[1], id_map_mode="offset"), "id_map: is a list"),  # type: ignore[arg-type]
    "scale": (lambda: pack_lm_head(W.to(torch.int8), weight_scale=[1]), "weight_scale: is a list"),  # type: ignore[arg-type]
    "one row": (lambda: pack_lm_head(W[0].to(torch.int8), weight_scale=W[0]), "weight: has 1 dimensions"),
    "factors": (lambda: pack_lm_head(W, format="low_rank", factors=[W]), "factors: has 1 entries"),  # type: ignore[arg-type]
    "capacity": (lambda: pack_lm_head(W, capacity=1.5), "capacity: is 1.5"),  # type: ignore[arg-type]
    "valid": (lambda: pack_lm_head(W, num_valid=True), "num_valid: is True"),
    "matrix": (lambda: Fusion.residual([1], norm_m=torch.ones(32)), "weight: is a list"),  # type: ignore[arg-type]
    "eps": (lambda: Fusion.residual(W, norm_m=torch.ones(32), eps_m=float("nan")), "eps_m: is nan"),
    "table": (
        lambda: fused_t1_prep(torch.zeros(1).long(), W[:1], pack_lm_head(W), None, Fusion(), mask_id=1),  # type: ignore[arg-type]
        "embedding: is a NoneType",
    ),
    "factor": (
        lambda: fused_t1_prep(
            torch.zeros(1).long(), W[:1], pack_lm_head(W), W, Fusion(), mask_id=1, embed_scale=float("inf")
        ),
        "embed_scale: is inf",
    ),
    # what an object carries is named with it, and the argument at fault is the one that belongs to the call
    "narrow h": (lambda: prep(W[:1, :20]), "h_mtp: dimension 1 (H) is 20, must be 32 like head.weight"),
    "narrow hidden": (
        lambda: lm_head_select(W[:1, :20], HEAD),
        "hidden: dimension 1 (H) is 20, must be 32 like head.weight",
    ),
    "rows h": (lambda: prep(W[:2]), "h_mtp: dimension 0 (B) is 2, must be 1 like anchor_ids"),
    "narrow table": (lambda: prep(table=W[:, :20]), "fusion.weight: dimension 0 (E) is 32, must be 20 like embedding"),
    "narrow fused": (
        lambda: prep(fusion_hidden=W[:1, :20]),
        "fusion.norm_m: dimension 0 (H) is 32, must be 20 like fusion_hidden",
    ),
    "narrow given": (
        lambda: prep(W[:1, :20], None, t1_override=ONE),
        "fusion.norm_m: dimension 0 (H) is 32, must be 20 like h_mtp",
    ),
    "narrow mask": (lambda: prep(mask_embed=W[0, :20]), "mask_embed: dimension 0 (E) is 20, must be 32 like embedding"),
    "rescored": (
        lambda: lm_head_rescore(W[:1], W[:, :20], ONE[None], ONE),
        "weight: dimension 1 (H) is 20, must be 32 like hidden",
    ),
    "device of head": (
        lambda: prep(head=pack_lm_head(W.to("meta"), format="dense")),
        "head.weight: is on meta, must be on cpu like anchor_ids",
    ),
    "device of norm": (
        lambda: prep(fusion=Fusion.residual(W[:32].to("meta"), norm_m=torch.ones(32, device="meta"))),
        "fusion.weight: is on meta, must be on cpu like anchor_ids",
    ),
    "head device": (
        lambda: lm_head_select(W[:1], pack_lm_head(W.to("meta"), format="dense")),
        "head.weight: is on meta, must be on cpu like hidden",
    ),
    # types that the dispatcher would refuse with its whole schema
    "dtype": (lambda: lm_head_select(W[:1], HEAD, logit_dtype=torch.bfloat16), "logit_dtype: is torch.bfloat16"),  # type: ignore[arg-type]
    "dtype of prep": (lambda: prep(logit_dtype=torch.bfloat16), "logit_dtype: is torch.bfloat16"),
    "dtype of rescore": (
        lambda: lm_head_rescore(W[:1], W, ONE[None], ONE, logit_dtype=torch.float32),  # type: ignore[arg-type]
        "logit_dtype: is torch.float32",
    ),
    "hidden": (lambda: lm_head_select(None, HEAD), "hidden: is a NoneType"),  # type: ignore[arg-type]
    "hidden of screen": (lambda: lm_head_screen([1], HEAD), "hidden: is a list"),  # type: ignore[arg-type]
    "k": (lambda: lm_head_select(W[:1], HEAD, 1.5), "k: is 1.5, must be a whole number"),  # type: ignore[arg-type]
    "k of screen": (lambda: lm_head_screen(W[:1], HEAD, k=None), "k: is None"),  # type: ignore[arg-type]
    "columns": (lambda: lm_head_screen(W[:1], HEAD, 1.5), "capacity: is 1.5"),  # type: ignore[arg-type]
    "k of rescore": (lambda: lm_head_rescore(W[:1], W, ONE[None], ONE, "2"), "k: is '2'"),  # type: ignore[arg-type]
    "large k of rescore": (lambda: lm_head_rescore(W[:1], W, ONE[None], ONE, 2), "k: is 2, must be between 1 and 1"),
    "offset": (lambda: lm_head_rescore(W[:1], W, ONE[None], ONE, 1, 0.5), "id_offset: is 0.5"),  # type: ignore[arg-type]
    "real rows": (
        lambda: lm_head_rescore(W[:1], W, ONE[None], ONE, num_valid=W),  # type: ignore[arg-type]
        "num_valid: is tensor",
    ),
    "mask id": (lambda: prep(mask_id=None), "mask_id: is None, must be a whole number"),
    "mask id alone": (lambda: check_mask_id(None, 8), "mask_id: is None"),  # type: ignore[arg-type]
    "anchors": (lambda: prep(anchors=2.0), "anchors: is 2.0"),
    "masks": (lambda: prep(num_masks="6"), "num_masks: is '6'"),
    "start": (lambda: prep(embedding_start=None), "embedding_start: is None"),
    "rows": (lambda: prep(num_embeddings=64.0), "num_embeddings: is 64.0"),
    "a factor": (lambda: prep(embed_scale="1"), "embed_scale: is '1', must be a number"),
    "given": (lambda: prep(t1_override=[1]), "t1_override: is a list"),
    "mask": (lambda: prep(mask_embed=1.0), "mask_embed: is a float"),
    "fused": (lambda: prep(fusion_hidden=(W,)), "fusion_hidden: is a tuple"),
    "folded": (lambda: prep(folded=True), "folded: is a bool"),
    "h": (lambda: prep([1.0]), "h_mtp: is a list"),
    "sharded": (
        lambda: fused_t1_prep_sharded(ONE, W[:1], HEAD, W, RESIDUAL, mask_id=None),  # type: ignore[arg-type]
        "mask_id: is None",
    ),
    "norm": (
        lambda: Fusion.residual(W[:32], norm_m=torch.ones(32), offset_m=None),
        "offset_m: is None, must be a number",
    ),
    "eps text": (lambda: Fusion.residual(W[:32], norm_m=torch.ones(32), eps_m="1"), "eps_m: is '1'"),
    "codes": (lambda: head_with(codes=[1]), "codes: is a list"),
    "rows of head": (lambda: head_with(num_valid=None), "num_valid: is None"),
    "scan": (lambda: head_with(full_scan=1), "full_scan: is a int"),
    "fold table": (lambda: fold_fusion([1], RESIDUAL), "embedding: is a list"),  # type: ignore[arg-type]
    "fold": (lambda: fold_fusion(W, None), "fusion: is a NoneType"),  # type: ignore[arg-type]
    "fold dtype": (lambda: fold_fusion(W, RESIDUAL, dtype=torch.int8), "dtype: is torch.int8"),
    # keys
    "both results": (lambda: decode_key(lm_head_select(W[:1], HEAD)), "key: is a tuple, must be an int64 tensor"),  # type: ignore[arg-type]
    "status": (lambda: decode_key(lm_head_select(W[:1], HEAD)[1]), "key: dtype is torch.int32, must be torch.int64"),
    "ranks": (lambda: combine_keys(ONE.int()[None, None]), "keys: dtype is torch.int32"),
    "one rank": (lambda: combine_keys([ONE[None], ONE.int()[None]]), "keys[1]: dtype is torch.int32"),
    "shapes": (lambda: combine_keys([ONE[None], ONE]), "keys[1]: shape is (1,), must be (1, 1)"),
    "no keys": (lambda: combine_keys(None), "keys: is a NoneType"),  # type: ignore[arg-type]
    "logit": (lambda: encode_key(1.0, ONE), "logit: is a float"),  # type: ignore[arg-type]
    "dot": (lambda: canonical_dot(W, None), "rows: is a NoneType"),  # type: ignore[arg-type]
    "report": (lambda: lm_head_report(W, W), "head: is a Tensor"),  # type: ignore[arg-type]
}
SUPPORTED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str | None]] = {
    "select": ("lm_head_select", (W[:1], HEAD), {"k": 2}, None),
    "screen": ("lm_head_screen", (W[:1],), {"head": HEAD, "capacity": 8}, None),
    "prep": ("fused_t1_prep", (ONE, W[:1], HEAD, W, RESIDUAL), {"mask_id": 1}, None),
    "no head": ("fused_t1_prep", (ONE, W[:1], None, W, Fusion()), {"mask_id": 1, "t1_override": ONE}, None),
    "flat": ("lm_head_select", (W[:1], *HEAD.tensors()), HEAD.scalars(), None),
    "k": ("lm_head_select", (W[:1], HEAD), {"k": 9}, "k: is 9, must be between 1 and 4"),
    "type": ("lm_head_select", (W[:1], HEAD), {"k": None}, "k: is None, must be a whole number"),
    "narrow": ("lm_head_select", (W[:1, :9], HEAD), {}, "hidden: dimension 1 (H) is 9, must be 32 like head.weight"),
    "mask id": ("fused_t1_prep", (ONE, W[:1], HEAD, W, RESIDUAL), {}, "mask_id: is missing"),
    "override": (
        "fused_t1_prep",
        (ONE, W[:1], None, W, RESIDUAL),
        {"mask_id": 1},
        "head: is None, must be given unless t1_override supplies T1",
    ),
    "table": ("fused_t1_prep", (ONE, W[:1], HEAD, None, RESIDUAL), {"mask_id": 1}, "embedding: is a NoneType"),
    "unknown": (
        "lm_head_select",
        (W[:1], HEAD),
        {"top": 1},
        "lm_head_select: got an unexpected keyword argument 'top'",
    ),
    "scalars": ("lm_head_select", (W[:1], *HEAD.tensors()), {}, "format: is missing"),
    "tensors": ("lm_head_select", (W[:1], W), {}, "codes: is missing"),
    "flat type": (
        "lm_head_select",
        (W[:1], *HEAD.tensors()),
        HEAD.scalars() | {"capacity": "4"},
        "capacity: is '4', must be int",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_named(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


@pytest.mark.parametrize("name", SUPPORTED)
def test_supports_takes_what_the_function_takes(name: str) -> None:
    op, inputs, keywords, message = SUPPORTED[name]
    reason = dmtp_kernels.supports(op, *inputs, **keywords)
    assert reason is None if message is None else str(reason).startswith(message)


ATTENTION: tuple[torch.Tensor, ...] = (
    torch.zeros(1, 2, 2, 8),
    *(torch.zeros(3, 4, 1, 8) for _ in range(2)),
    torch.zeros(1, 2, dtype=torch.int32),
    torch.zeros(1, dtype=torch.int32),
)
NOT_TAKEN: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "positions": ((ATTENTION[1], ATTENTION[2]), {}, "inputs: 7 given by position, block_attention takes 5; block_k, "),
    "int": ((), {"window": 3.0}, "window: is 3.0, must be int or None"),
    "text": ((), {"window": "3"}, "window: is '3', must be int or None"),
    "float": ((), {"scale": "1"}, "scale: is '1', must be float or None"),
    "str": ((), {"window_ref": None}, "window_ref: is None, must be str"),
    "tensor": ((), {"sink": 0.5}, "sink: is a float, must be a tensor or None"),
}


BLOCK = torch.zeros(1, 2, 1, 8)
ATTENTION_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "q": ({"q": None}, "q: is a NoneType, must be a tensor"),
    "table": ({"page_table": [[0, 1]]}, "page_table: is a list, must be a tensor"),
    "scale": ({"k_scale": "1"}, "k_scale: is '1', must be a number"),
    "codes": (
        {"k_cache": torch.zeros(3, 4, 1, 8, dtype=torch.uint8)},
        "k_cache: dtype is torch.uint8, fp8 codes must come as k_cache.view(torch.float8_e4m3fn)",
    ),
    "heads first": (
        {name: torch.zeros(3, 1, 4, 8) for name in ("k_cache", "v_cache")},
        "q: has 2 heads, must be a multiple of the 4 of k_cache, which is (3, 1, 4, 8) and must be [pages, P, Hkv, D]",
    ),
    "heads first, block": (
        {name: torch.zeros(3, 1, 2, 8) for name in ("k_cache", "v_cache")} | {"block_k": BLOCK, "block_v": BLOCK},
        "block_k: has 1 heads, must have the 2 of k_cache, which is (3, 1, 2, 8) and must be [pages, P, Hkv, D]",
    ),
    "dtype": (
        {"block_k": BLOCK.half(), "block_v": BLOCK},
        "block_k: dtype is torch.float16, must be torch.float32 like q",
    ),
    "pages": ({"v_cache": torch.zeros(2, 4, 1, 8)}, "v_cache: dimension 0 (pages) is 2, must be 3 like k_cache"),
}


@pytest.mark.parametrize("name", ATTENTION_FAULTS)
def test_attention_names_what_is_wrong(name: str) -> None:
    change, message = ATTENTION_FAULTS[name]
    arguments: dict[str, Any] = dict(zip(("q", "k_cache", "v_cache", "page_table", "ctx_len"), ATTENTION, strict=True))
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        block_attention(**{**arguments, **change})


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_supports_refuses_what_the_call_refuses(name: str) -> None:
    inputs, keywords, reason = NOT_TAKEN[name]
    with pytest.raises((RuntimeError, TypeError)):
        torch.ops.dmtp.block_attention(*ATTENTION, *inputs, **keywords)
    assert str(dmtp_kernels.supports("block_attention", *ATTENTION, *inputs, **keywords)).startswith(reason)


@pytest.mark.parametrize(
    "keywords",
    [{"window": np.int64(3)}, {"window": torch.tensor(3)}, {"scale": 1}, {"scale": np.float32(1)}, {"block_causal": 1}],
    ids=str,
)
def test_supports_takes_the_scalars_that_the_call_takes(keywords: dict[str, Any]) -> None:
    torch.ops.dmtp.block_attention(*ATTENTION, **keywords)
    assert dmtp_kernels.supports("block_attention", *ATTENTION, **keywords) is None


def test_supports_takes_the_numbers_that_a_python_function_takes() -> None:
    # values that the op itself takes as tensors
    assert dmtp_kernels.supports("block_attention", *ATTENTION, k_scale=0.5, v_scale=0.5) is None
    reason = dmtp_kernels.supports("block_attention", *ATTENTION, k_scale=float("nan"))
    assert reason == "k_scale: is a float, must be a tensor or None"
    rows, cache, index = torch.zeros(1, 1, 1, 8), torch.zeros(4, 1, 8), torch.zeros(1, 1).long()
    commit = ([rows], [rows], [cache], [cache], index[0], index)
    assert dmtp_kernels.supports("commit_kv", *commit, k_scale=0.5, k_norm=torch.ones(8)) is None
    assert dmtp_kernels.supports("commit_kv", *commit, k_scale="0.5") is not None


def test_supports_names_what_is_wrong_in_a_list() -> None:
    reason = dmtp_kernels.supports("commit_kv", [torch.zeros(1, 1, 1, 8), 3], *([[]] * 3), *ATTENTION[3:])
    assert reason is not None and "\n" not in reason and "Tensor" in reason


def test_supports_of_an_out_form_names_the_form_to_ask_for() -> None:
    reason = dmtp_kernels.supports("block_attention_out", *ATTENTION)
    assert reason == "block_attention_out: ask for 'block_attention', whose inputs it takes"
    assert str(dmtp_kernels.supports("nothing_out")).startswith("no op named 'nothing_out'")


def test_numbers_of_numpy_are_taken() -> None:
    assert lm_head_select(W[:1], HEAD, np.int64(2))[0].shape == (1, 2)  # type: ignore[arg-type]
    prep(mask_id=np.int32(3), embed_scale=np.float32(1.5))


def test_a_mask_id_outside_the_table_is_refused_with_its_embedding_given_too() -> None:
    with pytest.raises(ValueError, match=r"mask_id: is 64, must be in \[0, 64\)"):
        prep(mask_id=64, mask_embed=W[0])


def test_a_head_given_with_t1_is_not_read() -> None:
    blank = pack_lm_head(torch.full_like(W, float("nan")), format="dense")
    for got, want in zip(prep(head=blank, t1_override=ONE), prep(head=None, t1_override=ONE), strict=True):
        assert torch.equal(got, want)


def test_outputs_that_repeat_elements_are_refused() -> None:
    head = pack_lm_head(W)
    key, status = torch.zeros(1, 2, dtype=torch.int64).expand(5, 2), torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lm_head_select_out: key has strides \(0, 1\)"):
        LM_HEAD_SELECT.out(W[:5], *head.tensors(), **head.scalars(), k=2, logit_dtype="float32", key=key, status=status)


Z = torch.zeros(1, 8).long()
PREFIX: Any = accept_prefix
ATTEND: Any = block_attention
PAGES: Any = draft_page_table
WARM: Any = dmtp_kernels.warmup
RAW: dict[str, tuple[Callable[[], Any], str]] = {
    "number for a tensor": (lambda: PREFIX(Z, Z, stop_ids=Z[0, :0], budget=9), "budget: is a int, must be a tensor"),
    "list for a tensor": (lambda: PREFIX(Z, Z, stop_ids=[2], budget=Z[0, :1]), "stop_ids: is a list, must be a tensor"),
    "float for an int": (lambda: ATTEND(*ATTENTION, window=2.0), "window: is 2.0, must be int or None"),
    "no number": (lambda: PAGES(Z, Z[:, 0], window=None, page_size=4), "window: is None, must be int"),
    # what the op itself says stays, whatever else is odd in the call
    "the op's own": (
        lambda: ATTEND(*ATTENTION[:4], ATTENTION[4].float(), window=torch.tensor(3)),
        "ctx_len: dtype is torch.float32",
    ),
    "warm-up": (lambda: WARM([1]), "calls: is [1], must be a mapping"),
}


@pytest.mark.parametrize("name", RAW)
def test_what_the_dispatcher_refuses_is_one_line(name: str) -> None:
    call, message = RAW[name]
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
