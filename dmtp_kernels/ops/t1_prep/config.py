"""Launch knobs of the T1 preparation kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dmtp_kernels.ops._device import processors
from dmtp_kernels.ops._variant import Variant

REQUESTS = 8  # of one program, see kernels.py


@dataclass(frozen=True)
class TailConfig:
    """Knobs of one launch; none of them may depend on the number of requests, or bits would."""

    tensor_cores: bool
    rows: int
    """Matrix rows, or columns of the block, of one program."""
    splits: int
    """Parts of a step along the vectors; with tensor cores one per warp."""
    depth: int
    """Elements of a part."""
    warps: int
    stages: int
    registers: int | None = None
    """Most registers of a thread, with two streams of which none is cut or scaled."""

    def whole(self, rows: int, *sizes: int) -> bool:
        """Whether no tile is cut."""
        return rows % self.rows == 0 and all(size % (self.splits * self.depth) == 0 for size in sizes)

    def constants(self, whole: bool) -> dict[str, Any]:
        """The kernels' compile-time arguments."""
        return {
            "WHOLE": whole,
            "TENSOR_CORES": self.tensor_cores,
            "R": self.rows,
            "SPLITS": self.splits,
            "DEPTH": self.depth,
            "STAGES": self.stages,
        }

    def options(self, whole: bool, scaled: bool, both: bool) -> dict[str, Any]:
        """The compiler's options besides `num_warps`: a product and a sum round separately unless `fma` is written."""
        capped = self.registers and both and whole and not scaled
        return {"enable_fp_fusion": False} | ({"maxnreg": self.registers} if capped else {})


# not measured: 16 rows are what one tensor core instruction takes, and give E = 2048 a program for 128 of 132
# processors; 16 KiB of matrix a step, 3 steps ahead, are 48 KiB in flight on each, where 4.3 TB/s times 0.8 us of
# latency ask for 26 KiB; 128 registers leave room for two programs, which E = 5120 has
_WIDE = TailConfig(tensor_cores=True, rows=16, splits=8, depth=64, warps=8, stages=4, registers=128)
# fp16 in two parts needs more registers than that
_WIDE_FP16 = replace(_WIDE, registers=None)
_SHORT = TailConfig(tensor_cores=True, rows=16, splits=8, depth=32, warps=8, stages=3)
# not measured: 8 requests x 4 rows x 256 fp32 sums are 64 registers a thread
_FMA = TailConfig(tensor_cores=False, rows=4, splits=1, depth=256, warps=4, stages=3)
# not measured: 256 columns are 512 bytes of every slot
_COPY = TailConfig(tensor_cores=False, rows=256, splits=1, depth=256, warps=4, stages=1)


def tail_config(matrix: torch.Tensor | None, block: torch.Tensor) -> TailConfig:
    """The knobs for a matrix and the block's dtype; large programs where they are interpreted."""
    config = _tail_config(matrix, block.dtype)
    return config if processors(block.device) else replace(config, rows=max(64, config.rows))


def _tail_config(matrix: torch.Tensor | None, out_dtype: torch.dtype) -> TailConfig:
    # tensor cores sum to about 16 bits, which a 16-bit result does not show
    halves = (torch.bfloat16, torch.float16)
    if matrix is None:
        return _COPY
    if matrix.dtype not in halves or out_dtype not in halves:
        return _FMA
    if matrix.shape[1] <= _SHORT.splits * _SHORT.depth:
        return _SHORT
    return _WIDE if matrix.dtype == torch.bfloat16 else _WIDE_FP16


