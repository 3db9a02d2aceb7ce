"""The small model code the decode loop needs: Qwen3-shaped target, its MTP module, the DFlash drafter, and their
weights.

Every forward takes an `attend` callable instead of an attention implementation: training passes a dense masked product,
decoding passes the paged `block_attention` op. The rest of the model is the same code.
"""

from dmtp_kernels.models.config import DrafterConfig, MTPConfig, TargetConfig
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.target import Target, TargetOutput

__all__ = ["MTP", "Drafter", "DrafterConfig", "MTPConfig", "Target", "TargetConfig", "TargetOutput"]
