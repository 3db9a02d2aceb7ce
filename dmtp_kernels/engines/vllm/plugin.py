"""The names of vLLM that the plugin replaces."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from dmtp_kernels.engines.source import draft_source
from dmtp_kernels.engines.vllm.settings import MARK, SUPPORTED, chosen_ops, supported_version

METHOD = "dmtp"
_GIVEN = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def install() -> None:
    """Teach `EngineArgs.create_speculative_config` the method, and vLLM's proposers which class to make.

    A second call changes nothing. On a release of vLLM that the plugin was not run against only the first is done, and
    asking for the method raises.
    """
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config
    if getattr(original, MARK, False):
        return
    supported = supported_version(vllm.__version__)

    @functools.wraps(original)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        spec = dict(self.speculative_config or {})
        if METHOD not in (self.spec_method, spec.get("method")):
            return original(self, target_model_config, target_parallel_config)
        if not supported:
            raise ValueError(
                f"dmtp: vLLM is {vllm.__version__}, the plugin supports {', '.join(f'{v}.x' for v in SUPPORTED)}"
            )
        spec["method"] = "dflash"
        spec.setdefault("model", self.spec_model)
        if self.spec_tokens is not None:
            spec["num_speculative_tokens"] = self.spec_tokens
        source = draft_source(spec, target_model_config.model)
        given = {name: getattr(self, name) for name in _GIVEN}
        try:
            for name in _GIVEN:
                setattr(self, name, None)
            self.speculative_config = spec
            made = original(self, target_model_config, target_parallel_config)
        finally:
            # the same arguments may be asked for a second configuration
            for name, value in given.items():
                setattr(self, name, value)
        check(target_parallel_config, made)
        setattr(made.draft_model_config.hf_config, MARK, asdict(source))
        return made

    setattr(create_speculative_config, MARK, True)
    EngineArgs.create_speculative_config = create_speculative_config
    if supported:
        _choose_classes()


def _choose_classes() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.spec_decode.eagle import EagleProposer

    DFlashProposer.__new__ = staticmethod(_proposer)
    EagleProposer.__new__ = staticmethod(_mtp_proposer)
    if not current_platform.is_cpu():
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

        DFlashSpeculator.__new__ = staticmethod(_speculator)


def check(parallel: Any, speculative: Any) -> None:
    """Raise ValueError on what the proposer cannot do."""
    for name, size in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
    ):
        if size != 1:
            raise ValueError(f"dmtp: {name} is {size}, must be 1: MTP and the drafter are not sharded")
    if speculative.disable_padded_drafter_batch:
        raise ValueError("dmtp: disable_padded_drafter_batch is true, must be false")


def _proposer(cls: type, vllm_config: Any, *arguments: Any, **keywords: Any) -> Any:
    """In place of `DFlashProposer.__new__`, which vLLM's runner calls for every method of this family."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    if cls is DFlashProposer:
        draft = vllm_config.speculative_config.draft_model_config.hf_config
        if hasattr(draft, MARK):
            from dmtp_kernels.engines.vllm.proposer import DMTPProposer

            cls = DMTPProposer
        elif chosen_ops(()):
            from dmtp_kernels.engines.vllm.dflash import FusedDFlashProposer

            cls = FusedDFlashProposer
    return object.__new__(cls)


def _mtp_proposer(cls: type, vllm_config: Any, *arguments: Any, **keywords: Any) -> Any:
    """In place of `EagleProposer.__new__`, which vLLM's runner calls for `mtp` and `eagle`."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    if cls is EagleProposer and vllm_config.speculative_config.method == "mtp" and chosen_ops(()):
        from dmtp_kernels.engines.vllm.mtp import FusedMTPProposer

        cls = FusedMTPProposer
    return object.__new__(cls)


def _speculator(cls: type, vllm_config: Any, *arguments: Any, **keywords: Any) -> Any:
    """In place of `DFlashSpeculator.__new__`, which the V2 runner calls."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    if cls is DFlashSpeculator and hasattr(vllm_config.speculative_config.draft_model_config.hf_config, MARK):
        from dmtp_kernels.engines.vllm.speculator import DMTPSpeculator

        cls = DMTPSpeculator
    return object.__new__(cls)
