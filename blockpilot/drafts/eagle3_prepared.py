"""Prepared EAGLE-3 draft: its layer over packed rows, its cache, and its chains and trees, drafted token by token.

The cache entry of an accepted token at position t is computed from the target's feature there and the embedding of
the next token; its output hidden state scores the token at t + 2. The entries of drafted tokens are in the columns
after those of accepted ones, in the order of the passes. Only later passes of the same proposal attend to them; then
they are overwritten.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from blockpilot.device import tensor_on
from blockpilot.drafts.base import Choose, DraftRequest, PreparedDraft
from blockpilot.drafts.choices import ConditionalCandidates, draft_probs
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.head import DraftHead, is_copy
from blockpilot.models.cache import SlotCache, SlotView, num_kv_heads, read_slots
from blockpilot.models.kernels import prepared
from blockpilot.models.layers import Mask
from blockpilot.models.native_layers import layers_of
from blockpilot.models.packing import Packing
from blockpilot.models.rotary import RotaryTable
from blockpilot.native.products import Padding
from blockpilot.types import MAX_BLOCK_SIZE, Candidates

MOST_CONTEXTS = 8  # per drafted position: no more prefixes are followed


class Eagle3Cache(SlotCache):
    """Keys and values of entries, with room for drafted ones; each slot's last hidden state."""

    def __init__(
        self,
        config: Any,
        num_slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        halves: Sequence[Padding],
    ) -> None:
        super().__init__(config, num_slots, length + MOST_CONTEXTS * MAX_BLOCK_SIZE, dtype, device, halves=halves)
        self.hidden = torch.zeros(num_slots, config.hidden_size, dtype=dtype, device=device)
        """[num_slots, hidden]"""

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.hidden.nbytes

    def move(self, source: int, destination: int, length: int) -> None:
        super().move(source, destination, length)
        self.hidden[destination] = self.hidden[source]


class Level(NamedTuple):
    """Drafted positions at one depth: choices [R * P, k] after each of P contexts of some rows [R]."""

    rows: list[int]
    candidates: Candidates


