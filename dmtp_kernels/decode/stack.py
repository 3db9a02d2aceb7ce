"""The models, their caches and the op forms of their weights that one `Method` decodes with."""

from __future__ import annotations

from dataclasses import dataclass

from dmtp_kernels.decode.caches import PagedCache, pages_for
from dmtp_kernels.decode.method import METHODS, Method
from dmtp_kernels.decode.state import MAX_ROWS
from dmtp_kernels.models import MTP, Drafter, Target
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.ops.lm_head import LMHead, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion


@dataclass
class Stack:
    """Models and caches of one engine. `mtp` and `drafter` are None when the method does not use them."""

    method: Method
    target: Target
    mtp: MTP | None
    drafter: Drafter | None
    head: LMHead
    fusion: Fusion
    target_cache: PagedCache
    mtp_cache: PagedCache | None
    drafter_cache: PagedCache | None

    @property
    def rows(self) -> int:
        """R: verify rows per request."""
        return self.method.num_rows

    @property
    def tail_pages(self) -> int:
        """Private MTP pages per request: the pending slot and the scratch slots."""
        assert self.mtp_cache is not None
        return pages_for(1 + MAX_ROWS, self.mtp_cache.page_size)


def get_method(name: str) -> Method:
    """The method called `name`. Raises `ValueError` that lists the known ones."""
    if name not in METHODS:
        raise ValueError(f"method: no method {name!r}, must be one of {', '.join(METHODS)}")
    return METHODS[name]


def build_stack(checkpoint: Checkpoint, method: Method, *, num_pages: int, page_size: int, max_batch: int) -> Stack:
    """Pick the weights `method` needs from a checkpoint and make its caches.

    `num_pages` is the size of each of the three caches; the MTP cache has room for `max_batch` private tails on top.

    Raises:
        ValueError: the checkpoint lacks the method's drafter or fusion.
    """
    target = checkpoint.target
    weight = target.embed_tokens.weight
    dtype, device = weight.dtype, weight.device
    mtp = checkpoint.mtp if method.uses_mtp else None
    drafter = None
    if method.drafter is not None:
        if method.drafter not in checkpoint.drafters:
            raise ValueError(
                f"checkpoint: has no drafter {method.drafter!r}, has {', '.join(sorted(checkpoint.drafters)) or 'none'}"
            )
        drafter = checkpoint.drafters[method.drafter]
        if drafter.config.block_size != method.num_candidates + 1:
            raise ValueError(
                f"checkpoint: drafter {method.drafter!r} has blocks of {drafter.config.block_size} slots, "
                f"method {method.name!r} needs {method.num_candidates + 1}"
            )
    fusion = Fusion(mode="none")
    if method.fusion != "none":
        if method.name not in checkpoint.fusions:
            raise ValueError(f"checkpoint: has no fusion weights for method {method.name!r}")
        fusion = op_fusion(checkpoint.fusions[method.name])
    tails = max_batch * pages_for(1 + MAX_ROWS, page_size)
    config = target.config
    return Stack(
        method=method,
        target=target,
        mtp=mtp,
        drafter=drafter,
        head=pack_lm_head(target.lm_head.weight.detach(), format="int8", num_valid=config.num_valid),
        fusion=fusion,
        target_cache=PagedCache.create(config.layer, config.num_layers, num_pages, page_size, dtype, device),
        mtp_cache=None
        if mtp is None
        else PagedCache.create(mtp.config.layer, mtp.config.num_layers, num_pages + tails, page_size, dtype, device),
        drafter_cache=None
        if drafter is None
        else PagedCache.create(drafter.config.layer, drafter.config.num_layers, num_pages, page_size, dtype, device),
    )


def op_fusion(module: FusionModule) -> Fusion:
    """The same fusion weights as `fused_t1_prep` takes them."""
    norm_m, eps = module.norm_m.weight.detach(), module.norm_m.eps
    if module.mode in ("residual", "replace"):
        return Fusion(
            mode=module.mode,
            weight=module.proj.weight.detach(),
            norm_e=module.norm_e.weight.detach(),
            norm_m=norm_m,
            eps_e=module.norm_e.eps,
            eps_m=eps,
        )
    if module.mode == "mask_residual":
        return Fusion(mode="residual", slots="masks", weight=module.proj.weight.detach(), norm_m=norm_m, eps_m=eps)
    return Fusion(
        mode="residual_low_rank",
        down=module.down.weight.detach(),
        up=module.up.weight.detach(),
        norm_m=norm_m,
        eps_m=eps,
    )
