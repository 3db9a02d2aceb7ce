"""A real head and states that read it, loaded once per process."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dmtp_kernels.models.smollm2 import SmolLM2, load_smollm2, smollm2_missing


@cache
def smollm2() -> SmolLM2:
    reason = smollm2_missing()
    if reason is not None:
        pytest.skip(reason)
    return load_smollm2()


@cache
def real_states() -> torch.Tensor:
    """About 380 states, bf16, of 24 sampled answers; the first half and the second answer different prompts."""
    return smollm2().states(new_tokens=16).to(torch.bfloat16)
