"""Gated DeltaNet (arXiv 2412.06464) over the chains and trees of a pass, as in Qwen3.5: one recurrent state per row.

A token's queries, keys and values pass a short causal convolution. Every head then decays its matrix S [key_dim,
value_dim], moves its value for the key k towards the token's value v, and reads it with the query q:

    S = exp(g) S;  S = S + k (beta (v - k S));  output = q S

A token of a tree starts from its parent's matrix, and its convolution reads its ancestors. Prompts are also computed
token by token: the chunked rule of transformers rounds differently, and a text would depend on the chunks of its
prefill. Here torch computes the tokens of one depth together, for all rows; native_hybrid.py is the version in C.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.models.kernels import prepared
from blockpilot.models.packing import Packing
from blockpilot.models.states import StateShape

EPS = 1e-6  # of the norms of queries and keys


class DeltaNetWeights:
    """Weights of a Qwen3_5GatedDeltaNet; its linear layers are prepared in place."""

    def __init__(self, module: Any, shape: StateShape) -> None:
        self.shape = shape
        names = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
        self.project = prepared(module, *names)
        """Inputs of the convolution [channels], gates of the output, and inputs of beta and of the decay by head."""
        self.out = prepared(module, "out_proj")
        self.taps = module.conv1d.weight.detach()[:, 0].T.contiguous()
        """Weights of the convolution [kernel, channels]."""
        self.rates = module.A_log.detach().float().exp()
        """[value_heads], like time_bias."""
        self.time_bias = module.dt_bias.detach().float().clone()
        self.norm = module.norm.weight.detach().float().clone()
        """[value_dim]"""


class StateLevel(NamedTuple):
    """Tokens of one depth in a pass."""

    tokens: Tensor
    """[n]"""
    parents: Tensor
    """[n]: indices of their parents in the level before; at depth 0, indices of their rows."""
    final: Tensor | None
    """[2, m]: indices of the tokens whose states are stored in slots, and their rows; None if there are none."""


class StatePass:
    """Order of a pass's tokens [N] for recurrent layers, by the parts of its packing and the slots of its rows [R].

    A token's sources [kernel] in the convolution are its ancestors and itself, oldest first: indices into the rows'
    windows (the first R * (kernel - 1)) followed by the pass's tokens.
    """

    def __init__(self, parts: Sequence[Packing], slots: Tensor, kernel: int) -> None:
        sizes, starts = list[int](), list[int]()
        for part in parts:
            sizes += part.sizes
            starts += part.starts
        self.slots, self.kernel, self.sizes = slots, kernel, np.array(sizes)
        self.firsts = np.cumsum([0, *sizes[:-1]])
        self.is_text = np.concatenate([np.arange(len(part.sizes)) >= part.num_blocks for part in parts])
        """[R]: True for a text, whose tokens are all accepted; False for a block."""
        self.is_chain = np.ones(len(sizes), dtype=bool)
        self.new_rows = [row for row, start in enumerate(starts) if start == 0]
        """Rows whose texts begin in this pass."""
        # 1. All rows as chains: a token's parent is the one before it, its depth is its offset.
        rows = np.repeat(np.arange(len(sizes)), self.sizes)
        offsets = np.arange(len(rows)) - self.firsts[rows]
        self.parents, self.depths = offsets - 1, offsets.copy()
        """[N], both relative to the row; the parent of its first token is -1."""
        # 2. Their sources: the tokens before, and, before the row's first token, the inputs in its window.
        before = np.arange(1 - kernel, 1)
        kept, in_row = len(sizes) * (kernel - 1), offsets[:, None] + before
        in_window = rows[:, None] * (kernel - 1) + kernel - 1 + in_row
        self.sources = np.where(in_row < 0, in_window, kept + np.arange(len(rows))[:, None] + before)
        # 3. Rows whose tokens form trees.
        first_row = 0
        for part in parts:
            for row, parents in enumerate(part.parents or (), first_row):
                if list(parents) != list(range(len(parents))):
                    self._set_tree(row, parents)
            first_row += len(part.sizes)

    def _set_tree(self, row: int, parents: Sequence[int]) -> None:
        first, kept = self.firsts[row], len(self.sizes) * (self.kernel - 1)
        self.is_chain[row] = False
        # Parents come before their children, so their depths and sources are known.
        for node, parent in enumerate(parents, 1):
            self.parents[first + node], self.depths[first + node] = parent, self.depths[first + parent] + 1
            self.sources[first + node] = [*self.sources[first + parent, 1:], kept + first + node]

    @property
    def num_block_tokens(self) -> int:
        """Number of tokens of the blocks, which come first."""
        return int(self.sizes[~self.is_text].sum())

    @property
    def most_nodes(self) -> int:
        """Number of tokens of the largest tree; 1 if all rows are chains."""
        return int(self.sizes[~self.is_chain].max(initial=1))

    @cached_property
    def levels(self) -> list[StateLevel]:
        """Tokens grouped by depth, ascending, on the device of the slots."""
        # 1. Tokens ordered by depth, and the index of each among the tokens of its depth.
        order = np.argsort(self.depths, kind="stable")
        ends = np.cumsum(np.bincount(self.depths))
        index = np.empty_like(order)  # of every token in its level
        index[order] = np.arange(len(order)) - np.concatenate([[0], ends])[self.depths[order]]
        # 2. The states that tokens start from: of their parents in the level before, or of their rows.
        rows = np.repeat(np.arange(len(self.sizes)), self.sizes)
        parent_index = np.where(self.parents < 0, rows, index[self.firsts[rows] + np.maximum(self.parents, 0)])
        # 3. Tokens whose states are stored in their slots: the last one of a text, the anchor of a block.
        final = dict[int, list[tuple[int, int]]]()
        for row, last in enumerate(self.firsts + np.where(self.is_text, self.sizes - 1, 0)):
            final.setdefault(int(self.depths[last]), []).append((int(index[last]), row))
        levels, device, sizes = list[StateLevel](), self.slots.device, np.diff(ends, prepend=0).tolist()
        by_level = (torch.from_numpy(x).to(device).split(sizes) for x in (order, parent_index[order]))
        for depth, (tokens, parents) in enumerate(zip(*by_level, strict=True)):
            finals = torch.tensor(final[depth], device=device).T if depth in final else None
            levels.append(StateLevel(tokens, parents, finals))
        return levels


class Mixed(NamedTuple):
    """Inputs of the recurrence for tokens [N], in float32; queries and keys are repeated for every value head."""

    queries: Tensor
    """[N, value_heads, key_dim], like keys."""
    keys: Tensor
    values: Tensor
    """[N, value_heads, value_dim]"""
    decays: Tensor
    """[N, value_heads]: exp(g). betas have the same shape."""
    betas: Tensor

    def at(self, tokens: Tensor) -> "Mixed":
        return Mixed(*(x[tokens] for x in self))


def mixed(net: DeltaNetWeights, projected: Tensor, windows: Tensor, order: StatePass) -> Mixed:
    """Inputs of the recurrence, from projected tokens [N, ...] and windows [R, kernel - 1, channels] of the rows."""
    shape = net.shape
    # 1. The convolution: each tap reads one source of every token, from a row's window or from the pass.
    inputs, _, betas, times = projected.split(net.project.sizes, dim=-1)
    sources = torch.from_numpy(order.sources).to(projected.device)
    known = torch.cat([windows.flatten(0, 1), inputs])
    total = sum(known[sources[:, tap]].float() * net.taps[tap].float() for tap in range(shape.kernel))
    assert isinstance(total, Tensor)
    convolved = functional.silu(total.to(inputs.dtype))
    # 2. L2-normalized queries and keys, repeated for the value heads that share them.
    keys = shape.key_heads * shape.key_dim
    parts = convolved.float().split([keys, keys, shape.value_heads * shape.value_dim], dim=-1)
    queries, keys_of, values = (x.unflatten(1, (-1, dim)) for x, dim in zip(parts, _dims(shape), strict=True))
    heads = [_unit(x).repeat_interleave(shape.value_heads // shape.key_heads, dim=1) for x in (queries, keys_of)]
    # 3. Decays are at most 1: the rates are positive, and so is a softplus.
    decays = torch.exp(-net.rates * functional.softplus(times.float() + net.time_bias))
    return Mixed(heads[0] * shape.key_dim**-0.5, heads[1], values, decays, betas.sigmoid().float())


def _dims(shape: StateShape) -> tuple[int, int, int]:
    return shape.key_dim, shape.key_dim, shape.value_dim


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)


def advanced(states: Tensor, tokens: Mixed) -> Tensor:
    """States [n, value_heads, key_dim, value_dim] after one token each."""
    states = states * tokens.decays[..., None, None]
    # Delta rule: the value stored for the key moves towards the token's value.
    read = (states * tokens.keys[..., None]).sum(dim=-2)
    change = (tokens.values - read) * tokens.betas[..., None]
    return states + tokens.keys[..., None] * change[..., None, :]


def scan(tokens: Mixed, order: StatePass, matrices: Tensor) -> Tensor:
    """Outputs [N, value_heads, value_dim] of tokens. Advances the slots' matrices by texts and anchors, in place."""
    states, out = matrices[order.slots], torch.empty_like(tokens.values)
    for level in order.levels:
        level_tokens = tokens.at(level.tokens)
        # Children of one parent each get a copy of its state.
        states = advanced(states[level.parents], level_tokens)
        out[level.tokens] = (states * level_tokens.queries[..., None]).sum(dim=-2)
        if level.final is not None:
            index, rows = level.final
            matrices[order.slots[rows]] = states[index]
    return out


