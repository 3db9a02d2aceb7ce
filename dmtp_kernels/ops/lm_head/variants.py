"""What the compile proofs compile: the head's kernels as its launchers call them at the large shapes.

H = 2,048 and 5,120 and every V take the same machine code except where a name says otherwise, and so do the n of a
class.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dmtp_kernels.ops._variant import Variant
from dmtp_kernels.ops.lm_head import config
from dmtp_kernels.ops.lm_head.formats import FORMATS

_PROCESSORS = 132
_SHARD = 62_080  # a quarter of the 248,320-row head
_WIDTH = 2048
_RANK = 256
_POINTERS = {
    "*bf16": "hidden weight down rows states",
    "*fp32": "scale bound step length state lower_bound",
    "*i8": "digits",
    "*i32": "sums best upper lower values pool status count",
    "*i64": "id_map lists key ids",
}
_TYPES = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
_CODES = {"int8": "*i8", "int8_g64": "*i8", "int6_g64": "*u8", "int4_g32": "*u8", "low_rank": "*i8"}
_DIVISIBLE = {"size", "padded", "group_stride"}
_DIVISIBLE |= {f"stride_{name}" for name in ("row", "state", "sums", "hidden", "weight", "down", "pool")}
Shape = config.ScreenConfig | config.FinishConfig


def listed() -> tuple[Variant, ...]:
    """Every variant, the screens first."""
    return (*_screens(), *_prepares(), *_low_rank(), *_finishes(), *_pools_and_lists())


def _variant(
    step: str,
    module: str,
    label: str,
    constants: dict[str, Any],
    shape: Shape | int,
    streams: tuple[str, ...] = (),
    **types: str,
) -> Variant:
    path = f"dmtp_kernels.ops.lm_head.{module}"
    names = getattr(import_module(path), f"lm_head_{step}_kernel").arg_names
    signature = {n: (_TYPES | types).get(n, "i32") for n in names if n not in constants}
    warps, stages, registers = (shape, 3, None) if isinstance(shape, int) else _knobs(shape)
    return Variant(
        name=f"lm_head_{step}_kernel/{label}",
        kernel=f"{path}:lm_head_{step}_kernel",
        signature=signature,
        constants=constants,
        aligned=tuple(n for n, kind in signature.items() if kind[0] == "*" or n in _DIVISIBLE),
        num_warps=warps,
        num_stages=stages,
        options=config.compiler_options(registers),
        streams=streams,
    )


def _knobs(shape: Shape) -> tuple[int, int, int | None]:
    return shape.warps, shape.stages, shape.registers


def _screens() -> list[Variant]:
    """Every format and class of n; what k > 1, the list of single rows and a map change; the loop's fp32 head."""
    formats = ("dense", "int8", "int8_g64", "int6_g64", "int4_g32", "low_rank")
    return [
        *(_screen(name, n, f"{name}/n{n}") for n in (8, 64) for name in formats),
        *(_screen(name, 16, f"{name}/n16") for name in ("dense", "int8", "low_rank")),
        _screen("dense", 32, "dense/n32"),
        _screen("dense", 8, "dense_fp32/n8", element="fp32"),
        _screen("int8", 8, "int8/n8_k16", k=16),
        _screen("int8", 8, "int8/n8_list", group=1),
        _screen("int8", 8, "int8/n8_map", mapped=True),
    ]


