"""Convolutions over the tokens of a block (DFlash 2, z-lab/dflash): what a slot takes over from those before it.

The kernels, of few taps, depend on the token: a projection of what the sublayer reads, shared by groups of channels,
is added to fixed ones. One side is applied to what the sublayer reads, the other to what it returns.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class BlockConvolution(nn.Module):
    """Parameters are named as in the published checkpoints; a fresh one changes nothing."""

    def __init__(self, width: int, num_taps: int, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, width))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(width, 2 * num_taps * width // group_size, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, offsets: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer's output [..., N, width] for x, whose tokens [N] have these offsets in their blocks."""
        num_taps, width = self.base_kernel.shape[1:]
        own = self.kernel_projection(x).unflatten(-1, (2, num_taps, width // self.group_size))
        kernels = self.base_kernel + own.repeat_interleave(self.group_size, dim=-1)
        before, after = kernels.unbind(-3)
        return convolved(sublayer(convolved(x, before, offsets)), after, offsets)


def convolved(x: Tensor, kernels: Tensor, offsets: Tensor) -> Tensor:
    """Sums over taps t of kernels[..., t, :] times the token t before: [..., N, width].

    x [..., N, width], kernels [..., N, taps, width]. Nothing is before a block's first token, of offset [N] 0.
    """
    found = kernels[..., 0, :] * x
    for tap in range(1, kernels.shape[-2]):
        earlier = x.roll(tap, dims=-2).masked_fill((offsets < tap)[:, None], 0)
        found = found + kernels[..., tap, :] * earlier
    return found


def through(
    convolution: BlockConvolution | None, x: Tensor, offsets: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """A sublayer of x, convolved where there is a convolution."""
    return sublayer(x) if convolution is None else convolution(x, offsets, sublayer)
