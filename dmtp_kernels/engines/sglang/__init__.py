"""The ops in SGLang: its plugin, the algorithm `DMTP`, and the pieces of a DMTP round on its tensors.

`register` is the entry point `dmtp` of `sglang.srt.plugins`; README.md beside this file says what it adds and switches.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from dmtp_kernels.engines.sglang.algorithm import register_algorithm
from dmtp_kernels.engines.sglang.switches import HOOKS, VARIABLE, chosen

__all__ = ["SUPPORTED", "register"]

SUPPORTED = "0.5.23"
"""The release whose interfaces the hooks were written against."""


def register() -> None:
    """Add the speculative algorithm `DMTP`, and hook the ops that `DMTP_SGLANG_OPS` lists into SGLang's DFLASH worker.

    On another release of SGLang, or without it, nothing is added.

    Raises:
        RuntimeError: another release of SGLang or none, and the variable lists an op.
        ValueError: the variable names an op that cannot be switched.
    """
    names = chosen()
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "not installed"
    if found != SUPPORTED:
        if names:
            raise RuntimeError(f"{VARIABLE}: SGLang is {found}, the hooks are for {SUPPORTED}; nothing is replaced")
        return
    register_algorithm()
    if not names:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in names:
        hook = HOOKS[name]()
        HookRegistry.register(hook.target, hook, HookType.AROUND)
