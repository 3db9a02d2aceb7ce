"""Command line of `python -m profiling.roofline`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dmtp_kernels._cli_options import set_threads
from dmtp_kernels.bench.progress import Progress
from profiling.command import Parser, check_range, command
from profiling.roofline import estimate, measured
from profiling.roofline.hardware import GPUS

MOST_CONTEXT = 1 << 24
"""Tokens; the longest context of a served model is a sixteenth of it."""
MOST_ROUNDS = 10**6


@command("profiling.roofline")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with a message for an argument that means nothing."""
    parser = Parser(
        prog="python -m profiling.roofline",
        description="How far each op is from the limit of this machine, and estimated rounds on GPUs.",
    )
    parser.add_argument("--op", action="append", help="measure this op alone (may be repeated); no estimates")
    parser.add_argument("--estimates", action="store_true", help="estimates alone, nothing is measured")
    parser.add_argument("--threads", type=int, help="CPU threads; default torch's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each op")
    parser.add_argument("--scale", type=int, default=1, help="divide vocabulary, history and window by this")
    parser.add_argument("--gpu", default=",".join(g.name for g in GPUS), help="GPUs of the estimates")
    parser.add_argument("--model", default="35B,27B", help="models of the estimates")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the round, in the estimates")
    parser.add_argument("--weights", default="bf16", choices=("bf16", "fp8"), help="weights of the estimates' models")
    parser.add_argument("--json", action="store_true", help="print one object instead of tables")
    options = parser.parse_args(arguments)
    if options.op and options.estimates:
        parser.error("--op measures, --estimates does not")
    check_range("--context", options.context, 0, MOST_CONTEXT)
    check_range("--rounds", options.rounds, 1, MOST_ROUNDS)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: is cuda, no CUDA device is visible")
    if options.threads is not None:
        set_threads(options.threads, option="--threads", least=1)
    found = _found(options)
    print(json.dumps(found, indent=1) if options.json else _text(found))
    return 0


def _found(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not options.op:
        names, known = options.gpu.split(","), {gpu.name: gpu for gpu in GPUS}
        models = options.model.split(",")
        for label, given, all_of in (("--gpu", names, known), ("--model", models, estimate.MODELS)):
            for name in given:
                if name not in all_of:
                    raise ValueError(f"{label}: is {name!r}, must be among {', '.join(all_of)}")
        weight_bytes = 2 if options.weights == "bf16" else 1
        gpus = [known[name] for name in names]
        found["estimates"] = {
            "label": estimate.LABEL,
            "assumptions": list(estimate.ASSUMPTIONS),
            "source": estimate.against_source(),
            "moved": estimate.moved(),
            "rounds": estimate.rounds(gpus, models, context=options.context, weight_bytes=weight_bytes),
        }
    if not options.estimates:
        progress = Progress()
        device = torch.device(options.device)
        found["machine"] = measured.machine(device, options.op, options.scale, options.rounds, progress)
        progress.done()
    return found


def _text(found: dict[str, Any]) -> str:
    parts = []
    if "machine" in found:
        parts.append(measured.machine_table(found["machine"]))
    if "estimates" in found:
        estimates = found["estimates"]
        parts.append(estimate.source_table(estimates["source"]))
        parts.append(estimate.moved_table(estimates["moved"]))
        parts.append(estimate.rounds_table(estimates["rounds"]))
        parts.append("Assumptions of the estimates:\n" + "\n".join(f"- {a}" for a in estimates["assumptions"]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
