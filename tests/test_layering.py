"""Dependencies point one way, so that an engine which wants one op gets torch, that op's folder and nothing else."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dmtp_kernels

ROOT = Path(dmtp_kernels.__file__).parent
PACKAGE = "dmtp_kernels"
CORE = {"_library", "_supports", "_warmup", "backends"}

# part of the package -> parts it may import besides itself; "" is the package's own __init__
ALLOWED: dict[str, set[str]] = {
    "_library": {"_calls", "backends"},
    "backends": {"_build", "_C", "_warmup"},
    "_calls": {"backends"},
    "_supports": {"_library", "backends"},
    "_warmup": set(),
    "_build": set(),
    "ops": CORE,
    "models": {"", *CORE, "ops"},
    "decode": {"", *CORE, "_files", "ops", "models"},
    "testing": {"", *CORE, "ops", "models", "decode"},
    "training": {"", *CORE, "ops", "models", "decode"},
    "doctor": {"", *CORE},
    "_cli_errors": set(),
    "_files": set(),
    "_cli_options": set(),
    "cli_profile": {"", *CORE, "_cli_errors", "_cli_options", "_files", "cli_formats", "models", "decode"},
    "cli_chat": {"", *CORE, "models", "decode"},
    "cli_formats": {"", *CORE, "_cli_errors", "_cli_options", "models", "decode", "training"},
    "cli_training": {"", *CORE, "_cli_errors", "_cli_options", "_files", "cli_formats", "models", "decode", "training"},
    "bench": {"", *CORE, "_cli_errors", "_cli_options", "_files", "ops", "testing"},
    "engines": {"", *CORE, "ops", "models", "decode", "training", "testing", "doctor"},
    "cli": {
        *("", *CORE, "_cli_errors", "_cli_options", "cli_chat", "cli_formats", "cli_profile", "cli_training"),
        *("ops", "models", "decode"),
        *("training", "testing", "doctor", "engines", "bench"),
    },
    "": {*CORE, "ops"},
}
# op family -> other families it may use
FAMILIES: dict[str, set[str]] = {"t1_prep": {"lm_head"}, "accept": {"sample"}}
# an op runs on torch alone; triton only where kernels are written and launched
THIRD_PARTY = {"torch"}
KERNEL_FILES = re.compile(r"kernels(_\w+)?|launch")

SOURCES = sorted(ROOT.rglob("*.py"))
NAMED = re.compile(rf"{PACKAGE}(\.\w+)+(:\w+)?")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute name of what a module imports, also inside functions and by a `"module:function"` string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            # `from package import part` names a part when there is one
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if _is_module(f"{base}.{alias.name}") else base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield node.lineno, node.value.partition(":")[0]


def _is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    known = name.split(".")[0] == PACKAGE and name.split(".")[1:] in [[part] for part in ALLOWED]
    return known or (name.startswith(PACKAGE) and (path.is_dir() or path.with_suffix(".py").is_file()))


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of `module` that point the wrong way."""
    found = []
    part, family, file = ([*module.split(".")[1:], "", "", ""])[:3]
    if part not in ALLOWED:
        return [f"{module}: a new part of the package; say in ALLOWED what it may import"]
    for line, name in imports(source, module, is_package):
        target, target_family = ([*name.split(".")[1:], "", ""])[:2]
        if name.split(".")[0] == PACKAGE:
            if target not in {part, *ALLOWED[part]}:
                found.append(f"{module}:{line} imports {name}: {part or PACKAGE} may use {sorted(ALLOWED[part])}")
            elif part == target == "ops" and family and not family.startswith("_"):
                own = {family, *FAMILIES.get(family, set())}
                if not target_family.startswith("_") and target_family not in own:
                    found.append(f"{module}:{line} imports {name}: ops.{family} may use {sorted(own)} and ops._*")
        elif part == "ops" and (top := name.split(".")[0]) not in sys.stdlib_module_names:
            allowed = THIRD_PARTY | ({"triton"} if KERNEL_FILES.fullmatch(file) else set())
            if top not in allowed:
                found.append(f"{module}:{line} imports {name}: an op may import {sorted(allowed)}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(p) for p in SOURCES])
def test_imports_point_one_way(path: Path) -> None:
    assert violations(path.read_text(), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "planted", "why"),
    [
        ("dmtp_kernels.ops.accept.op", "import dmtp_kernels.decode.round", "ops above itself"),
        ("dmtp_kernels.ops.accept.op", "from dmtp_kernels import models", "ops above itself, by from"),
        ("dmtp_kernels.ops.accept.op", "def f():\n    from dmtp_kernels.training import data", "inside a function"),
        ("dmtp_kernels.ops.accept.op", "from ...cli import main", "relative"),
        ("dmtp_kernels.ops.accept.op", "from dmtp_kernels.ops.commit_kv import commit_kv", "another family"),
        ("dmtp_kernels.ops.accept.op", "from ..commit_kv import commit_kv", "another family, relative"),
        (
            "dmtp_kernels.ops.accept.op",
            "x = {'cpu': 'dmtp_kernels.ops.sample_x.reference:f'}",
            "another family, by string",
        ),
        ("dmtp_kernels.ops.lm_head.op", "import dmtp_kernels.ops.t1_prep", "allowed the other way round only"),
        ("dmtp_kernels.ops.accept.reference", "import numpy", "a third package"),
        ("dmtp_kernels.ops.accept.op", "import triton", "triton outside kernels.py"),
        ("dmtp_kernels.ops._checks", "from dmtp_kernels import engines", "shared helper above itself"),
        ("dmtp_kernels.models.target", "import dmtp_kernels.decode", "models on the loop"),
        ("dmtp_kernels.models.target", "from dmtp_kernels.training.data import load", "models on training"),
        ("dmtp_kernels.decode.round", "import dmtp_kernels.training", "loop on training"),
        ("dmtp_kernels.ops.accept.op", "from dmtp_kernels import use_backend", "the package that is importing it"),
        ("dmtp_kernels.backends", "from dmtp_kernels.ops import accept", "core on an op"),
        ("dmtp_kernels.surprise", "", "a part without a rule"),
    ],
)
def test_a_planted_import_is_caught(module: str, planted: str, why: str) -> None:
    assert len(violations(planted, module)) == 1, why


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("dmtp_kernels.ops.accept.op", "from dmtp_kernels.ops._checks import check_tensor"),
        ("dmtp_kernels.ops.accept.op", "from dmtp_kernels.ops.sample import sample_rows"),
        ("dmtp_kernels.ops.t1_prep.op", "from dmtp_kernels.ops.lm_head import LMHead"),
        ("dmtp_kernels.ops.accept.op", "import math, torch.nn.functional"),
        ("dmtp_kernels.ops.accept.kernels", "import triton.language as tl"),
        ("dmtp_kernels.cli", "from dmtp_kernels import doctor, engines, training"),
        ("dmtp_kernels.decode.round", "from dmtp_kernels.models.target import Target\nimport numpy"),
    ],
)
def test_what_is_allowed_passes(module: str, planted: str) -> None:
    assert violations(planted, module) == []


def reads_environment(source: str) -> list[int]:
    """Lines that read the environment while the module is imported."""

    def walk(node: ast.AST) -> Iterator[int]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, (ast.Attribute, ast.Name)) and ast.unparse(child) in ("os.environ", "os.getenv"):
                yield child.lineno
            yield from walk(child)

    return list(walk(ast.parse(source)))


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(p) for p in SOURCES])
def test_import_reads_no_setting(path: Path) -> None:
    assert reads_environment(path.read_text()) == []


def test_a_setting_read_at_import_is_caught() -> None:
    assert reads_environment("import os\nX = os.environ.get('DMTP_X')") == [2]
    assert reads_environment("import os\ndef f():\n    return os.environ['DMTP_X']") == []
