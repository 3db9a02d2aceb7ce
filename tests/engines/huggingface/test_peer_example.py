"""The example of the page runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dmtp_kernels

pytest.importorskip("transformers", reason="transformers is not installed (make test-peer)")

PAGE = Path(dmtp_kernels.__file__).parent / "engines" / "huggingface" / "README.md"


def test_example(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"b'The quick brown fox.*' ([\d.]+) tokens a round", done.stdout)
    assert found is not None and float(found[1]) > 1.5
