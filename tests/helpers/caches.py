"""Views of a cache for rows that are equally long."""

import torch
from torch import Tensor

from blockpilot.models.cache import SlotCache, SlotView


def rows_view(cache: SlotCache, positions: Tensor, length: int) -> SlotView:
    """Slots 0 .. R-1, a row of tokens at positions [R, W] each, read up to column `length`."""
    slots = torch.arange(len(positions)).repeat_interleave(positions.shape[1])
    return cache.view(slots, positions.flatten(), slice(0, len(positions)), length)
