"""Fused kernels for DMTP decoding: an MTP module proposes the first draft token, a DFlash drafter the next six.

Importing registers the op schemas under `torch.ops.dmtp`; it touches no driver, no compiler and no GPU.
"""

from dmtp_kernels._supports import supports
from dmtp_kernels._warmup import CompileDuringCapture, warmup
from dmtp_kernels.backends import BackendUnavailable, use_backend
from dmtp_kernels.ops import (  # noqa: F401  importing a family registers its schemas
    accept,
    advance,
    block_attention,
    commit_kv,
    draft_pages,
    lm_head,
    sample,
    t1_prep,
)

__version__ = "0.1.0"
__all__ = ["BackendUnavailable", "CompileDuringCapture", "__version__", "supports", "use_backend", "warmup"]
