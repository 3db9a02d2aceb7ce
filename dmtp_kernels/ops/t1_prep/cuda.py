"""T1 preparation on the compiled CUDA kernels: one cooperative launch, or one for each phase."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels import backends
from dmtp_kernels.ops._workspace import counters, workspace
from dmtp_kernels.ops.t1_prep import reference
from dmtp_kernels.ops.t1_prep.args import PrepArgs

_INPUTS = len(PrepArgs._fields)
_FORMATS = {"dense": 0, "int8": 1, "int4_g32": 4, "low_rank": 5}
_ID_MAPS = {"none": 0, "offset": 1, "absolute": 2}
_FUSIONS = {"none": 0, "residual": 1, "residual_low_rank": 1, "replace": 2}
_SCREENED = ("dense", "int8")


def fused_t1_prep(*values: Any) -> None:
    """As `reference.fused_t1_prep`.

    Heads with a screen that has no kernel here select by what `lm_head_select` runs on the device. float64, empty
    vectors and scattered outputs go to the reference.
    """
    _run(True, values)


def fused_t1_prep_in_phases(*values: Any) -> None:
    """The same with a launch for each phase, as devices run it that have no cooperative launches."""
    _run(False, values)


def _run(one_launch: bool, values: tuple[Any, ...]) -> None:
    args = PrepArgs(*values[:_INPUTS])
    if args.anchor_ids.shape[0] == 0:
        return
    own = args.t1_override is None and _selects(args)
    token, status = (None, None) if own else _selected(args)
    device = args.anchor_ids.device
    taken = _launch(args, own, token, status, one_launch, values[_INPUTS:], workspace("t1_prep_cuda", device, 0))
    if taken > 0:
        scratch = workspace("t1_prep_cuda", device, taken)
        taken = _launch(args, own, token, status, one_launch, values[_INPUTS:], scratch)
    if taken < 0:
        reference.fused_t1_prep(*values)


def _selects(args: PrepArgs) -> bool:
    """Whether the kernels screen or scan this head themselves."""
    uncertified = args.head_format in _FORMATS and args.head_format not in _SCREENED
    return args.head_format in _SCREENED or (uncertified and args.full_scan)


def _selected(args: PrepArgs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """T1 that is given, or keys and status of the head's own op."""
    if args.t1_override is not None:
        return args.t1_override, None
    head, device, batch = args.head(), args.h_mtp.device, args.h_mtp.shape[0]
    assert head is not None
    scratch = workspace("t1_prep_keys", device, 12 * batch)
    key, status = scratch[: 8 * batch].view(torch.int64), scratch[8 * batch : 12 * batch].view(torch.int32)
    select = backends.implementation("lm_head_select", device)
    select(args.h_mtp, *head, 1, args.logit_dtype, key[:, None], status)
    return key, status


def _launch(
    args: PrepArgs,
    own: bool,
    token: torch.Tensor | None,
    status: torch.Tensor | None,
    one_launch: bool,
    outputs: tuple[torch.Tensor, ...],
    scratch: torch.Tensor,
) -> int:
    """0 when it ran, the bytes of scratch that it needs, or -1 where there are no kernels for the call."""
    head = [args.head_weight, args.head_codes, args.head_scale, args.head_bound, args.head_id_map]
    first = args.fusion_weight if args.fusion_down is None else args.fusion_down
    tensors = [args.anchor_ids, token, status, args.hidden(), args.embedding, args.mask_embed, args.folded, first]
    tensors += [args.fusion_up, args.norm_e, args.norm_m, args.h_mtp, *(head if own else [None] * len(head))]
    there = [t for t in tensors if t is not None]
    places, count = [], 0
    for tensor in tensors:
        places.append(-1 if tensor is None else count)
        count += tensor is not None
    whole = [
        _FUSIONS[args.fusion_mode], args.fusion_slots == "masks", args.anchors, args.num_masks, args.mask_id,
        args.embedding_start, args.num_embeddings, _FORMATS.get(args.head_format, 0), _ID_MAPS[args.id_map_mode],
        args.full_scan, args.num_valid, args.id_offset, args.logit_dtype == "bfloat16", one_launch,
    ]  # fmt: skip
    norms = args.eps_e, args.eps_m, args.offset_e, args.offset_m, args.embed_scale
    done: int = backends.cuda_library().t1_prep(
        there, places, list(map(int, whole)), *norms, outputs, scratch, counters("t1_prep", args.anchor_ids.device, 2)
    )
    return done
