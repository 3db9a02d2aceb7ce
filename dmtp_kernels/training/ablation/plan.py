"""What the ablation trains and what it asks."""

from __future__ import annotations

from dataclasses import dataclass

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.training.stages import FILES

DRAFTED = tuple(name for name, method in METHODS.items() if method.drafter)
"""Every method with a drafter of its own."""
SEEDS = (0, 1)
STARTS = {"continued": FILES[2], "scratch": FILES[3]}
"""Where a drafter's weights come from, and the file of a seed's directory that holds them: DFlash's weights and new
parts that change nothing, or all of them fresh."""
TEMPERATURES = (0.6, 1.0)
BATCHES = (2, 4, 8, 16, 32)
SERVED = ("autoregressive", "mtp3", "mtp4", "dflash", "dmtp", "dflash2", "dmtp_dflash2")
"""Methods whose throughput is measured, and that the figures show."""


@dataclass(frozen=True)
class Claim:
    """A statement of the source about two methods' per-verify lengths: `better` is longer than `worse`, or, where
    `equal`, as long; `source` is the difference it reports, in percent of `worse`, None: it says so in words."""

    text: str
    better: str
    worse: str
    source: float | None
    equal: bool = False


CLAIMS = (
    Claim("DMTP over DFlash", "dmtp", "dflash", None),
    Claim("DMTP over the native MTP chain of four", "dmtp", "mtp4", None),
    Claim("DMTP on DFlash2 over DFlash2", "dmtp_dflash2", "dflash2", None),
    Claim("DFlash2 over DFlash", "dflash2", "dflash", None),
    Claim("low-rank residual over candidate-conditioned", "low_rank", "conditioned", 2.48),
    Claim("six-mask residual over candidate-conditioned", "mask_residual", "conditioned", 1.92),
    Claim("replacement fusion over candidate-conditioned", "replace", "conditioned", 5.12),
    Claim("replacement fusion over low-rank residual", "replace", "low_rank", 2.56),
    Claim("candidate-conditioned over target and MTP context", "conditioned", "context_fusion", 1.51),
    Claim("candidate-conditioned over MTP-only context", "conditioned", "mtp_context", 5.74),
    Claim("one anchor and two alike, replacement fusion", "replace", "replace_dual", 0.3, equal=True),
    Claim("zero-initialised residual like replacement, two anchors", "dmtp", "replace_dual", None, equal=True),
    Claim("the MTP hidden itself: DMTP over its control", "dmtp", "control", None),
)
ALIKE = 1.0
"""Percent of length, as a mean over seeds and temperatures, below which two methods are alike."""
