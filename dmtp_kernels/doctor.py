"""What is installed here, which implementation each op runs, and why not a better one."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels import __version__, _library, backends

ASSETS = Path(__file__).parent / "assets"
_PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "typer", "rich", "matplotlib", "nvtx"),
    *("flash-attn", "flash-attn-3", "flash-attn-4"),
)
_SETTING_PREFIXES = ("DMTP_", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")


def report() -> dict[str, Any]:
    """Everything `dmtp doctor` shows, as plain values that `json.dumps` takes.

    Keys:
        `versions`: name -> version, None when not installed; `cuda_runtime` is the one torch was built for.
        `devices`: `[{"device", "name", ...}]`, the CPU first.
        `no_cuda`: why there is no CUDA device, None when there is one.
        `backends`: backend -> device type -> `{"ops": n, "why_not": reason or None}`.
        `compiled`: `{"why_not": reason or None, "capability": name in force, "capabilities": [names], "build": what the
            build used}` of `_C`.
        `ops`: op -> device type -> `{"runs": backend or None, "why_not": {better backend: reason}}`.
        `checkpoint`: `{"present": bool, "files": {name: bytes}}` of the embedded checkpoint.
        `settings`: environment variables in force that change what runs.
    """
    devices = _devices()
    kinds = list(dict.fromkeys(str(d["device"]).split(":")[0] for d in devices))
    files = {f.name: f.stat().st_size for f in sorted(ASSETS.glob("*.safetensors"))}
    return {
        "versions": _versions(),
        "devices": devices,
        "no_cuda": _no_cuda(),
        "backends": {b: {k: _backend(b, k) for k in kinds} for b in backends.NAMES},
        "compiled": _compiled(),
        "ops": {op: {k: _choice(op, k) for k in kinds} for op in _library.registered()},
        "checkpoint": {"present": bool(files), "files": files},
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTING_PREFIXES)},
    }


def render(found: dict[str, Any]) -> str:
    """The report as aligned text, one fact a line."""
    lines = ["versions"]
    lines += [f"  {name:<14}{version or 'not installed'}" for name, version in found["versions"].items()]
    lines += ["devices"]
    for device in found["devices"]:
        details = ", ".join(f"{k} {v}" for k, v in device.items() if k not in ("device", "name"))
        lines.append(f"  {device['device']:<14}{device['name']} ({details})")
    if found["no_cuda"]:
        lines.append(f"  {'cuda':<14}none: {found['no_cuda']}")
    lines += ["backends"]
    for backend, kinds in found["backends"].items():
        for kind, state in kinds.items():
            lines.append(f"  {backend:<14}{kind:<6}{state['why_not'] or 'runs {} ops'.format(state['ops'])}")
    compiled = found["compiled"]
    lines += ["compiled module"]
    if compiled["why_not"]:
        lines.append(f"  {compiled['why_not']}")
    else:
        build = compiled["build"]
        lines.append(f"  runs {compiled['capability']} of {', '.join(compiled['capabilities'])}")
        lines.append(f"  built by {build['compiler']} for torch {build['torch']}")
        if build["cuda_compiler"]:
            lines.append(f"  CUDA kernels by {build['cuda_compiler']} for {', '.join(build['cuda_architectures'])}")
    lines += ["ops"]
    width = 2 + max((len(op) for op in found["ops"]), default=0)
    for op, kinds in found["ops"].items():
        for kind, choice in kinds.items():
            lines.append(
                f"  {op:<{width}}{kind:<6}{choice['runs'] or 'nothing':<11}{_why(op, choice['why_not'])}".rstrip()
            )
    lines += ["embedded checkpoint"]
    lines += [f"  {name}  {size / 1e6:.2f} MB" for name, size in found["checkpoint"]["files"].items()]
    if not found["checkpoint"]["present"]:
        lines.append("  absent: `dmtp train` makes one")
    lines += ["settings"]
    lines += [f"  {k}={v}" for k, v in found["settings"].items()] or ["  none"]
    return "\n".join(lines)


def _why(op: str, why_not: dict[str, str]) -> str:
    lacking = [b for b, reason in why_not.items() if reason == _lacks(op, b)]
    parts = [f"has no {' or '.join(lacking)} implementation"] if lacking else []
    parts += [f"not {b}: {reason}" for b, reason in why_not.items() if b not in lacking]
    return "; ".join(parts)


def _lacks(op: str, backend: str) -> str:
    return f"{op} has no {backend} implementation"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"dmtp_kernels": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # a torch on PYTHONPATH may carry no metadata, and the module itself knows its local version
    found["torch"] = torch.__version__
    found["cuda_runtime"] = torch.version.cuda
    return found


def _devices() -> list[dict[str, str | int]]:
    capability = torch.backends.cpu.get_cpu_capability()
    found: list[dict[str, str | int]] = [
        {"device": "cpu", "name": _cpu_name(), "vectors": capability, "threads": torch.get_num_threads()}
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            memory = f"{p.total_memory / 2**30:.0f} GiB"
            found.append({"device": f"cuda:{index}", "name": p.name, "sm": f"{p.major}{p.minor}", "memory": memory})
    return found


def _no_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return "torch sees no driver or no visible device"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _compiled() -> dict[str, Any]:
    why_not = backends.compiled_missing()
    if why_not is not None:
        return {"why_not": why_not, "capability": None, "capabilities": [], "build": None}
    module = backends.compiled()
    rest = {"capabilities": module.capabilities(), "build": module.build_info()}
    try:
        capability = module.capability()
    except ValueError as error:  # a setting that names no capability
        return {"why_not": str(error), "capability": None, **rest}
    return {"why_not": None, "capability": capability, **rest}


def _choice(op: str, kind: str) -> dict[str, Any]:
    device = torch.device(kind)
    try:
        runs = backends.choose(op, device)
    except backends.BackendUnavailable as error:
        return {"runs": None, "why_not": {"any": str(error)}}
    why_not = {}
    for better in backends.NAMES[: backends.NAMES.index(runs)]:
        reason = backends.unavailable(op, better, device)
        why_not[better] = reason or f"{runs} is preferred on {kind}"
    return {"runs": runs, "why_not": why_not}


def _backend(backend: str, kind: str) -> dict[str, Any]:
    device = torch.device(kind)
    reasons = {op: backends.unavailable(op, backend, device) for op in _library.registered()}
    able = sum(reason is None for reason in reasons.values())
    if able:
        return {"ops": able, "why_not": None}
    blocked = {str(r) for op, r in reasons.items() if r != _lacks(op, backend)}
    return {"ops": 0, "why_not": "; ".join(sorted(blocked)) or f"no op has a {backend} implementation"}
