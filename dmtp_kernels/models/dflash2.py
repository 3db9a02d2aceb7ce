"""What DFlash2 adds to a drafter layer: a short convolution along the block, before and after attention and MLP."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from dmtp_kernels.models.config import ConvConfig, LayerConfig
from dmtp_kernels.models.layers import Attend, DecoderLayer


class BlockConvolution(nn.Module):
    """Depthwise taps along the slots of a block, fixed per channel plus a part that follows from the slot's input.

    `y[t, c] = sum_k (base[k, c] + dynamic[t, k, c // group]) x[t - k, c]`, where `dynamic = W x` of the input before
    the first of the two passes and slots before the block count as zero. The first pass mixes what the sublayer reads,
    the second what it returns. Starts as the identity.
    """

    def __init__(self, width: int, config: ConvConfig) -> None:
        super().__init__()
        self.taps, self.group = config.taps, config.group
        self.base_kernel = nn.Parameter(torch.zeros(2, config.taps, width))
        self.kernel_projection = nn.Linear(width, 2 * config.taps * (width // config.group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x[..., S, H]` mixed for the sublayer, and the dynamic kernel `[..., S, taps, H / group]` for `after`."""
        kernels = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._mix(x, kernels[..., 0, :, :], 0), kernels[..., 1, :, :]

    def after(self, x: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        """The sublayer's output `x[..., S, H]`, mixed."""
        return self._mix(x, dynamic, 1)

    def _mix(self, x: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
        slots = x.shape[-2]
        mixed = torch.zeros_like(x)
        for tap in range(self.taps):
            earlier = x if tap == 0 else functional.pad(x, (0, 0, tap, 0))[..., :slots, :]
            kernel = self.base_kernel[side, tap] + dynamic[..., tap, :].repeat_interleave(self.group, dim=-1)
            mixed = mixed + kernel * earlier
        return mixed


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with a `BlockConvolution` around each of its sublayers."""

    def __init__(self, config: LayerConfig, index: int, conv: ConvConfig) -> None:
        super().__init__(config, index)
        self.attention_conv = BlockConvolution(config.hidden_size, conv)
        self.mlp_conv = BlockConvolution(config.hidden_size, conv)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        mixed, dynamic = self.attention_conv.before(self.input_layernorm(x))
        x = x + self.attention_conv.after(self.attention(mixed, cos, sin, attend), dynamic)
        mixed, dynamic = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(mixed), dynamic)
