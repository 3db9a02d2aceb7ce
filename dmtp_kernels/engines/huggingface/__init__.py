"""DMTP around any causal language model of transformers."""

from dmtp_kernels.engines.huggingface.generator import DMTPGenerator, Generated
from dmtp_kernels.engines.huggingface.target import TransformersTarget, UnsupportedModel

__all__ = ["DMTPGenerator", "Generated", "TransformersTarget", "UnsupportedModel"]
