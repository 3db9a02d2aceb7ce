"""The examples of README.md run and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_adopting_one_op_prints_what_the_page_says() -> None:
    section = README.partition("## Adopt one op\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    printed = []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        printed.append(out.getvalue().strip())
    head, attention, accept, buffers, _, round_end = printed
    assert f"It prints\n\n```\n{head}\n```" in section
    assert f"It prints\n\n```\n{attention}\n```" in section
    assert f"It prints `{accept}`" in section
    assert f"It prints\n\n```\n{round_end}\n```" in section
    assert f'print(outputs["commit_len"].tolist())  # {buffers}' in section
