"""CUDA graphs of passes over a SlotCache: one call launches the hundreds of small kernels of a pass of few tokens.

A graph has fixed shapes, so rows are padded to a box of a grid: the numbers of rows and of tokens per row are rounded
up to powers of two, the number of columns read to a few lengths. Row r of a box is slot r. Padding repeats the first
token of its row, so that it selects no other experts, and is stored in the last column of its slot, which no box
reads: with graphs this column must stay free of tokens. Wider passes (prompts) run kernel by kernel.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from blockpilot.device import sent
from blockpilot.models.packing import Packing, followed_bits, within

MOST_WIDTH, MOST_TOKENS = 32, 512  # maxima of a box
LEAST_LENGTH = 256  # columns
ALIGNMENT = 8  # columns of a mask: attention kernels copy unaligned masks


class BoxTokens(NamedTuple):
    """Inputs of a box's pass, int64 [R * W] each, for its tokens and padding."""

    columns: Tensor
    positions: Tensor
    follows: Tensor
    """Bit i is set if the token attends to token i of its row: its ancestors and itself."""
    starts: Tensor
    """The column of the row's first token."""
    ends: Tensor
    """One past the column of the row's last token."""


class Box(NamedTuple):
    """Rows 0 .. rows - 1 of `width` tokens each, which read columns 0 .. length - 1."""

    rows: int
    width: int
    length: int

    @classmethod
    def around(cls, packing: Packing, slots: Sequence[int], num_slots: int, num_columns: int) -> Self | None:
        """The smallest box of the grid for rows in `slots`; None if no box is large enough."""
        rows, width = min(_power_of_two(max(slots) + 1), num_slots), _power_of_two(packing.width)
        most = num_columns - 1
        if width > MOST_WIDTH or rows * width > MOST_TOKENS or packing.length > most:
            return None
        # A few lengths per power of two: fewer would read more columns than needed, more would need more graphs.
        step = max(LEAST_LENGTH, _power_of_two(packing.length) // 4)
        lengths = -(-packing.length // step) * step, most // ALIGNMENT * ALIGNMENT, most
        return cls(rows, width, next(n for n in lengths if packing.length <= n <= most))

    def packing(self, device: torch.device) -> Packing:
        """Packing of a box in which all rows are full."""
        return Packing([self.width] * self.rows, [self.length - self.width] * self.rows, device)

    def tokens(self, packing: Packing, slots: Sequence[int], num_columns: int) -> Tensor:
        """[7, R * W] on the host: `BoxTokens`, each token's index in the box [N], and the token at each index."""
        # Slots without a row, and indices beyond a row's end, are padding.
        # 1. Sizes and starts of the rows of the box.
        row_slots, (sizes, starts, firsts) = np.array(slots), np.zeros((3, self.rows, 1), dtype=np.int64)
        sizes[row_slots, 0], starts[row_slots, 0] = packing.sizes, packing.starts
        firsts[row_slots, 0] = packing.firsts
        offsets = np.arange(self.width)
        # 2. Depths of tokens, and the tokens of their rows that they attend to. In a chain a token's depth is its
        # offset, and it attends to itself and all tokens before it: bits 0 .. offset.
        depths, follows = np.tile(offsets, (self.rows, 1)), np.tile((2 << offsets) - 1, (self.rows, 1))
        for slot, row_depths, parents in zip(slots, packing.depths, packing.parents or (), strict=False):
            depths[slot, : len(row_depths)] = row_depths
            follows[slot, : len(row_depths)] = followed_bits(parents)
        # 3. The fields of `BoxTokens`, and both maps between the packing and the box.
        is_token, numbers = offsets < sizes, np.zeros((6, self.rows, self.width), dtype=np.int64)
        # Padding is stored in the last column; in its row it attends to the first token only, so it stays finite.
        numbers[0] = np.where(is_token, starts + offsets, num_columns - 1)
        numbers[1] = np.where(is_token, starts + depths, starts)
        numbers[2] = np.where(is_token, follows, 1)
        numbers[3], numbers[4] = starts, starts + sizes.clip(min=1)
        tokens = np.where(is_token, firsts + offsets, firsts)
        rows, offsets = packing.on_host[:2]
        numbers[5].reshape(-1)[: packing.num_tokens] = row_slots[rows] * self.width + offsets
        return torch.from_numpy(np.concatenate([numbers, tokens[None]]).reshape(7, -1))

    def slots(self, device: torch.device) -> Tensor:
        """Slot of every token, padding included, [R * W]."""
        return torch.arange(self.rows, device=device)[:, None].expand(-1, self.width).flatten()

    def visible(self, box_tokens: BoxTokens, window: int | None = None) -> Tensor:
        """Attention mask [R, 1, W, length]: columns before the row, and those of the token and its ancestors.

        window: only columns of tokens less than this many positions before.
        """
        starts, follows = (t.view(self.rows, self.width, 1) for t in (box_tokens.starts, box_tokens.follows))
        inside = torch.arange(self.length, device=starts.device) - starts  # index in the row; negative before it
        followed = (follows >> inside.clamp(0, self.width - 1)) & 1
        visible = ((inside < 0) | ((inside < self.width) & (followed > 0)))[:, None]
        if window is None or self.length <= window:
            return visible
        positions = box_tokens.positions.view(self.rows, self.width)
        return within(window, visible, positions, starts[:, 0, 0])


class Captured:
    """A function of static `inputs`, captured as a CUDA graph when it first runs."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self.inputs = tuple(inputs)
        self._function = function  # keeps the tensors alive that every replay reads
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def run(self, memory: "Memory | None") -> tuple[Tensor, ...]:
        """Outputs, valid until another graph of the same memory runs; without memory, runs kernel by kernel."""
        if memory is None:
            return self._function(*self.inputs)
        if self._graph is None:
            self._graph = self._capture(memory)
        self._graph.replay()
        return self._outputs

    def _capture(self, memory: "Memory") -> torch.cuda.CUDAGraph:
        # 1. A warm-up run initialises libraries, their workspaces and the allocator on the stream of the capture.
        with torch.cuda.device(memory.stream.device):
            memory.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(memory.stream):
                self._function(*self.inputs)
            torch.cuda.synchronize()
            # 2. The capture; other threads may use the device meanwhile.
            graph = torch.cuda.CUDAGraph()
            options: Any = {"pool": memory.pool, "stream": memory.stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **options):
                self._outputs = self._function(*self.inputs)
        return graph


class Memory(NamedTuple):
    """Memory pool and stream that the graphs of an engine share; they run one at a time."""

    pool: Any
    stream: torch.cuda.Stream


class Graphs:
    """The CUDA graphs of an engine's caches, captured when a box first occurs.

    Without `capture` passes are padded to boxes but run kernel by kernel, on any device.
    """

    def __init__(self, device: torch.device, *, capture: bool = True) -> None:
        self._memory = Memory(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)) if capture else None
        self._captured: dict[Hashable, Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    @torch.inference_mode()
    def run_box(
        self,
        key: Hashable,
        function: Callable[[Tensor, BoxTokens], tuple[Tensor, ...]],
        hidden: Tensor,
        box: Box,
        box_tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        """Outputs [N, ...] for tokens [N, hidden] of `function`, which runs on the padded box [R * W, hidden]."""
        num = len(hidden)
        # 1. The function and its static inputs, made when the box first occurs.
        captured = self._captured.get(key)
        if captured is None:
            boxed = hidden.new_zeros(box.rows * box.width, hidden.shape[1])
            numbers = torch.zeros(box_tokens.shape, dtype=torch.int64, device=hidden.device)
            captured = Captured(lambda states, rows: function(states, BoxTokens(*rows[:5])), (boxed, numbers))
            self._captured[key] = captured
        # 2. Inputs of this pass: tokens move to their indices in the box, and padding repeats first tokens.
        boxed, numbers = captured.inputs
        numbers.copy_(sent(box_tokens, numbers.device))
        indices = numbers[5, :num]
        torch.index_select(hidden, 0, numbers[6], out=boxed)
        # 3. Copies of the outputs: the next run of the graph overwrites them.
        outputs = list[Tensor]()
        for output in captured.run(self._memory):
            outputs.append(output.index_select(0, indices) if output.numel() else output[:num])
        return tuple(outputs)

    @torch.inference_mode()
    def run_tokens(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[tuple[Tensor, int]]
    ) -> tuple[Tensor, ...] | None:
        """Outputs [N, ...] of a function of [N, ...] tensors, each with its padding value; None if N is too large."""
        num = len(inputs[0][0])
        size = _power_of_two(num)
        if size > MOST_TOKENS:
            return None
        captured = self._captured.get((key, size))
        if captured is None:
            static_inputs = [values.new_full((size, *values.shape[1:]), fill) for values, fill in inputs]
            captured = self._captured[key, size] = Captured(function, static_inputs)
        for static, (values, fill) in zip(captured.inputs, inputs, strict=True):
            static[:num] = values
            static[num:] = fill
        return tuple(output[:num].clone() for output in captured.run(self._memory))


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << math.ceil(math.log2(number))
