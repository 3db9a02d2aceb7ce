"""The ops in SGLang: its plugin, and the pieces of a DMTP round on its tensors.

`register` is the entry point `dmtp` of `sglang.srt.plugins`; README.md beside this file says what it switches.
"""

from __future__ import annotations

from importlib.metadata import version

from dmtp_kernels.engines.sglang.switches import HOOKS, VARIABLE, chosen

__all__ = ["SUPPORTED", "register"]

SUPPORTED = "0.5.23"
"""The release whose interfaces the hooks were written against."""


def register() -> None:
    """Hook the ops that `DMTP_SGLANG_OPS` lists into SGLang's DFLASH worker; nothing where it is not set.

    Raises:
        RuntimeError: another release of SGLang.
        ValueError: the variable names an op that cannot be switched.
    """
    names = chosen()
    if not names:
        return
    found = version("sglang")
    if found != SUPPORTED:
        raise RuntimeError(f"{VARIABLE}: SGLang is {found}, the hooks are for {SUPPORTED}; nothing is replaced")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in names:
        hook = HOOKS[name]()
        HookRegistry.register(hook.target, hook, HookType.AROUND)
