"""The prepared form of a DFlash draft: the target's fast layers (models/native_layers.py) with the draft's attention.

It computes what `DraftModel.propose` and `extend` compute, from the same weights.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.drafts.dflash import DraftModel
from blockpilot.models.cache import SlotCache, SlotView, num_kv_heads
from blockpilot.models.graphs import Box, BoxPlaces
from blockpilot.models.kernels import prepared
from blockpilot.models.layers import Mask, Rotary, RotaryTable
from blockpilot.models.native_layers import layers_of
from blockpilot.models.packing import Packing


class DraftDecoder:
    """Layers of a draft, whose linear layers are prepared in place, once."""

    @torch.no_grad()
    def __init__(self, draft: DraftModel) -> None:
        self.draft, config = draft, draft.config
        self._layers = layers_of(draft.layers, draft.norm.weight, config)
        self._fc = prepared(draft, "fc")
        self._rotary = RotaryTable(draft.rotary_emb)
        self._groups = config.num_attention_heads // num_kv_heads(config)

    @property
    def mask_token_id(self) -> int:
        return self.draft.options.mask_token_id

    def new_cache(self, num_slots: int, length: int) -> SlotCache:
        """An empty cache of projected context: `num_slots` rows of `length` columns."""
        return self.draft.new_cache(num_slots, length)

    def extend(self, features: Tensor, slots: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Cache the target's features [N, F] of final tokens in slots [N] at positions [N].

        Returns their context vectors [N, hidden].
        """
        features, num_columns = features.to(self.draft.dtype), cache.num_columns
        if cache.graphs is not None and not self._rotary.depends_on_longest:
            in_graph = partial(self._extend, self._rotary.table(num_columns, features).at, cache.bare())
            inputs = (features, 0), (slots, 0), (positions, num_columns - 1)
            found = cache.graphs.of_tokens("extend", in_graph, inputs)
            if found is not None:
                return found[0]
        rotate = partial(self._rotary.at, num_columns=num_columns, hidden=features)
        return self._extend(rotate, cache, features, slots, positions)[0]

    def _extend(
        self,
        rotate: Callable[[Tensor], Rotary],
        cache: SlotCache,
        features: Tensor,
        slots: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor]:
        norm, found = self.draft.hidden_norm, self._fc(features)
        contexts = functional.rms_norm(found, found.shape[-1:], norm.weight, norm.variance_epsilon)
        view = cache.view(slots, positions, slice(0, 0), 0)
        self._layers.project(contexts, rotate(positions), view)
        return (contexts,)

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        """Hidden states [N, hidden] of packed blocks [N, hidden], on top of the cached context."""
        hidden = embedded.to(self.draft.dtype, copy=True)
        if not self._rotary.depends_on_longest:
            in_box = partial(self._in_box, self._rotary.table(cache.num_columns, hidden))
            by_graph = cache.by_graph(in_box, "propose", hidden, packing)
            if by_graph is not None:
                return by_graph[0]
        queries = packing.pad(packing.positions)
        ends = queries[:, 0] + packing.spans[0]
        masks = self._masks(packing, queries, ends, cache.length)
        rotary = self._rotary.at(packing.positions, cache.num_columns, hidden)
        found, _ = self._layers(hidden, rotary, cache, masks, ())
        return found

    def _in_box(
        self, table: Rotary, hidden: Tensor, box: Box, places: BoxPlaces, packing: Packing, cache: SlotView
    ) -> tuple[Tensor]:
        queries, ends = (each.view(box.rows, box.width) for each in (places.positions, places.ends))
        masks = self._masks(packing, queries, ends[:, 0], box.length)
        found, _ = self._layers(hidden, table.at(places.positions), cache, masks, ())
        return (found,)

    def _masks(self, packing: Packing, queries: Tensor, ends: Tensor, length: int) -> list[list[Mask]]:
        """Every layer's, for queries at positions [R, W] of blocks that end before columns [R]."""
        columns = torch.arange(length, device=queries.device)
        masks = self.draft.layer_masks(columns < ends[:, None, None], queries[:, :, None] - columns)
        of_kind = {id(mask): [Mask(packing, mask, self._groups, self.draft.dtype)] for mask in masks}
        return [of_kind[id(mask)] for mask in masks]
