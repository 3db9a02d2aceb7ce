"""`dmtp_kernels/_C.pyi` is what pybind11 says of the module, and `build_info` what the build was."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import dmtp_kernels
from dmtp_kernels import backends

STUB = Path(__file__).parents[1] / "dmtp_kernels" / "_C.pyi"
MISSING = backends.compiled_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
ALIASES = {"_Tensors": "Sequence[torch.Tensor]", "_BuildInfo": "dict", "list[Any]": "list", "torch.device": "object"}
# how pybind11 spells what converts to a number, and older ones to a sequence or an optional value
SPELLINGS = (
    (r"\b(?:typing|collections\.abc)\.", ""),
    (r"Supports(Int|Float) \| SupportsIndex", lambda m: m[1].lower()),
    (r"Optional\[([\w.]+)\]", r"\1 | None"),
    (r"\bList\b", "list"),
    (r"\bTuple\b", "tuple"),
)


def plain(annotation: str) -> str:
    for pattern, replacement in SPELLINGS:
        annotation = re.sub(pattern, replacement, annotation)
    return annotation


def documented() -> dict[str, str]:
    """`(types) -> type` of every function, from the first line of what pybind11 documents."""
    found = {}
    for name, function in vars(backends.compiled()).items():
        if not name.startswith("_"):
            line = plain(function.__doc__.splitlines()[0].removeprefix(name))
            found[name] = re.sub(r"\barg\d+: ", "", line)
    return found


def stubbed(text: str) -> dict[str, str]:
    """The same of a stub; names stand where the module takes keywords."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            shown = [_type(argument) for argument in node.args.posonlyargs]
            shown += [f"{argument.arg}: {_type(argument)}" for argument in node.args.args]
            assert node.returns is not None
            found[node.name] = f"({', '.join(shown)}) -> {_alias(ast.unparse(node.returns))}"
    return found


def _type(argument: ast.arg) -> str:
    assert argument.annotation is not None
    return _alias(ast.unparse(argument.annotation))


def _alias(annotation: str) -> str:
    return ALIASES.get(annotation, annotation)


def test_the_stub_has_the_modules_functions_and_types() -> None:
    assert stubbed(STUB.read_text()) == documented()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def capability()", "def capable()"),
        ("stream: int", "stream: float"),
        ("    page_size: int,\n", ""),
        ("grain: int", "grains: int"),
        ("-> bytes | None", "-> bytes"),
    ],
)
def test_a_stub_that_is_wrong_is_seen(old: str, new: str) -> None:
    text = STUB.read_text()
    assert old in text and stubbed(text.replace(old, new)) != documented()


def test_build_info() -> None:
    compiled = backends.compiled()
    info = compiled.build_info()
    (kind,) = (node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef))
    fields = [
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert list(info) == fields
    assert info["version"] == dmtp_kernels.__version__ and info["torch"] == torch.__version__
    assert info["compiler"] and "-ffp-contract=off" in info["flags"]
    assert compiled.capabilities() == list(info["capabilities"])[: len(compiled.capabilities())]
    if "avx2" in info["capabilities"]:
        assert info["capabilities"]["avx2"] == "-march=x86-64-v3"
    built = backends.cuda_missing() is None
    assert bool(info["cuda_compiler"]) is bool(info["cuda_architectures"])
    assert not built or {"sm_80", "compute_80", "sm_90a"} <= set(info["cuda_architectures"])