_DOWN = (
    "anchor_ptr t1_ptr status_ptr status_stride hidden_ptr hidden_stride hidden_size table_ptr table_stride table_rows "
    "width down_ptr down_stride hidden_column norm_e_ptr norm_m_ptr eps_e eps_m offset_e offset_m factor low_ptr "
    "low_stride finite_ptr batch rank start num_embeddings"
)
_TAIL = (
    "anchor_ptr t1_ptr status_ptr status_stride hidden_ptr hidden_stride hidden_size table_ptr table_stride table_rows "
    "width folded_ptr folded_stride mask_ptr matrix_ptr matrix_stride hidden_column norm_e_ptr norm_m_ptr eps_e eps_m "
    "offset_e offset_m factor finite_ptr t1_out_ptr t1_out_stride ids_ptr ids_stride ids_slot_stride block_ptr "
    "block_stride block_slot_stride certified_ptr certified_stride batch mask_id num_masks start num_embeddings"
)
_FLOATS = ("eps_e", "eps_m", "offset_e", "offset_m", "factor")
_TYPES = {
    "anchor_ptr": "*i64",
    "t1_ptr": "*i64",
    "status_ptr": "*i32",
    "finite_ptr": "*i32",
    "low_ptr": "*fp32",
    "t1_out_ptr": "*i64",
    "ids_ptr": "*i64",
    "certified_ptr": "*u8",
}
_UNALIGNED = (
    "anchor_ptr t1_ptr status_ptr status_stride table_rows finite_ptr t1_out_ptr t1_out_stride ids_ptr ids_stride "
    "ids_slot_stride certified_ptr certified_stride batch mask_id num_masks start num_embeddings rank"
)
_PLAIN = {"ANCHORS": 2, "REPLACE": False, "AT_MASKS": False, "FACTORED": False, "SCALED": False}


def _variant(
    name: str,
    config: TailConfig,
    dtype: str,
    absent: str,
    *,
    names: str = _TAIL,
    whole: bool = True,
    types: dict[str, str] | None = None,
    **flags: Any,
) -> Variant:
    kinds = dict.fromkeys(_FLOATS, "fp32") | _TYPES | (types or {})
    present = [n for n in names.split() if n not in absent.split()]
    step = "down" if names is _DOWN else "tail"
    return Variant(
        name=f"t1_prep_{step}_kernel/{name}",
        kernel=f"dmtp_kernels.ops.t1_prep.kernels:t1_prep_{step}_kernel",
        signature={n: kinds.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in present},
        constants=dict.fromkeys(absent.split()) | (_PLAIN if step == "tail" else {}) | flags | config.constants(whole),
        aligned=tuple(n for n in present if n not in _UNALIGNED.split() and n not in _FLOATS),
        num_warps=config.warps,
        num_stages=config.stages,
        options=config.options(whole, bool(flags.get("SCALED")), "norm_e_ptr" in present),
        streams=tuple(n for n in ("down_ptr", "matrix_ptr") if n in present),
    )


def variants() -> tuple[Variant, ...]:
    """Every configuration with what it does to a block: E = H = 2,048 and 5,120 take the same machine code, and so does
    every number of requests; `cut` is for sizes that leave a remainder."""
    usual = "folded_ptr mask_ptr finite_ptr"
    up = "folded_ptr mask_ptr norm_e_ptr norm_m_ptr"
    given = {"anchor_ptr": "*i32", "t1_ptr": "*i32"}
    return (
        _variant("residual_bf16", _WIDE, "bf16", usual),
        _variant("residual_bf16_cut", _WIDE, "bf16", usual, whole=False),
        _variant("residual_fp16", _WIDE_FP16, "fp16", usual),
        _variant("residual_fp16_cut", _WIDE_FP16, "fp16", usual, whole=False),
        _variant("residual_fp32", _FMA, "fp32", usual),
        _variant("residual_fp32_cut", _FMA, "fp32", usual, whole=False),
        _variant("given_bf16", _WIDE, "bf16", "folded_ptr status_ptr finite_ptr", types=given, SCALED=True),
        _variant("replace_bf16", _WIDE, "bf16", usual, ANCHORS=1, REPLACE=True),
        _variant("masks_bf16", _WIDE, "bf16", f"{usual} norm_e_ptr", AT_MASKS=True),
        _variant("folded_bf16", _WIDE, "bf16", "mask_ptr finite_ptr norm_e_ptr"),
        _variant("plain_bf16", _COPY, "bf16", f"{usual} norm_e_ptr norm_m_ptr matrix_ptr"),
        _variant("low_rank_bf16", _WIDE, "bf16", "", names=_DOWN, SCALED=False),
        _variant("low_rank_bf16", _SHORT, "bf16", up, types={"hidden_ptr": "*fp32"}, FACTORED=True),
        _variant("low_rank_fp32", _FMA, "fp32", "", names=_DOWN, SCALED=False),
        _variant("low_rank_fp32", _FMA, "fp32", up, FACTORED=True),
    )
