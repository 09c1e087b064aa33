"""Cache of a hybrid target: in each slot, a layer has either keys and values or a recurrent state of the text.

A state has two parts (models/delta_net.py): a window, the last inputs of the layer's convolution, and a matrix for
every head, which replaces keys and values and does not grow with the text.

A slot's state is that after its accepted tokens. A pass advances it by the tokens of texts (prompts) and by the
first token of a block, the anchor, which are accepted before the pass. Drafted tokens do not change the state: a pass
stores their inputs of the recurrence, and `accept` adds the accepted ones by the same arithmetic after verification.
Storing the state of every node instead would take 1 MiB per node and layer (16 heads of 128 x 128), compared with
58 KB in float32 for a node's inputs, and would write that memory in every pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from blockpilot.models.cache import KeyHeads, SlotCache, key_heads
from blockpilot.native.products import Padding

LINEAR, FULL = "linear_attention", "full_attention"
Accept = Callable[[Sequence[Sequence[int]]], None]
"""Advances states by the accepted paths [R] of the blocks, without their anchors."""


@dataclass(frozen=True)
class StateShape:
    """Sizes of a gated DeltaNet: key (and query) heads, value heads, and the kernel size of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def of(cls, config: Any) -> Self:
        heads = config.linear_num_key_heads, config.linear_num_value_heads
        return cls(*heads, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)

    @property
    def channels(self) -> int:
        """Number of inputs of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class StateCache(SlotCache):
    """`SlotCache` of the layers with keys and values, and states of the others, initially zero."""

    def __init__(
        self,
        config: Any,
        num_slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
        halves: Sequence[Padding] | None = None,
    ) -> None:
        super().__init__(config, num_slots, length, dtype, device, num_spare, halves)
        shape, slots = StateShape.of(config), (config.layer_types.count(LINEAR), num_slots)
        self.windows = torch.zeros(*slots, shape.kernel - 1, shape.channels, dtype=dtype, device=device)
        """[layers, num_slots, kernel - 1, channels], oldest first."""
        matrix = shape.value_heads, shape.key_dim, shape.value_dim
        self.matrices = torch.zeros(*slots, *matrix, dtype=torch.float32, device=device)
        """[layers, num_slots, value_heads, key_dim, value_dim]; layers in C use a different order inside a head."""
        self.accept_states: Accept | None = None
        """Set by the last pass if its blocks had tokens after their anchors; None otherwise."""

    @staticmethod
    def key_heads(config: Any) -> Sequence[KeyHeads]:
        return key_heads(config)[: config.layer_types.count(FULL)]

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.windows.nbytes + self.matrices.nbytes

    def begin(self, slots: Sequence[int]) -> None:
        """Zero the states of slots whose texts begin in this pass."""
        if slots:
            self.windows[:, slots] = 0
            self.matrices[:, slots] = 0

    def accept(self, starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        super().accept(starts, paths)
        if self.accept_states is not None:
            self.accept_states(paths)
            self.accept_states = None

    def move(self, source: int, destination: int, length: int) -> None:
        super().move(source, destination, length)
        self.windows[:, destination] = self.windows[:, source]
        self.matrices[:, destination] = self.matrices[:, source]

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.begin([slot])
