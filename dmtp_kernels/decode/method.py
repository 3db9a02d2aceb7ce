"""Drafting methods as data: the round reads these fields, no method has code of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """How one round proposes its candidates.

    `chain` > 0: native MTP proposes that many candidates one after another. Otherwise `drafter` names the drafter
    weights (None: no candidates, plain autoregressive decoding). `first` says where T1 comes from: `mtp` puts MTP's
    token in the block, `drafter` leaves the first candidate to the drafter. `anchors` = 2 keeps A before T1. `fusion`
    is the fusion of the MTP hidden into the block (`none`, `residual`, `residual_low_rank`, `replace`,
    `mask_residual`); `context` lists the feature streams of the drafter's context. `parts` are what the drafter has
    beyond DFlash (`models.config.PARTS`). `block` counts the drafter's slots, of a block that starts with A; with
    `shift` a slot predicts the token after its position, the anchor's slot too. `padding_rows` adds verify rows that
    hold no candidate, so that autoregressive decoding can run in the shape of a verification.
    """

    name: str
    summary: str
    chain: int = 0
    drafter: str | None = None
    first: str = "mtp"
    anchors: int = 2
    fusion: str = "none"
    context: tuple[str, ...] = ("target",)
    parts: tuple[str, ...] = ()
    block: int = 8
    shift: bool = False
    padding_rows: int = 0

    @property
    def num_rows(self) -> int:
        """R: verify rows per request, the anchor's, the candidates' and unused padding."""
        return 1 + self.num_candidates + self.padding_rows

    @property
    def num_candidates(self) -> int:
        """K: candidates per round."""
        if self.chain:
            return self.chain
        return 7 if self.drafter else 0

    @property
    def block_has_anchor(self) -> bool:
        """Whether the block's first slot is A; otherwise it is T1, one position later."""
        return self.first == "drafter" or self.anchors == 2

    @property
    def num_known(self) -> int:
        """Leading slots of the block that hold known tokens."""
        return 1 if self.first == "drafter" else self.anchors

    @property
    def num_slots(self) -> int:
        """S: slots of the drafter's block."""
        return self.block if self.first == "drafter" else self.anchors + self.block - 2

    @property
    def predicting(self) -> slice:
        """Slots of the block that predict the drafter's candidates."""
        start = self.num_known - self.shift
        return slice(start, start + self.num_drafted)

    @property
    def num_drafted(self) -> int:
        """Candidates that the drafter proposes, all or all but T1."""
        return self.num_candidates - (self.first == "mtp")

    @property
    def uses_mtp(self) -> bool:
        """Whether the round advances the MTP module at all."""
        return self.chain > 0 or "mtp" in self.context or (self.drafter is not None and self.first == "mtp")


_DFLASH2 = ("conv", "selector")
_PLAIN: dict[str, Any] = {"first": "drafter", "anchors": 1}
_DSPARK: dict[str, Any] = {"parts": ("markov",), "shift": True, "block": 7}
# the last of eight slots would predict an eighth candidate
_DOMINO: dict[str, Any] = {"parts": ("recurrent",), "shift": True}


def _drafted(name: str, summary: str, **fields: object) -> Method:
    return Method(name, summary, drafter=name, **fields)  # type: ignore[arg-type]


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("autoregressive", "one token per target forward"),
        Method("mtp3", "native MTP chain, three candidates", chain=3),
        Method("mtp4", "native MTP chain, four candidates", chain=4),
        _drafted("dflash", "[A, MASK x7], the drafter proposes all seven", first="drafter", anchors=1),
        _drafted("conditioned", "[T1, MASK x6], no MTP hidden", anchors=1),
        _drafted("low_rank", "[T1, MASK x6], low-rank MTP residual on T1", anchors=1, fusion="residual_low_rank"),
        _drafted("replace", "[T1, MASK x6], T1 embedding replaced by the fusion", anchors=1, fusion="replace"),
        _drafted("replace_dual", "[A, T1, MASK x6], T1 embedding replaced by the fusion", fusion="replace"),
        _drafted("dmtp", "[A, T1, MASK x6], zero-initialised residual on T1 (default)", fusion="residual"),
        _drafted("control", "[A, T1, MASK x6] without the MTP hidden"),
        _drafted("mask_residual", "[T1, MASK x6], MTP residual on the six masks", anchors=1, fusion="mask_residual"),
        _drafted("context_fusion", "[T1, MASK x6], context from target and MTP", anchors=1, context=("target", "mtp")),
        _drafted("mtp_context", "[T1, MASK x6], context from MTP alone", anchors=1, context=("mtp",)),
        _drafted("dflash2", "[A, MASK x7], a path of candidates", first="drafter", anchors=1, parts=_DFLASH2),
        _drafted("dmtp_dflash2", "[A, T1, MASK x6] as dmtp, on DFlash2", fusion="residual", parts=_DFLASH2),
        _drafted("dspark", "[A, MASK x6], slots predict the next token, low-rank bias by it", **_DSPARK, **_PLAIN),
        _drafted("dmtp_dspark", "[A, T1, MASK x5] as dmtp, on DSpark", fusion="residual", **_DSPARK),
        _drafted("domino", "[A, MASK x7], slots predict the next token, recurrent correction", **_DOMINO, **_PLAIN),
        _drafted("dmtp_domino", "[A, T1, MASK x6] as dmtp, on Domino", fusion="residual", **_DOMINO),
    )
}
"""Every method of the source, by name."""

SHIPPED = tuple(name for name, method in METHODS.items() if not method.parts)
"""Methods that the embedded checkpoint has weights for, and that the recipe trains."""

VERIFY_SHAPED = Method("verify_shaped", "autoregressive, in the shape of an eight-row verification", padding_rows=7)
"""What a lossless method must equal where two logits tie within float rounding."""
