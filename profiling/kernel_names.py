"""Names of the Triton kernels, as profilers show them, for their filters: `python -m profiling.kernel_names`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from profiling.command import Parser, command

OPS = Path(__file__).parents[1] / "dmtp_kernels" / "ops"


def kernel_names(family: str | None = None) -> list[str]:
    """Every kernel that is launched, of all op families or of one: read from the sources, nothing is imported."""
    found = set()
    for path in OPS.glob("*/kernels*.py"):
        if family not in (None, path.parent.name):
            continue
        for node in ast.parse(path.read_text()).body:
            # functions that kernels call have other names
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return sorted(found)


def families() -> list[str]:
    """Op families that have kernels."""
    return sorted({path.parent.name for path in OPS.glob("*/kernels*.py") if kernel_names(path.parent.name)})


@command("profiling.kernel_names")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the names, one a line, or as a regular expression that matches them and nothing else."""
    parser = Parser(prog="python -m profiling.kernel_names", description=__doc__)
    parser.add_argument("--op", metavar="FAMILY", help="op family, e.g. lm_head (default: all)")
    parser.add_argument("--regex", action="store_true", help="one expression for --kernel-name regex:...")
    options = parser.parse_args(arguments)
    if options.op is not None and options.op not in families():
        parser.error(f"--op: is {options.op}, must be a family with Triton kernels: {', '.join(families())}")
    names = kernel_names(options.op)
    print(f"^({'|'.join(names)})$" if options.regex else "\n".join(names))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
