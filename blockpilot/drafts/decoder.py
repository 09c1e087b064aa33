"""The prepared form of a DFlash draft: the target's fast layers (models/decoder.py) with the draft's attention.

It computes what `DraftModel.propose` and `extend` compute, from the same weights.
"""

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from blockpilot.drafts.dflash import DraftLayer, DraftModel
from blockpilot.models.cache import SlotCache, SlotView, head_dim
from blockpilot.models.decoder import DecoderLayer
from blockpilot.models.kernels import prepared
from blockpilot.models.native import operations_for
from blockpilot.models.operations import Mask, Rotary
from blockpilot.models.packing import Packing


class DraftDecoder:
    """Layers of a draft, whose linear layers are prepared in place, once."""

    @torch.no_grad()
    def __init__(self, draft: DraftModel) -> None:
        self.draft, config = draft, draft.config
        weight = draft.norm.weight
        self._operations = operations_for(weight.dtype, weight.device, config.hidden_size, head_dim(config))
        layers = cast(Iterable[DraftLayer], draft.layers)
        self._layers = [DecoderLayer(layer, i, config, self._operations) for i, layer in enumerate(layers)]
        self._fc = prepared(draft, "fc")
        self._groups = config.num_attention_heads // (config.num_key_value_heads or config.num_attention_heads)

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
        norm = self.draft.hidden_norm
        found = self._fc(features.to(self.draft.dtype))
        contexts = self._operations.add_norm(found, None, norm.weight, norm.variance_epsilon)
        rotary = Rotary.of(self.draft.rotary_emb, contexts, positions)
        view = cache.view(slots, positions, slice(0, 0), 0)
        for layer in self._layers:
            layer.project(contexts, rotary, view)
        return contexts

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        """Hidden states [N, hidden] of packed blocks [N, hidden], on top of the cached context."""
        columns = torch.arange(cache.length, device=embedded.device)
        queries = packing.pad(packing.positions)
        ends = queries[:, 0] + torch.tensor(packing.sizes, device=embedded.device)
        masks = self.draft.layer_masks(columns < ends[:, None, None], queries[:, :, None] - columns)
        kinds = {id(mask): Mask(packing, mask, self._groups, self.draft.dtype) for mask in masks}
        rotary = Rotary.of(self.draft.rotary_emb, embedded, packing.positions)
        hidden, delta = embedded.to(self.draft.dtype, copy=True), None
        for layer, mask in zip(self._layers, masks, strict=True):
            attention = partial(self._operations.attend, mask=kinds[id(mask)])
            delta = layer(hidden, delta, rotary, cache, attention)
        norm = self.draft.norm
        return self._operations.add_norm(hidden, delta, norm.weight, norm.variance_epsilon)
