"""An op with Triton kernels has every kernel compiled and its bytes counted."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from dmtp_kernels import backends
from profiling.resources import variants

pytest.importorskip("triton")
FAMILIES = sorted({i["triton"].split(".")[2] for i in backends._implementations.values() if "triton" in i})
KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


def kernels(family: str) -> set[str]:
    folder = Path(importlib.import_module(f"dmtp_kernels.ops.{family}").__path__[0])
    return {name for file in folder.glob("kernels*.py") for name in KERNEL.findall(file.read_text())}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_has_a_variant_that_is_compiled(family: str) -> None:
    listed = {variant.kernel.rpartition(":")[2] for _, variant in variants(family)}
    assert listed == kernels(family) != set()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_traffic_counted(family: str) -> None:
    spec = importlib.import_module(f"dmtp_kernels.ops.{family}.spec")
    counted = {kernel for traffic in spec.TRAFFIC for kernel, floor in traffic.kernels.items() if floor is not None}
    assert counted and counted <= kernels(family)


def test_variants_have_names_of_their_own() -> None:
    names = [variant.name for _, variant in variants()]
    assert len(names) == len(set(names))
