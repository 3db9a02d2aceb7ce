"""Checkpoints in public formats: DFlash, DFlash2 and DMTP drafters, dense Qwen3 targets, Qwen3.5's MTP module.

Each is a directory with a `config.json` and safetensors. README.md lists tensors, keys and what is refused.
"""

from dmtp_kernels.models.formats.dflash import DFlashCheckpoint, read_dflash
from dmtp_kernels.models.formats.dflash2 import DFlash2, DFlash2Config
from dmtp_kernels.models.formats.dmtp import DMTPCheckpoint, read_dmtp
from dmtp_kernels.models.formats.export import save_drafter, save_mtp, save_qwen3
from dmtp_kernels.models.formats.qwen3 import read_qwen3
from dmtp_kernels.models.formats.qwen_mtp import read_mtp
from dmtp_kernels.models.formats.trio import Exported, check_fit, export_trio, read_drafts, read_trio

__all__ = [
    "DFlash2",
    "DFlash2Config",
    "DFlashCheckpoint",
    "DMTPCheckpoint",
    "Exported",
    "check_fit",
    "export_trio",
    "read_dflash",
    "read_dmtp",
    "read_drafts",
    "read_mtp",
    "read_qwen3",
    "read_trio",
    "save_drafter",
    "save_mtp",
    "save_qwen3",
]
