"""Predicted rounds on GPUs, beside what the source measured. Every number made here is an estimate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from profiling.roofline import hardware, models, work
from profiling.roofline.hardware import GPUS, H200, REACH, Gpu, Reach
from profiling.roofline.models import MODELS, QWEN_35B
from profiling.roofline.work import Setting, milliseconds, stages
from profiling.table import table

LABEL = "estimate"
BATCHES = (1, 2, 4, 8, 16, 32)
RANKS = (1, 4)
STAGES = ("t1", "mtp", "draft", "verify", "commit")
SOURCE_CONTEXT = {"Code": 1024, "SWE": 32_768}
SOURCE: dict[str, dict[str, dict[str, float]]] = {
    "Code": {
        "dflash": {"draft": 0.386, "round": 8.915},
        "single_anchor": {"draft": 0.388, "mtp": 0.214, "t1": 0.290, "round": 9.318},
    },
    "SWE": {
        "dflash": {"draft": 0.442, "round": 9.645},
        "single_anchor": {"draft": 0.427, "mtp": 0.283, "t1": 0.274, "round": 10.195},
    },
}
"""ms a round: the source's overhead table (section 6.5), batch of 8, four GPUs, CUDA graphs."""
MOVED: dict[str, dict[str, float]] = {
    "60 % of the bandwidth": {"bandwidth": 0.6},
    "2.6 us a launch": {"launch": 2.6e-6},
    "12 us an all-reduce, and its bytes": {"reduce_latency": 12e-6},
    "47 us any other collective": {"nccl_latency": 47e-6},
    "all four at once": {"bandwidth": 0.6, "launch": 2.6e-6, "reduce_latency": 12e-6, "nccl_latency": 47e-6},
}
"""Assumptions that may be off, and by how much they are moved in `moved`."""
SOURCE_NAMES = {
    "draft": "DFlash graph replay",
    "mtp": "additional MTP graph replay",
    "t1": "additional T1 selection, embedding, fusion",
    "round": "whole round",
    "added": "whole round, added by MTP and T1",
}
ASSUMPTIONS = (
    "Round = sum of its stages, each a sum of max(bytes / bandwidth, flops / rate) + launches + collectives.",
    "Against the source: H200, TP 4 (its overhead table says four GPUs, its throughput section four H200 at TP 4), "
    "bf16, engine route, contexts of 1,024 tokens for Code and 32,768 for SWE (not stated there).",
    "Whether weights and caches fit into a GPU's memory is not checked.",
    *hardware.ASSUMPTIONS,
    *models.ASSUMPTIONS,
    *work.ASSUMPTIONS,
)


def predict(setting: Setting, gpu: Gpu, reach: Reach = REACH) -> dict[str, float]:
    """Milliseconds of each stage of one round, and of the round."""
    found = {name: milliseconds(parts, gpu, reach) for name, parts in stages(setting).items()}
    return {**found, "round": sum(found.values())}


def rounds(
    gpus: Sequence[Gpu] = GPUS,
    names: Iterable[str] = tuple(MODELS),
    *,
    context: int = 1024,
    weight_bytes: int = 2,
    batches: Sequence[int] = BATCHES,
) -> list[dict[str, Any]]:
    """DMTP rounds by model, ranks, GPU and batch: stages by the engine route, the round also by the ops route."""
    found = []
    for name in names:
        for tp in RANKS:
            for gpu in gpus:
                for batch in batches:
                    engine, fused, dflash = (
                        Setting(MODELS[name], batch, tp, context, method, route, weight_bytes)
                        for method, route in (("dmtp", "engine"), ("dmtp", "ops"), ("dflash", "engine"))
                    )
                    ops = predict(fused, gpu)
                    found.append(
                        {
                            "label": LABEL,
                            "model": name,
                            "tp": tp,
                            "gpu": gpu.name,
                            "batch": batch,
                            "context": context,
                            "weights": "bf16" if weight_bytes == 2 else "fp8",
                            "ms": predict(engine, gpu),
                            "ops_ms": ops,
                            "dflash_round_ms": predict(dflash, gpu)["round"],
                        }
                    )
    return found


def against_source() -> list[dict[str, Any]]:
    """The source's overhead table with the prediction of each of its entries, and of what MTP and T1 add to a round."""
    found = []
    for workload, methods in SOURCE.items():
        predicted = {
            method: predict(Setting(QWEN_35B, 8, 4, SOURCE_CONTEXT[workload], method), H200) for method in methods
        }
        entries = [
            (method, stage, predicted[method][stage], ms)
            for method, measured in methods.items()
            for stage, ms in measured.items()
        ]
        added, measured_added = (
            made["single_anchor"]["round"] - made["dflash"]["round"] for made in (predicted, methods)
        )
        for method, stage, ms, measured in [*entries, ("single_anchor", "added", added, measured_added)]:
            found.append(
                {
                    "label": LABEL,
                    "workload": workload,
                    "method": method,
                    "stage": stage,
                    "estimate_ms": ms,
                    "source_ms": measured,
                    "ratio": ms / measured,
                }
            )
    return found


def moved() -> list[dict[str, Any]]:
    """The Code round of the source's single anchor, once as assumed and then with one assumption moved at a time."""
    setting = Setting(QWEN_35B, 8, 4, SOURCE_CONTEXT["Code"], "single_anchor")
    found = [("as assumed", setting, REACH), ("fp8 weights", replace(setting, weight_bytes=1), REACH)]
    found += [(name, setting, replace(REACH, **change)) for name, change in MOVED.items()]
    return [{"label": LABEL, "assumption": name, "ms": predict(s, H200, reach)} for name, s, reach in found]


def moved_table(found: Sequence[dict[str, Any]]) -> str:
    """Text of `moved`, beside the source's figures."""
    measured = SOURCE["Code"]["single_anchor"]
    columns = ("t1", "mtp", "draft", "verify", "commit", "round")
    rows = [(entry["assumption"], *(entry["ms"][c] for c in columns)) for entry in found]
    source = ("source measured", *(measured.get(c) for c in columns))
    return table(("ESTIMATE of Code, single anchor, ms/round", *columns), [*rows, source])


def rounds_table(found: Sequence[dict[str, Any]]) -> str:
    """Text of `rounds`; every column after the batch is an estimate."""
    headers = ("model", "TP", "GPU", "B", *STAGES, "round", "with ops: t1", "draft", "round", "DFlash round")
    rows = [
        (
            *(entry[key] for key in ("model", "tp", "gpu", "batch")),
            *(entry["ms"][stage] for stage in (*STAGES, "round")),
            *(entry["ops_ms"][stage] for stage in ("t1", "draft", "round")),
            entry["dflash_round_ms"],
        )
        for entry in found
    ]
    return f"{_title(found)}\n{table(headers, rows)}"


def _title(found: Sequence[dict[str, Any]]) -> str:
    first = found[0]
    return (
        f"ESTIMATES, not measurements: ms a DMTP round, {first['weights']} weights, context {first['context']:,}, "
        "by the engine route, then with this library's ops"
    )


def source_table(found: Sequence[dict[str, Any]]) -> str:
    """Text of `against_source`."""
    rows = [
        (
            entry["workload"],
            entry["method"].replace("_", " "),
            SOURCE_NAMES[entry["stage"]],
            entry["estimate_ms"],
            entry["source_ms"],
            entry["ratio"],
        )
        for entry in found
    ]
    headers = ("workload", "method", "ms/round", "ESTIMATE (H200, TP 4, B 8)", "source measured", "ratio")
    return table(headers, rows)
