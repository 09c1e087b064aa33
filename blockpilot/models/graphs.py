"""CUDA graphs of passes over a SlotCache: a pass of few tokens is hundreds of small kernels, launched by one call.

A graph has fixed shapes, so rows are laid out in a box of a grid: rows and tokens of a row rounded up to powers of
two, the columns that are read to a few lengths. Row r of a box is slot r. The places of a box that no token takes
(padding) compute with finite numbers, which nothing reads, and store them in their slot's last column, which no box
reads: whoever fills a cache by graphs leaves that column free. Wider passes, prompts, run kernel by kernel.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from blockpilot.device import sent
from blockpilot.models.packing import Packing

MOST_WIDTH, MOST_TOKENS = 32, 512  # of a box
LEAST_LENGTH = 256  # columns
ALIGNMENT = 8  # columns of a mask: attention kernels copy others


class BoxPlaces(NamedTuple):
    """Numbers of a box's R * W places, int64 each: constants of its pass's kernels."""

    columns: Tensor
    positions: Tensor
    follows: Tensor
    """Bit i is set where token i of the row is seen: its ancestors and itself."""
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
        """The smallest box of the grid for rows in `slots`; None where they are too wide for one."""
        rows, width = min(_power_of_two(max(slots) + 1), num_slots), _power_of_two(packing.width)
        most = num_columns - 1
        if width > MOST_WIDTH or rows * width > MOST_TOKENS or packing.length > most:
            return None
        # A few lengths to each power of two: fewer would read more than needed, more would be more graphs.
        step = max(LEAST_LENGTH, _power_of_two(packing.length) // 4)
        lengths = -(-packing.length // step) * step, most // ALIGNMENT * ALIGNMENT, most
        return cls(rows, width, next(n for n in lengths if packing.length <= n <= most))

    def packing(self, device: torch.device) -> Packing:
        """As if every place held a token."""
        return Packing([self.width] * self.rows, [self.length - self.width] * self.rows, device)

    def places(self, packing: Packing, slots: Sequence[int], num_columns: int) -> Tensor:
        """`BoxPlaces` [5, R * W] on the host, and in a sixth row the place of every token [N] of the packing."""
        # Rows that no text has, and places beyond a row's end, are padding.
        index, (sizes, starts) = np.array(slots), np.zeros((2, self.rows, 1), dtype=np.int64)
        sizes[index, 0], starts[index, 0] = packing.sizes, packing.starts
        offsets = np.arange(self.width)
        # Of a chain a token's depth is its offset, and it sees all before it: bits 0 .. offset.
        depths, follows = np.tile(offsets, (self.rows, 1)), np.tile((2 << offsets) - 1, (self.rows, 1))
        for slot, of_row, parents in zip(slots, packing.depths, packing.parents or (), strict=False):
            depths[slot, : len(of_row)] = of_row
            follows[slot, : len(of_row)] = _followed_bits(parents)
        is_token, found = offsets < sizes, np.zeros((6, self.rows, self.width), dtype=np.int64)
        # Padding is stored in the last column, and sees the first token only: a finite number.
        found[0] = np.where(is_token, starts + offsets, num_columns - 1)
        found[1] = np.where(is_token, starts + depths, starts)
        found[2] = np.where(is_token, follows, 1)
        found[3], found[4] = starts, starts + sizes.clip(min=1)
        rows, offsets = packing.on_host[:2]
        found[5].reshape(-1)[: packing.num_tokens] = index[rows] * self.width + offsets
        return torch.from_numpy(found.reshape(6, -1))

    def slots(self, device: torch.device) -> Tensor:
        """The slot of every place, [R * W]."""
        return torch.arange(self.rows, device=device)[:, None].expand(-1, self.width).flatten()

    def visible(self, places: BoxPlaces) -> Tensor:
        """Mask [R, 1, W, length] of the columns before a row, and of what its tokens follow."""
        starts, follows = (each.view(self.rows, self.width, 1) for each in (places.starts, places.follows))
        inside = torch.arange(self.length, device=starts.device) - starts
        followed = (follows >> inside.clamp(0, self.width - 1)) & 1
        return ((inside < 0) | ((inside < self.width) & (followed > 0)))[:, None]


class Captured:
    """A function of static `inputs`, captured when it first runs."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> None:
        self.inputs = tuple(inputs)
        self._function = function  # kept: what it refers to is read by every replay
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def run(self, memory: "Memory | None") -> tuple[Tensor, ...]:
        """Outputs, which hold until a graph of the same memory runs; with no memory each time kernel by kernel."""
        if memory is None:
            return self._function(*self.inputs)
        if self._graph is None:
            self._graph = self._capture(memory)
        self._graph.replay()
        return self._outputs

    def _capture(self, memory: "Memory") -> torch.cuda.CUDAGraph:
        # 1. Libraries, their workspaces and the allocator get ready on the stream of the capture.
        with torch.cuda.device(memory.stream.device):
            memory.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(memory.stream):
                self._function(*self.inputs)
            torch.cuda.synchronize()
            # 2. Other threads may use the device meanwhile.
            graph = torch.cuda.CUDAGraph()
            options: Any = {"pool": memory.pool, "stream": memory.stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **options):
                self._outputs = self._function(*self.inputs)
        return graph


