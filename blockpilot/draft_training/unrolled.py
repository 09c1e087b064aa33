"""Attention of training-time test (arXiv 2503.01840, section 3.2): all drafted chains of a text side by side."""

import torch
from torch import Tensor


class UnrolledAttention:
    """Attention of training-time test: S chains side by side, the one at t behind the features up to t.

    The first call is the features' own step; each later one is the next drafted step of every chain. A chain sees the
    first step's keys up to its own t, and of the later steps only its own: one score each, so that no mask over the
    keys of all steps is needed.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._steps.append((keys, values))
        (first_keys, first_values), *later = self._steps
        num_kv, length, size = keys.shape[1:]
        shape = (num_kv, queries.shape[1] // num_kv)
        rows = queries.unflatten(1, shape) * size**-0.5  # [N, kv_heads, groups, S, head_dim]
        scores = (rows.flatten(2, 3) @ first_keys.transpose(2, 3)).unflatten(2, (-1, length))
        future = torch.ones(length, length, dtype=torch.bool, device=keys.device).triu_(1)
        scores = scores.masked_fill(future, float("-inf"))
        own = [(rows * own_keys[:, :, None]).sum(dim=-1, keepdim=True) for own_keys, _ in later]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        seen: Tensor = (weights[..., :length].flatten(2, 3) @ first_values).unflatten(2, (-1, length))
        for i, (_, own_values) in enumerate(later, start=length):
            seen = seen + weights[..., i : i + 1] * own_values[:, :, None]
        return seen.flatten(1, 2)