class PreparedEagle3(PreparedDraft):
    """An EAGLE-3 draft prepared for a target: proposes position by position, in one pass for each but the first."""

    @torch.no_grad()
    def __init__(self, draft: Eagle3Model, target: PreTrainedModel) -> None:
        self._draft, config = draft, draft.config
        self._layers = layers_of([draft.midlayer], draft.norm.weight, config)
        self._rotary, self._eps = RotaryTable(draft.rotary_emb), config.rms_norm_eps
        layer = draft.midlayer
        self._before = torch.stack([layer.input_layernorm.weight, layer.hidden_norm.weight])
        self._groups = config.num_attention_heads // num_kv_heads(config)
        if is_copy(draft.embed_tokens, target.get_input_embeddings()):
            draft.embed_tokens = None
        self._embed = draft.embed_tokens or target.get_input_embeddings()
        self._fc, self._head, tokens = prepared(draft, "fc"), prepared(draft, "lm_head"), draft.vocabulary
        self.head = DraftHead(self._scores, tokens, config.vocab_size)

    def new_cache(self, num_slots: int, length: int) -> Eagle3Cache:
        config, dtype, device = self._draft.config, self._draft.dtype, self._draft.norm.weight.device
        return Eagle3Cache(config, num_slots, length, dtype, device, self._layers.halves)

    def update_cache(
        self, features: Tensor, following: Sequence[int], slots: Sequence[int], packing: Packing, cache: SlotCache
    ) -> Tensor:
        assert isinstance(cache, Eagle3Cache)
        device = features.device
        tokens, index = tensor_on(device, following).clamp(min=0), tensor_on(device, slots)
        view = cache.view(index[packing.rows], packing.columns, read_slots(slots), packing.length)
        masks = [Mask(part, part.visible, self._groups, self._draft.dtype) for part in packing.parts]
        fused = self._fc(features.to(self._draft.dtype))
        hidden = self._entries(tokens, fused, packing.positions, view, masks)
        ends = accumulate(packing.sizes)
        cache.hidden[index] = hidden[tensor_on(device, [end - 1 for end in ends])]
        return hidden

    def propose(self, request: DraftRequest, cache: SlotCache, choose: Choose) -> Candidates | ConditionalCandidates:
        assert isinstance(cache, Eagle3Cache)
        if request.width == 1:
            return self._chains(request, cache, choose)
        device, rows = cache.device, list(range(len(request.slots)))
        width, levels = min(request.width, MOST_CONTEXTS), list[Level]()
        hidden = cache.hidden[tensor_on(device, request.slots)][:, None]  # [R, P, hidden], P = 1 at first
        links = list[Tensor]()  # [R, P, k]: next_lists of a level's choices among the contexts of the next
        above = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)  # log probabilities of the contexts
        seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=device)  # [R, P, drafted entries]: attended to
        itself = torch.eye(width, dtype=torch.bool, device=device)
        for depth in range(1, max(request.depths) + 1):
            num_contexts = hidden.shape[1]
            context_rows = [row for row in rows for _ in range(num_contexts)]
            candidates = choose(
                hidden.flatten(0, 1), context_rows, [request.starts[row] + depth for row in context_rows]
            )
            tokens, parents, above, next_lists = _followed(candidates, above, width)
            levels.append(Level(rows, candidates))
            links.append(next_lists)
            kept = [i for i, row in enumerate(rows) if request.depths[row] > depth]
            if not kept:
                break
            parent_index = parents[:, :, None]
            hidden, seen = (
                values.gather(1, parent_index.expand(-1, -1, values.shape[2])) for values in (hidden, seen)
            )
            seen = torch.cat([seen, itself.expand(len(rows), -1, -1)], dim=2)
            if len(kept) < len(rows):
                rows, index = [rows[i] for i in kept], tensor_on(device, kept)
                tokens, hidden, above, seen = (values[index] for values in (tokens, hidden, above, seen))
            slots, starts = ([values[row] for row in rows] for values in (request.slots, request.starts))
            hidden = self._follow(tokens, hidden, seen, depth - 1, slots, starts, cache)
        return _linked(levels, links, width)

    def _chains(self, request: DraftRequest, cache: Eagle3Cache, choose: Choose) -> Candidates:
        """`propose` for chains: only the first choice of a position is followed."""
        device, rows, levels = cache.device, list(range(len(request.slots))), list[Level]()
        hidden = cache.hidden[tensor_on(device, request.slots)]  # [R, hidden]
        for depth in range(1, max(request.depths) + 1):
            candidates = choose(hidden, rows, [request.starts[row] + depth for row in rows])
            levels.append(Level(rows, candidates))
            kept = [i for i, row in enumerate(rows) if request.depths[row] > depth]
            if not kept:
                break
            tokens = candidates.tokens[:, 0]
            if len(kept) < len(rows):
                rows, index = [rows[i] for i in kept], tensor_on(device, kept)
                tokens, hidden = tokens[index], hidden[index]
            slots, starts = ([values[row] for row in rows] for values in (request.slots, request.starts))
            packing = Packing([1] * len(rows), [start + depth - 1 for start in starts], device)
            view = cache.view(tensor_on(device, slots), packing.columns, read_slots(slots), packing.length)
            mask = Mask(packing, packing.visible, self._groups, self._draft.dtype)
            hidden = self._entries(tokens, hidden, packing.positions, view, [mask])
        return _in_order(levels, _by_row(levels, device))

    def _follow(
        self,
        tokens: Tensor,
        hidden: Tensor,
        seen: Tensor,
        depth: int,
        slots: Sequence[int],
        starts: Sequence[int],
        cache: Eagle3Cache,
    ) -> Tensor:
        """Hidden states [R, P, hidden] after drafted tokens [R, P], from those before them.

        seen [R, P, entries]: mask of the drafted entries that each attends to; the last P are those of `tokens`.
        starts: positions of the anchors.
        """
        num_rows, width = tokens.shape
        packing = Packing([width] * num_rows, [start + depth * width for start in starts], tokens.device)
        index = tensor_on(tokens.device, slots)
        view = cache.view(index[packing.rows], packing.columns, read_slots(slots), packing.length)
        first = tensor_on(tokens.device, starts)[:, None]
        visible = (torch.arange(packing.length, device=tokens.device) < first)[:, None].repeat(1, width, 1)
        columns = first + torch.arange(seen.shape[2], device=tokens.device)
        visible.scatter_(2, columns[:, None].expand(-1, width, -1), seen)
        mask = Mask(packing, visible[:, None], self._groups, self._draft.dtype)
        positions = (first + depth).expand(-1, width).flatten()
        return self._entries(tokens.flatten(), hidden.flatten(0, 1), positions, view, [mask]).view_as(hidden)

    def _scores(self, hidden: Tensor) -> Tensor:
        return self._head(functional.rms_norm(hidden, hidden.shape[-1:], self._draft.norm.weight, self._eps))

    def _entries(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, view: SlotView, masks: Sequence[Mask]
    ) -> Tensor:
        """Hidden states [N, hidden] of entries, whose keys and values are cached; may overwrite `hidden`."""
        embedded = self._embed(tokens).to(self._draft.dtype)
        both = torch.stack([embedded, hidden], dim=1)
        both = functional.rms_norm(both, hidden.shape[-1:], eps=self._eps).mul_(self._before)
        if self._draft.midlayer.norm_before_residual:
            hidden = both[:, 1].contiguous()
        rotary = self._rotary.table(view, embedded).at(positions)
        self._layers(hidden, [rotary], view, [masks], (), both.flatten(1))
        return hidden


