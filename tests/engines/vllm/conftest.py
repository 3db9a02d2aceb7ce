"""Settings that vLLM reads when it is imported."""

from __future__ import annotations

import os

# the engine in this process, where its objects can be looked at
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
