"""Names of the Triton kernels, as profilers show them, for their filters: `python -m profiling.kernel_names`."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

OPS = Path(__file__).parents[1] / "dmtp_kernels" / "ops"


def kernel_names(family: str = "*") -> list[str]:
    """Every kernel that is launched, of all op families or of one: read from the sources, nothing is imported."""
    found = set()
    for path in OPS.glob(f"{family}/kernels*.py"):
        for node in ast.parse(path.read_text()).body:
            # functions that kernels call have other names
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the names, one a line, or as a regular expression that matches them and nothing else."""
    parser = argparse.ArgumentParser(prog="python -m profiling.kernel_names", description=__doc__)
    parser.add_argument("--op", metavar="FAMILY", default="*", help="op family, e.g. lm_head (default: all)")
    parser.add_argument("--regex", action="store_true", help="one expression for --kernel-name regex:...")
    options = parser.parse_args(arguments)
    names = kernel_names(options.op)
    if not names:
        print(f"op: no kernels of {options.op!r}", file=sys.stderr)
        return 2
    print(f"^({'|'.join(names)})$" if options.regex else "\n".join(names))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
