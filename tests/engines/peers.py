"""Engines' own code where a machine without a GPU runs it: Triton kernels interpreted, classes out of the source.

Modules of their runtimes import half of an engine. A class or method that needs torch alone is compiled out of a file,
kernels are copied into a module of their own, since the interpreter reads their source.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
_KERNELS = "import torch\nimport triton\nimport triton.language as tl\n\n"


def package(name: str) -> Path | None:
    """Directory of an installed package, or of the one in the environment that `make test-engines` makes."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    return next(iter(ROOT.glob(f".venv-engines/lib/python*/site-packages/{name}")), None)


def missing(name: str, how: str) -> str | None:
    """Why kernels of the package `name` do not run in this process; `how` it is installed."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels are interpreted under TRITON_INTERPRET=1 only"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if package(name) else f"{name} is not installed ({how})"


def taken(file: Path, name: str, **names: Any) -> Any:
    """The class, function or `Class.method` called `name` in `file`, compiled alone with torch and `names`."""
    body = ast.parse(file.read_text()).body
    *owner, last = name.split(".")
    for part in owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == part).body
    found = next(n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == last)
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], found], [])
    names = {"torch": torch, **names}
    exec(compile(module, f"{file}:{name}", "exec"), names)
    return names[last]


def kernels(directory: Path, module: str, *sources: tuple[Path, str]) -> Any:
    """A module of the functions `(file, name)`, decorators included, written to `directory` and imported."""
    text = _KERNELS
    for file, name in sources:
        source = file.read_text()
        found = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
        first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
        text += "\n".join(source.splitlines()[first - 1 : found.end_lineno]) + "\n\n\n"
    path = directory / f"{module}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    made = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
