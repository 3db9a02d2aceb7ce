"""Variants for the tests of `profiling.resources`: one that compiles and one that does not."""

from __future__ import annotations

from dmtp_kernels.ops._variant import Variant


def variants() -> tuple[Variant, ...]:
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32"}
    kernel = "tests.testing.kernels:convert_kernel"
    return (
        Variant("good", kernel, signature, {"B": 1024}, aligned=("x", "y", "n"), streams=("x",)),
        Variant("bad", kernel, signature, {"B": 1000}, aligned=("x", "y")),
    )
