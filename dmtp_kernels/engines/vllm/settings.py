"""What is switched on."""

from __future__ import annotations

import os

OPS = ("fused_t1_prep", "lm_head_select", "commit_kv")
"""Ops that can stand in for what vLLM runs, one by one."""
OPS_VARIABLE = "DMTP_VLLM_OPS"
SUPPORTED = ("0.32",)
"""vLLM releases whose interfaces the plugin was run against."""
MARK = "dmtp_engine"
"""Attribute of the draft model's configuration that carries `DraftSource`'s fields to vLLM's processes."""


def chosen_ops(default: tuple[str, ...]) -> tuple[str, ...]:
    """The ops that `DMTP_VLLM_OPS` lists, `none` for no op, or the default where it is not set.

    Raises:
        ValueError: it names what is not one of `OPS`.
    """
    text = os.environ.get(OPS_VARIABLE)
    if text is None:
        return default
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ValueError(f"{OPS_VARIABLE}: names {', '.join(unknown)}, must list some of {', '.join(OPS)}, or none")
    return tuple(names)


def supported_version(version: str) -> bool:
    """Whether the plugin was run against this release of vLLM."""
    return any(version == release or version.startswith(release + ".") for release in SUPPORTED)
