"""The ops' own tests, those of tests/ops, with the CUDA kernels on fibers as their backend."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cuda_host import host

SUITES = {
    "round": "draft_pages advance accept_prefix commit_kv commit_kv_layouts commit_kv_precision commit_round",
    "t1_prep": "t1_prep t1_prep_faults t1_prep_numbers",
    "block_attention": (
        "block_attention block_attention_masks block_attention_histories block_attention_layouts "
        "block_attention_padding block_attention_batch block_attention_faults"
    ),
}


@pytest.mark.parametrize("suite", SUITES)
def test_the_ops_own_tests_pass(suite: str) -> None:
    host.library()
    files = [f"tests/ops/test_{name}.py" for name in SUITES[suite].split()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cuda", *files],
        env={**os.environ, "DMTP_CUDA_HOST": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        cwd=host.ROOT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
