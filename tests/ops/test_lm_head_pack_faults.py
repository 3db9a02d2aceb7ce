"""Public bug reports about packing a vocabulary head: scales, shards, id maps, layouts."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.ops.lm_head import (
    LMHead,
    canonical_dot,
    decode_key,
    lm_head_select,
    pack_lm_head,
)
from dmtp_kernels.ops.lm_head.formats import FORMATS, codes_shape, dequantize, scale_shape
from tests.ops.lm_head_cases import FORMAT_NAMES, always_screen, extras, logits_head, random, select  # noqa: F401

KERNEL_OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")


def screen_of(head: LMHead) -> tuple[torch.Tensor, torch.Tensor]:
    assert head.codes is not None and head.scale is not None
    return head.codes, head.scale


@pytest.mark.parametrize("name", [n for n in FORMAT_NAMES if FORMATS[n].bits])
def test_row_017_shards_of_a_packed_head(name: str) -> None:
    # TensorRT-LLM#16352: both dimensions were scaled by the number of ranks
    w, h = random(1000, 512), random(200, 512, seed=1)
    options = extras(name, 512)
    whole = pack_lm_head(w, format=name, **options)
    shard = pack_lm_head(w[500:], format=name, id_offset=500, **options)
    wide = {8: 512, 6: 384, 4: 256 + 16}[FORMATS[name].bits]
    (codes, scale), (all_codes, all_scale) = screen_of(shard), screen_of(whole)
    assert codes.shape == (500, wide) and scale.shape in ((500,), (500, 8))
    assert torch.equal(codes, all_codes[500:]) and torch.equal(scale, all_scale[500:])
    assert shard.bound is None or (whole.bound is not None and torch.equal(shard.bound, whole.bound[500:]))
    assert select(h[:20], w, ranks=2, format=name, **options) == select(h[:20], w, format=name, **options)


@pytest.mark.parametrize("missing", ["scale", "codes", "bound", "codes scale"])
def test_row_018_head_without_its_scales_is_refused(missing: str) -> None:
    # sglang#35358: a packed head loaded without scales emits token 0 for ever
    w = random(64, 32)
    full = pack_lm_head(w)
    parts = {n: getattr(full, n) for n in ("codes", "scale", "bound") if n not in missing.split()}
    with pytest.raises(ValueError, match=rf"{missing.split()[0]}: is missing, format 'int8' needs"):
        LMHead(w, "int8", 64, 8, **parts)
    with pytest.raises(ValueError, match="up: is given, format 'int8' has no up"):
        LMHead(w, "int8", 64, 8, codes=full.codes, scale=full.scale, bound=full.bound, up=w)


def test_row_019_row_scales_decide() -> None:
    # TensorRT-LLM#17728: fp8 rows were read without their scales
    w = (random(256, 128, dtype=torch.float32) * 0.1).to(torch.float8_e4m3fn)
    scale = torch.logspace(-3, 1, 256)
    h = torch.zeros(1, 128)
    h[0, 0] = 1.0
    raw = w.float()
    raw[:, 0], raw[12, 0], raw[200, 0] = 0.0, 4.0, 2.0
    w = raw.to(torch.float8_e4m3fn)
    assert int(raw[:, 0].argmax()) == 12
    for shape in ((256,), (256, 1)):
        head = pack_lm_head(w, weight_scale=scale.reshape(shape))
        assert decode_key(lm_head_select(h, head)[0])[0].item() == 200
    for bad in (scale[None], scale[:1], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="weight_scale: shape"):
            pack_lm_head(w, weight_scale=bad)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_row_021_zero_rows_quantise_to_zero(name: str) -> None:
    # ao#4762: a zero row divided by its zero scale
    w, h = random(64, 128), random(8, 128, seed=1)
    w[10], w[11], w[60:] = 0.0, 1e-30, 0.0
    options = extras(name, 128)
    head = pack_lm_head(w, format=name, num_valid=60, **options)
    stored = [t for t in (head.codes, head.scale, head.bound, head.up) if t is not None]
    assert all(t.float().isfinite().all() for t in stored)
    if head.codes is not None:
        assert (dequantize(*screen_of(head), name, 128)[10] == 0).all()
    key, _ = lm_head_select(h, head, 16)
    token, logit = decode_key(key)
    exact = canonical_dot(h, w)[:, :60]
    assert token[:, 0].tolist() == exact.argmax(1).tolist() and logit.isfinite().all()
    assert (canonical_dot(h, w)[:, 10] == 0).all()


@pytest.mark.parametrize("name", [n for n in FORMAT_NAMES if FORMATS[n].bits])
@pytest.mark.parametrize("hidden", [2880, 33])
def test_row_022_scales_see_the_row_only(name: str, hidden: int) -> None:
    # aiter#4291: lanes beyond the row entered its maximum
    around = torch.full((2, 4096), 1e4).bfloat16()
    w = around[:, :hidden]
    w.copy_(random(2, hidden))
    w[1] = 0.0
    options = extras(name, hidden)
    codes, scale = screen_of(pack_lm_head(w, format=name, **options))
    clean = screen_of(pack_lm_head(w.contiguous(), format=name, **options))
    assert torch.equal(codes, clean[0]) and torch.equal(scale, clean[1])
    assert tuple(codes.shape) == codes_shape(name, 2, hidden) and tuple(scale.shape) == scale_shape(name, 2, hidden)
    group = FORMATS[name].group or hidden
    top = 2 ** (FORMATS[name].bits - 1) - 1
    if FORMATS[name].multipliers:
        step = w[0].float().abs().max() / top
        assert scale[0] == step / 127
    elif name != "deflated":
        assert scale.reshape(2, -1)[0, 0] == w[0, :group].float().abs().max() / top
    assert (scale[1] == 0).all() and (dequantize(codes, scale, name, hidden)[1] == 0).all()


def test_row_023_id_map_kind_is_explicit() -> None:
    # verl-SpeCo#67: an offset table was read as absolute ids
    w, h = logits_head(torch.eye(4))
    table = torch.tensor([0, 4, 8, 12])
    assert select(h, w, id_map=table, id_map_mode="offset") == [0, 5, 10, 15]
    assert select(h, w, id_map=table.int(), id_map_mode="absolute") == [0, 4, 8, 12]
    assert select(h, w, id_map=torch.zeros(4).long(), id_map_mode="offset") == [0, 1, 2, 3]
    for mode, size in (("offset", 15), ("absolute", 12)):
        with pytest.raises(ValueError, match="id_map: in mode"):
            pack_lm_head(w, id_map=table, id_map_mode=mode, vocab_size=size)
    with pytest.raises(ValueError, match="id_map_mode 'none'"):
        pack_lm_head(w, id_map=table)
    with pytest.raises(ValueError, match="id_map: is missing"):
        pack_lm_head(w, id_map_mode="offset")
    with pytest.raises(ValueError, match="must be at least 0"):
        pack_lm_head(w, id_map=-table, id_map_mode="offset")


@pytest.mark.parametrize("name", ["int8", "int4_g32"])
def test_rows_without_a_token_never_win(name: str) -> None:
    # added vocabulary: padding sits between the real rows of a shard, so the map marks it
    w, h = random(300, 64), random(9, 64, seed=1)
    table = torch.arange(300)
    best = canonical_dot(h, w).argmax(1)
    table[best] = -1
    logits = canonical_dot(h, w)
    logits[:, best] = -torch.inf
    assert select(h, w, format=name, id_map=table, id_map_mode="absolute") == logits.argmax(1).tolist()
    assert select(h, w, format=name, id_map=table * 0 - 1, id_map_mode="absolute") == [-1] * 9


def test_row_025_gathered_rows_keep_scales() -> None:
    # MTPLX#317: a packed row is its codes and its scales
    w = random(1024, 512)
    rows = torch.tensor([0, 77, 1023])
    for name in FORMAT_NAMES:
        if FORMATS[name].bits:
            codes, scale = screen_of(pack_lm_head(w, format=name, **extras(name, 512)))
            whole = dequantize(codes, scale, name, 512)
            assert torch.equal(dequantize(codes[rows], scale[rows], name, 512), whole[rows])
    h = random(2, 512, seed=1)
    assert torch.equal(canonical_dot(h, w[rows]), canonical_dot(h, w)[:, rows])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_row_026_packed_weight_is_never_read_as_dense(dtype: torch.dtype) -> None:
    # vllm#52816: a fused path sliced the packed weight of a quantised layer
    w = torch.zeros(16, 32).to(dtype)
    with pytest.raises(TypeError, match=f"weight: dtype is {dtype}"):
        pack_lm_head(w)
    with pytest.raises(TypeError, match=f"weight: dtype is {dtype}"):
        LMHead(w, "dense", 16, 1, bound=torch.zeros(16))
    with pytest.raises(TypeError, match="weight"):
        pack_lm_head(torch.nn.Linear(4, 4))  # type: ignore[arg-type]


def test_low_rank_from_the_weight_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="plain SVD of the weight"):
        pack_lm_head(random(32, 16), format="low_rank")
    with pytest.raises(ValueError, match="format: is 'fp4', must be one of dense, int8"):
        pack_lm_head(random(32, 16), format="fp4")
    with pytest.raises(ValueError, match="must be 'full' for the certified format"):
        pack_lm_head(random(32, 16), fallback="none")
    with pytest.raises(ValueError, match="hidden: dimension 1"):
        lm_head_select(random(2, 17), pack_lm_head(random(32, 16)))
    with pytest.raises(ValueError, match="hidden: last dimension has stride 2"):
        lm_head_select(random(2, 32)[:, ::2], pack_lm_head(random(32, 16)))
    with pytest.raises(ValueError, match="k: is 17"):
        lm_head_select(random(2, 16), pack_lm_head(random(32, 16)), 17)