def _screen(
    name: str, n: int, label: str, *, group: int = 0, k: int = 1, element: str = "bf16", mapped: bool = False
) -> Variant:
    certified, dense = FORMATS[name].certified, name == "dense"
    columns = _RANK if name == "low_rank" else _WIDTH
    kernel_format = "int8" if name == "low_rank" else name
    shape = config.screen_config(kernel_format, n, _SHARD, columns, 4 if element == "fp32" else 2, _PROCESSORS)
    given = {
        "scale": not dense,
        "step": not dense,
        "sums": name in config.OFFSETS,
        "bound": certified,
        "length": certified,
        "best": certified and k == 1,
        "lower": certified and k > 1,
        "id_map": mapped,
    }
    constants: dict[str, Any] = {argument: None for argument, present in given.items() if not present}
    constants |= {"FORMAT": kernel_format, "CERTIFIED": certified, "MAP": 2 if mapped else 0}
    constants |= {"GROUP": group or (config.CERTIFIED_GROUP if certified else config.SHORTLIST_GROUP)}
    constants |= {"BLOCK_V": shape.block_v, "BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k}
    constants |= {"STAGES": shape.stages}
    rows, states = (f"*{element}",) * 2 if dense else (_CODES[name], "*i8")
    return _variant("screen", "kernels_screen", label, constants, shape, ("rows",), rows=rows, states=states)


def _prepares() -> list[Variant]:
    found = []
    for size in (_WIDTH, 5120):
        absent = {"dense": "digits sums step", "int8": "sums", "int6_g64": "", "int4_g32": "length best"}
        found += [_prepare(name, f"{name}/h{size}", size, names.split()) for name, names in absent.items()]
    # with k > 1 the last step writes key and status
    found.append(_prepare("int8", f"int8/h{_WIDTH}_k16", _WIDTH, ["sums", "best", "key", "status"]))
    found.append(_prepare("int8", f"low_rank/r{_RANK}", _RANK, ["sums", "length", "best"], hidden="*fp32"))
    return found


def _prepare(name: str, label: str, size: int, absent: list[str], hidden: str = "*bf16") -> Variant:
    block, warps = config.prepare_block(size)
    per_sum, factor = config.OFFSETS.get(name, (block, 0))
    constants: dict[str, Any] = dict.fromkeys(absent)
    constants |= {"BLOCK": block, "DIGITS": name != "dense", "SUMS": per_sum, "FACTOR": factor}
    # an [n, 1] key and a vector of status words have stride 1
    constants |= {} if "key" in absent else {"stride_key": 1, "stride_status": 1}
    return _variant("prepare", "kernels", label, constants, warps, hidden=hidden)


def _low_rank() -> list[Variant]:
    shape, tile = config.finish_config(8, _RANK, 1, _PROCESSORS), config.factor_config(_PROCESSORS)
    project = {"R": shape.rows, "STAGES": shape.stages}
    factor = {"id_map": None, "MAP": 0, "GROUP": config.SHORTLIST_GROUP, "BLOCK_V": tile.block_v}
    factor |= {"STAGES": tile.stages}
    return [
        _variant("project", "kernels", f"r{_RANK}", project, shape, ("down",)),
        _variant("factor", "kernels", f"r{_RANK}", factor, tile, ("rows",), states="*fp32"),
    ]


def _finishes() -> list[Variant]:
    shape = config.finish_config(8, _SHARD // config.CERTIFIED_GROUP, config.CERTIFIED_GROUP, _PROCESSORS)
    common = {"id_map": None, "MAP": 0, "BF16": False, "R": shape.rows, "STAGES": shape.stages, "BLOCK": shape.block}
    certified = common | {"CERTIFIED": True, "GROUP": config.CERTIFIED_GROUP}
    shortlist = common | {"CERTIFIED": False, "GROUP": config.SHORTLIST_GROUP}
    one = {"TOP": 1, "lists": None, "stride_key": 1, "stride_status": 1}
    several = {"TOP": 16, "key": None, "status": None, "stride_status": 1}
    whole = config.finish_config(8, _SHARD // 16, config.CERTIFIED_GROUP, _PROCESSORS, scan=True)
    scan = {
        "BLOCK": whole.block,
        "CERTIFIED": False,
        "GROUP": config.CERTIFIED_GROUP,
        "upper": None,
        "pool": None,
        "POOL": 1,
    }
    routes = {
        "certified": certified | one | {"POOL": 1},
        "certified_k16": certified | several | {"POOL": config.POOL_VALUES},
        "shortlist": shortlist | one | {"POOL": config.pool_config(_SHARD // 4, 128).pool},
        "shortlist_k16": shortlist | several | {"POOL": config.pool_config(_SHARD // 4, 128).pool},
        "scan": common | one | scan,
    }
    rescore = {"BF16": False, "R": shape.rows, "STAGES": shape.stages, "TOP": 1, "stride_count": 1}
    return [
        *(_variant("finish", "kernels_finish", label, route, shape, ("weight",)) for label, route in routes.items()),
        _variant("rescore", "kernels_finish", "k1", rescore, shape, ("weight",)),
        _variant(
            "merge",
            "kernels_finish",
            "k16",
            {"BLOCK": 1024, "stride_key": 1, "stride_status": 1},
            config.merge_warps(1024),
            count="i32",
        ),
    ]


def _pools_and_lists() -> list[Variant]:
    found = []
    for values, rank in ((_SHARD // 4, 128), (_SHARD, 128), (4 * _SHARD, 16)):
        pool = config.pool_config(values, rank)
        found.append(_variant("pool", "kernels_finish", f"{values}_{rank}", {"BLOCK": pool.block}, pool.warps))
    block, warps = config.list_block(_SHARD, _PROCESSORS)
    common = {"id_map": None, "MAP": 0, "BLOCK": block, "stride_count": 1, "stride_bound": 1}
    certified = common | {"CERTIFIED": True, "GROUP": 1, "POOL": 1}
    shortlist = common | {"CERTIFIED": False, "GROUP": config.SHORTLIST_GROUP}
    shortlist |= {"POOL": config.pool_config(_SHARD // 4, 128).pool}
    found.append(_variant("list", "kernels_finish", "certified", certified, warps))
    found.append(_variant("list", "kernels_finish", "shortlist", shortlist, warps))
    return found
