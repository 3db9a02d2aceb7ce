"""Where the parts of a DMTP drafter are, for an engine that is given directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmtp_kernels.decode.method import METHODS, Method
from dmtp_kernels.models.formats.dflash import DMTP_CONFIG
from dmtp_kernels.models.formats.fields import read_json


@dataclass(frozen=True)
class DraftSource:
    """Directories of the drafter and of the MTP module, and the method that the drafter was trained for."""

    drafter: str
    mtp: str
    method: str

    @property
    def rounds(self) -> Method:
        """The method's description."""
        return METHODS[self.method]


def draft_source(spec: dict[str, Any], target: str) -> DraftSource:
    """Where the parts are, of a speculative configuration with the method `dmtp`; the key `mtp` is taken out of it.

    Without that key the MTP module is looked for in `mtp` beside the drafter, then in the target's own directory.

    Raises:
        ValueError: the drafter is not a directory that `dmtp export` writes, or was trained for a method that an engine
            cannot run with the number of candidates asked for.
    """
    model, mtp = spec.get("model"), spec.pop("mtp", None)
    config = Path(str(model)) / "config.json"
    if model is None or not config.is_file():
        raise ValueError(
            f"dmtp: model is {model!r}, must be the directory of a DMTP drafter, as `dmtp export` writes it"
        )
    section = read_json(config).get(DMTP_CONFIG)
    name = section.get("method") if isinstance(section, dict) else None
    method = METHODS.get(str(name))
    if method is None or method.drafter is None or method.first != "mtp" or method.parts:
        raise ValueError(
            f"dmtp: {config} is for the method {name!r}, must be one that takes its first candidate from MTP and has "
            "no part beyond DFlash"
        )
    count = spec.setdefault("num_speculative_tokens", method.num_candidates)
    if count != method.num_candidates:
        raise ValueError(f"dmtp: num_speculative_tokens is {count!r}, must be {method.num_candidates} for this drafter")
    if mtp is None:
        beside = Path(str(model)).parent / "mtp"
        mtp = beside if beside.is_dir() else target
    return DraftSource(str(model), str(mtp), method.name)
