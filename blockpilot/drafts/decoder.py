"""The prepared form of a DFlash draft: the target's fast layers (models/native_layers.py) with the draft's attention.

It computes what `DraftModel.propose` and `extend` compute, from the same weights.
"""

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.drafts.dflash import DraftModel
from blockpilot.models.cache import SlotCache, SlotView, num_kv_heads
from blockpilot.models.kernels import prepared
from blockpilot.models.layers import Mask, RotaryTable
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
        norm, found = self.draft.hidden_norm, self._fc(features.to(self.draft.dtype))
        contexts = functional.rms_norm(found, found.shape[-1:], norm.weight, norm.variance_epsilon)
        view = cache.view(slots, positions, slice(0, 0), 0)
        self._layers.project(contexts, self._rotary.at(positions, view.num_columns, contexts), view)
        return contexts

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        """Hidden states [N, hidden] of packed blocks [N, hidden], on top of the cached context."""
        columns = torch.arange(cache.length, device=embedded.device)
        queries = packing.pad(packing.positions)
        ends = queries[:, 0] + torch.tensor(packing.sizes, device=embedded.device)
        masks = self.draft.layer_masks(columns < ends[:, None, None], queries[:, :, None] - columns)
        of_kind = {id(mask): [Mask(packing, mask, self._groups, self.draft.dtype)] for mask in masks}
        rotary = self._rotary.at(packing.positions, cache.num_columns, embedded)
        hidden = embedded.to(self.draft.dtype, copy=True)
        found, _ = self._layers(hidden, rotary, cache, [of_kind[id(mask)] for mask in masks], ())
        return found
