"""The plugin as a user meets it: found by its entry point, the engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engines.vllm.harness import export, prompts

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    target, drafter, prompts = json.loads(sys.argv[1])
    spec = {"method": "dmtp", "model": drafter}
    llm = LLM(target, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
              max_num_seqs=4, kv_cache_memory_bytes=16 << 20, speculative_config=spec, disable_log_stats=False)
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    counted = {metric.name: metric for metric in llm.get_metrics()}
    rounds, accepted = (counted[f"vllm:spec_decode_num_{name}"].value for name in ("drafts", "accepted_tokens"))
    print("FOUND", json.dumps([[len(o.outputs[0].token_ids) for o in outputs], rounds, accepted]))
"""


def test_the_entry_point_reaches_the_engines_process(tmp_path: Path) -> None:
    target, drafter = export(tmp_path, "dmtp")
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(script), json.dumps([str(target), str(drafter), prompts(4)])]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    lengths, rounds, accepted = json.loads(lines[0].removeprefix("FOUND "))
    assert lengths == [24] * 4
    assert rounds > 0 and accepted > 1.5 * rounds
    assert "dmtp: commit_kv runs in place of vLLM's own" in done.stdout + done.stderr