def _followed(candidates: Candidates, above: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `width` most probable of the choices [R * P, k] after contexts with log probabilities `above` [R, P].

    The first choice after the first context always ranks first: the chain of first choices is followed regardless of
    its probability. Returns tokens, contexts and log probabilities of the selected choices, all [R, width], and the
    index [R, P, k] of every choice among them, -1 if it is not selected.
    """
    num_rows, num_contexts = above.shape
    chances = above[:, :, None] + draft_probs(candidates)[0].view(num_rows, num_contexts, -1).log()
    num = chances.shape[2]
    ordered = chances.flatten(1).clone()
    ordered[:, 0] = torch.inf
    chosen = ordered.topk(width, dim=1).indices
    next_lists = torch.full_like(chosen[:, :1], -1).repeat(1, num_contexts * num)
    next_lists.scatter_(1, chosen, torch.arange(width, device=chosen.device).expand(num_rows, -1))
    tokens = candidates.tokens.view(num_rows, -1).gather(1, chosen)
    return tokens, chosen // num, chances.flatten(1).gather(1, chosen), next_lists.view(num_rows, num_contexts, num)


def _by_row(levels: Sequence[Level], device: torch.device) -> Tensor:
    """Indices [N] that sort the positions of consecutive levels row by row."""
    index = [(row, depth) for depth, level in enumerate(levels) for row in level.rows]
    return tensor_on(device, sorted(range(len(index)), key=index.__getitem__))


def _in_order(levels: Sequence[Level], order: Tensor) -> Candidates:
    parts = zip(*(level.candidates for level in levels), strict=True)
    return Candidates(*(torch.cat(values)[order] for values in parts))


def _linked(levels: Sequence[Level], links: Sequence[Tensor], width: int) -> ConditionalCandidates:
    """Choices of all positions after each of `width` contexts; the only context of the first level is repeated."""

    def spread(values: Tensor, num_rows: int) -> Tensor:
        """[R * P, ...] -> [R, width, ...]"""
        by_row: Tensor = values.unflatten(0, (num_rows, -1))
        return by_row.expand(-1, width, *values.shape[1:])

    apart = (Candidates(*(spread(values, len(level.rows)) for values in level.candidates)) for level in levels)
    order = _by_row(levels, links[0].device)
    candidates = _in_order([Level(level.rows, choices) for level, choices in zip(levels, apart, strict=True)], order)
    first, *rest = links
    next_lists = torch.cat([first.expand(-1, width, -1), *rest])[order]
    return ConditionalCandidates(Candidates(*(values.flatten(0, 1) for values in candidates)), next_lists)