def gated_norm(net: DeltaNetWeights, out: Tensor, projected: Tensor, eps: float) -> Tensor:
    """RMSNorm per head of outputs [N, value_heads, value_dim], times SiLU of their gates: [N, out]."""
    gates, dtype = projected.split(net.project.sizes, dim=-1)[1], projected.dtype
    # Rounded to the dtype where transformers rounds.
    x = out.to(dtype).float()
    x = (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)).to(dtype).float()
    gated: Tensor = (x * net.norm).to(dtype) * functional.silu(gates.float()).view_as(x)
    return gated.to(dtype).flatten(1)


def appended(window: Tensor, inputs: Tensor) -> Tensor:
    """Window [kernel - 1, channels] after appending the inputs [n, channels] of accepted tokens."""
    return torch.cat([window, inputs])[len(inputs) :]


class KeptBlocks(NamedTuple):
    """Inputs of a layer for the blocks of a pass, stored until the accepted tokens are known."""

    inputs: Tensor
    """[N, channels], of the convolution."""
    tokens: Mixed


def run(
    net: DeltaNetWeights, projected: Tensor, order: StatePass, windows: Tensor, matrices: Tensor
) -> tuple[Tensor, KeptBlocks]:
    """One layer in torch: outputs [N, value_heads, value_dim] of projected tokens, and its blocks for `accept`.

    Advances windows [slots, kernel - 1, channels] and matrices by texts and anchors, in place.
    """
    inputs = projected[:, : net.shape.channels]
    tokens = mixed(net, projected, windows[order.slots], order)
    out = scan(tokens, order, matrices)
    for row, slot in enumerate(order.slots.tolist()):
        first, num = order.firsts[row], order.sizes[row] if order.is_text[row] else 1
        windows[slot] = appended(windows[slot], inputs[first : first + num])
    num = order.num_block_tokens
    return out, KeptBlocks(inputs[:num], Mixed(*(x[:num] for x in tokens)))


def accept(
    blocks: KeptBlocks, order: StatePass, paths: Sequence[Sequence[int]], windows: Tensor, matrices: Tensor
) -> None:
    """Advance one layer's states, in torch, by the accepted paths [R] without their anchors."""
    accepted = [(row, [order.firsts[row] + node for node in path[1:]]) for row, path in enumerate(paths)]
    # 1. Matrices, by the arithmetic of `scan`, one depth of all rows at a time.
    for depth in range(max((len(path) for path in paths), default=1) - 1):
        deep = [(row, tokens[depth]) for row, tokens in accepted if len(tokens) > depth]
        rows, tokens = torch.tensor(deep, device=matrices.device).T
        slots = order.slots[rows]
        matrices[slots] = advanced(matrices[slots], blocks.tokens.at(tokens))
    # 2. Windows: the last inputs of each row.
    for row, tokens in accepted:
        if tokens:
            slot = order.slots[row]
            windows[slot] = appended(windows[slot], blocks.inputs[torch.tensor(tokens, device=windows.device)])
