"""The pages' examples run and print what the pages say, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run(page: str, section: str) -> tuple[str, list[str]]:
    """The section's text, and what each of its Python blocks prints; they share their names."""
    text = (ROOT / page).read_text().partition(section)[2]
    names: dict[str, Any] = {}
    printed = []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        printed.append(out.getvalue().strip())
    return text, printed


def test_adopting_one_op_prints_what_the_front_page_says() -> None:
    text, (head, loop) = run("README.md", "## Adopt one op\n")
    assert f"It prints\n\n```\n{head}\n```" in text
    assert loop  # the page does not show the loop's text


def test_the_ops_page_prints_what_it_says() -> None:
    text, (attention, accept, buffers, _, round_end) = run("dmtp_kernels/ops/README.md", "# Adopt one op\n")
    assert f"It prints\n\n```\n{attention}\n```" in text
    assert f"It prints `{accept}`" in text
    assert f"It prints\n\n```\n{round_end}\n```" in text
    assert f'print(outputs["commit_len"].tolist())  # {buffers}' in text


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    pages = [ROOT / name for name in listed.stdout.split()] or [ROOT / "README.md"]
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http:", "https:")):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
