"""Attention of drafted chains side by side, each behind its own place of a text (arXiv 2503.01840, section 3.2)."""

import torch
from torch import Tensor


class UnrolledAttention:
    """Attention of chains that a text's own tokens lead: a call is the next drafted step of every chain.

    A chain sees the text's keys as far as they are `visible` to it, and of the drafted steps only its own: one score
    each, so that no mask over the keys of all steps is needed.

    known: keys and values [N, kv_heads, S, head_dim] of texts, and visible [N, A, S] of A chains each. By default the
    first call gives them, the text's own step in training-time test: each of its S positions starts a chain, which
    sees the text up to itself.
    """

    def __init__(self, known: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        self._known = known
        self._own: list[tuple[Tensor, Tensor]] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rotated queries [N, heads, A, head_dim], keys and values [N, kv_heads, A, head_dim] -> as the queries."""
        if self._known is None:
            length = keys.shape[2]
            self._known = keys, values, torch.ones(1, length, length, dtype=torch.bool, device=keys.device).tril_()
        else:
            self._own.append((keys, values))
        known_keys, known_values, visible = self._known
        num_kv, length, size = known_keys.shape[1:]
        shape = (num_kv, queries.shape[1] // num_kv)
        rows = queries.unflatten(1, shape) * size**-0.5  # [N, kv_heads, groups, A, head_dim]
        scores = (rows.flatten(2, 3) @ known_keys.transpose(2, 3)).unflatten(2, (shape[1], -1))
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        own = [(rows * own_keys[:, :, None]).sum(dim=-1, keepdim=True) for own_keys, _ in self._own]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        seen: Tensor = (weights[..., :length].flatten(2, 3) @ known_values).unflatten(2, (shape[1], -1))
        for i, (_, own_values) in enumerate(self._own, start=length):
            seen = seen + weights[..., i : i + 1] * own_values[:, :, None]
        return seen.flatten(1, 2)
