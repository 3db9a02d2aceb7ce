"""The speculative algorithm `DMTP` among SGLang's, by `SpeculativeAlgorithm.register`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dmtp_kernels.models.formats.dflash import DMTP_CONFIG
from dmtp_kernels.models.formats.fields import read_json

NAME = "DMTP"
"""What `--speculative-algorithm` takes."""
_YES = (
    "is_dflash",
    "is_dflash_family",
    "supports_target_verify_for_draft",
    "supports_grammar_overlap",
)
"""Questions that SGLang gets DFLASH's answer to: the worker is its worker, the batches are its batches.

Not `supports_mixed_chunk` (MTP reads prompts and rounds apart), nor `supports_prefill_shared_read_done` (MTP reads
`req_to_token` after the target's prefill).
"""
_NO = ("need_topk", "carries_draft_hidden_states")
"""Questions that the scheduler asks and that SGLang 0.5.23's class for plugins has no answer to."""


def register_algorithm() -> None:
    """Make SGLang know `DMTP`; a second call changes nothing."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(NAME) is not None:
        return
    answers: dict[str, Any] = {name: lambda self: True for name in _YES} | {name: lambda self: False for name in _NO}
    # its class for plugins lacks this too
    answers["create_future_map"] = SpeculativeAlgorithm.create_future_map
    answers["handle_server_args"] = lambda self, server_args: resolve(server_args)
    kind = type("DMTPAlgorithm", (CustomSpecAlgo,), answers)
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=kind)(worker_class)


def worker_class(server_args: Any) -> type:
    """The worker, on SGLang's own for DFLASH."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from dmtp_kernels.engines.sglang.worker import DMTPRounds

    return type("DMTPWorker", (DMTPRounds, DFlashWorkerV2), {})


def resolve(server_args: Any) -> None:
    """Fill in what DFLASH fills in for itself, and refuse what the worker cannot do.

    Raises:
        ValueError: no DMTP drafter, another width of block, or a sharded target.
    """
    from dmtp_kernels.engines.sglang.worker import source_of

    for name in ("tp_size", "pp_size", "dp_size"):
        size = getattr(server_args, name)
        if size != 1:
            raise ValueError(f"dmtp: {name} is {size}, must be 1: MTP, its fusion and its table are not sharded")
    if server_args.disaggregation_mode != "null":
        raise ValueError("dmtp: disaggregation_mode must be null: the MTP state of a request is not sent")
    source = source_of(server_args)
    width = source.rounds.num_rows
    if server_args.speculative_num_draft_tokens not in (None, width):
        raise ValueError(
            f"dmtp: speculative_num_draft_tokens is {server_args.speculative_num_draft_tokens}, must be {width}"
        )
    server_args.speculative_num_draft_tokens = width
    server_args.speculative_num_steps = server_args.speculative_eagle_topk = 1
    window = read_json(Path(source.drafter) / "config.json")[DMTP_CONFIG].get("window")
    if server_args.speculative_draft_window_size is None and window is not None:
        server_args.speculative_draft_window_size = window
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