class Memory(NamedTuple):
    """Memory pool and stream that the graphs of an engine share, since they run one at a time."""

    pool: Any
    stream: torch.cuda.Stream


class Graphs:
    """The graphs of an engine's caches, captured as boxes are first met.

    Without `capture` everything is laid out in boxes but run kernel by kernel, on any device.
    """

    def __init__(self, device: torch.device, *, capture: bool = True) -> None:
        self._memory = Memory(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)) if capture else None
        self._captured: dict[Hashable, Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    @torch.inference_mode()
    def of_box(
        self,
        key: Hashable,
        function: Callable[[Tensor, BoxPlaces], tuple[Tensor, ...]],
        hidden: Tensor,
        box: Box,
        places: Tensor,
    ) -> tuple[Tensor, ...]:
        """Outputs [N, ...] of a function of a box's hidden states [R * W, hidden], given those of its tokens [N]."""
        num = len(hidden)
        captured = self._captured.get(key)
        if captured is None:
            boxed = hidden.new_zeros(box.rows * box.width, hidden.shape[1])
            numbers = torch.zeros(places.shape, dtype=torch.int64, device=hidden.device)
            captured = Captured(lambda states, rows: function(states, BoxPlaces(*rows[:5])), (boxed, numbers))
            self._captured[key] = captured
        boxed, numbers = captured.inputs
        numbers.copy_(sent(places, numbers.device))
        own = numbers[5, :num]
        boxed.index_copy_(0, own, hidden)
        # Copies: the graph's outputs are written anew by its next run.
        outputs = list[Tensor]()
        for found in captured.run(self._memory):
            outputs.append(found.index_select(0, own) if found.numel() else found[:num])
        return tuple(outputs)

    @torch.inference_mode()
    def of_tokens(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[tuple[Tensor, int]]
    ) -> tuple[Tensor, ...] | None:
        """Outputs [N, ...] of a function of [N, ...] tensors, each with what pads it; None where N is too large."""
        num = len(inputs[0][0])
        size = _power_of_two(num)
        if size > MOST_TOKENS:
            return None
        captured = self._captured.get((key, size))
        if captured is None:
            static = [given.new_full((size, *given.shape[1:]), fill) for given, fill in inputs]
            captured = self._captured[key, size] = Captured(function, static)
        for kept, (given, fill) in zip(captured.inputs, inputs, strict=True):
            kept[:num] = given
            kept[num:] = fill
        return tuple(found[:num].clone() for found in captured.run(self._memory))


def _power_of_two(number: int) -> int:
    """The least that is not below."""
    return 1 << math.ceil(math.log2(number))


def _followed_bits(parents: Sequence[int]) -> list[int]:
    """Bits of itself and its ancestors, for every token of a row."""
    bits = [1]
    for child, parent in enumerate(parents, 1):
        bits.append(bits[parent] | 1 << child)
    return bits
