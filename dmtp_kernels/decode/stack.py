"""The models, their caches and the op forms of their weights that one `Method` decodes with."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmtp_kernels.decode.caches import PagedCache, pages_for
from dmtp_kernels.decode.method import METHODS, Method
from dmtp_kernels.models import MTP, Drafter, Target
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.ops.lm_head import LMHead, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion

MAX_ROWS = 8
"""R: verify rows and MTP advancement rows reserved per request."""
VERIFICATIONS = ("target", "rejection", "block")

_CACHED = 1 << 20
"""Bytes of a vocabulary head that stay in the caches, where a screen saves nothing: at 260 x 192 fp32 and 8 / 48 states
the dense head takes 86 / 182 us here, the int8 one 102 / 251."""


_LISTED = 16
"""Tokens a slot that any head can list by default."""


@dataclass
class Stack:
    """Models and caches of one engine. `mtp` and `drafter` are None when the method does not use them.

    `verification` says how candidates are judged: `target` keeps those that equal the target's own draws, `rejection`
    and `block` draw the candidates too and keep them by speculative rejection sampling or block verification.
    `mtp_steps` is the most candidates MTP proposes before the drafter continues. `target_cache` has no layers where the
    target keeps its rows itself.
    """

    method: Method
    target: Target
    mtp: MTP | None
    drafter: Drafter | None
    head: LMHead
    fusion: Fusion
    target_cache: PagedCache
    mtp_cache: PagedCache | None
    drafter_cache: PagedCache | None
    verification: str = "target"
    mtp_steps: int = 1

    owners: tuple[str, ...] = field(init=False)
    """Owners of the caches there are, in the order in which `advance_round` has their page tables."""

    def __post_init__(self) -> None:
        caches = {"target": self.target_cache, "drafter": self.drafter_cache, "mtp": self.mtp_cache}
        self.owners = tuple(name for name, cache in caches.items() if cache is not None and cache.k)

    def cache(self, owner: str) -> PagedCache:
        """The cache of one of the `owners`."""
        found: PagedCache | None = getattr(self, f"{owner}_cache")
        assert found is not None
        return found

    @property
    def known_slots(self) -> int:
        """Slots of a block whose ids follow from the anchor alone; 0 where T1 is in it."""
        return self.method.num_slots if self.drafter is not None and self.method.first == "drafter" else 0

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


def build_stack(
    checkpoint: Checkpoint,
    method: Method,
    *,
    num_pages: int,
    page_size: int,
    max_batch: int,
    verification: str = "target",
    mtp_steps: int = 1,
) -> Stack:
    """Pick the weights `method` needs from a checkpoint and make its caches.

    `num_pages` is the size of each of the three caches; the MTP cache has room for `max_batch` private tails on top.

    Raises:
        ValueError: the checkpoint lacks the method's drafter, fusion or MTP module, there is no such verification, or
            `mtp_steps` is out of range.
    """
    if verification not in VERIFICATIONS:
        raise ValueError(f"verification: is {verification!r}, must be one of {', '.join(VERIFICATIONS)}")
    _check_steps(method, mtp_steps)
    target = checkpoint.target
    weight = target.embed_tokens.weight
    dtype, device = weight.dtype, weight.device
    mtp = checkpoint.mtp if method.uses_mtp else None
    if method.uses_mtp and mtp is None:
        raise ValueError(f"checkpoint: has no MTP module, method {method.name!r} needs one")
    drafter = None
    if method.drafter is not None:
        if method.drafter not in checkpoint.drafters:
            raise ValueError(
                f"checkpoint: has no drafter {method.drafter!r}, has {', '.join(sorted(checkpoint.drafters)) or 'none'}"
            )
        drafter = checkpoint.drafters[method.drafter]
        if drafter.config.block_size != method.block:
            raise ValueError(
                f"checkpoint: drafter {method.drafter!r} has blocks of {drafter.config.block_size} slots, "
                f"method {method.name!r} needs {method.block}"
            )
        if drafter.config.parts != method.parts:
            has, wants = (", ".join(parts) or "none" for parts in (drafter.config.parts, method.parts))
            raise ValueError(
                f"checkpoint: drafter {method.drafter!r} has the parts {has}, method {method.name!r} needs {wants}"
            )
    fusion = Fusion(mode="none")
    if method.fusion != "none":
        if method.name not in checkpoint.fusions:
            raise ValueError(f"checkpoint: has no fusion weights for method {method.name!r}")
        fusion = op_fusion(checkpoint.fusions[method.name])
    tails = max_batch * pages_for(1 + MAX_ROWS, page_size)
    config, weight = target.config, target.lm_head.weight.detach()
    most = drafter.config.selector.top_k if drafter is not None and drafter.config.selector is not None else 1
    return Stack(
        method=method,
        target=target,
        mtp=mtp,
        drafter=drafter,
        head=pack_lm_head(
            weight,
            format="int8" if weight.nbytes > _CACHED else "dense",
            num_valid=config.num_valid,
            capacity=None if most <= _LISTED else 4 * most,
        ),
        fusion=fusion,
        target_cache=PagedCache.create(
            config.layer, 0 if target.keeps_rows else config.num_layers, num_pages, page_size, dtype, device
        ),
        mtp_cache=None
        if mtp is None
        else PagedCache.create(mtp.config.layer, mtp.config.num_layers, num_pages + tails, page_size, dtype, device),
        drafter_cache=None
        if drafter is None
        else PagedCache.create(drafter.config.layer, drafter.config.num_layers, num_pages, page_size, dtype, device),
        verification=verification,
        mtp_steps=mtp_steps,
    )


def _check_steps(method: Method, mtp_steps: int) -> None:
    most = method.num_candidates if method.drafter is not None and method.first == "mtp" else 1
    if not 1 <= mtp_steps <= most:
        raise ValueError(f"mtp_steps: is {mtp_steps}, must be between 1 and {most} for method {method.name!r}")


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
