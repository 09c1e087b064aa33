"""Prepared DFlash draft: the target's fast layers (models/native_layers.py) with the draft's attention.

It computes what `DraftModel` computes, from the same weights.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockpilot.device import sent, tensor_on
from blockpilot.drafts.base import Choose, DraftRequest, PreparedDraft
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.head import DraftHead, is_copy
from blockpilot.models.cache import SlotCache, SlotView, num_kv_heads, read_slots
from blockpilot.models.graphs import Box, BoxTokens
from blockpilot.models.kernels import prepared
from blockpilot.models.layers import ContextProjection, Mask
from blockpilot.models.native_layers import layers_of
from blockpilot.models.packing import Packing
from blockpilot.models.rotary import Rotary, RotaryTable
from blockpilot.native.products import Padding
from blockpilot.types import Candidates


class CachedDFlash:
    """Layers of a draft; its linear layers are prepared in place, once."""

    @torch.no_grad()
    def __init__(self, draft: DraftModel) -> None:
        self.draft, config = draft, draft.config
        self._layers = layers_of(draft.layers, draft.norm.weight, config)
        fc = prepared(draft, "fc", outputs=Padding.to_multiple(config.hidden_size))
        self._fused = ContextProjection(fc, draft.hidden_norm.weight)
        self._rotary = RotaryTable(draft.rotary_emb)
        self._groups = config.num_attention_heads // num_kv_heads(config)

    @property
    def mask_token_id(self) -> int:
        return self.draft.options.mask_token_id

    def new_cache(self, num_slots: int, length: int) -> SlotCache:
        """An empty cache of projected context: `num_slots` rows of `length` columns."""
        config, dtype, device = self.draft.config, self.draft.dtype, self.draft.norm.weight.device
        return SlotCache(config, num_slots, length, dtype, device, halves=self._layers.halves)

    def extend(self, features: Tensor, slots: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Cache the target's features [N, F] of accepted tokens in slots [N] at positions [N].

        Returns their context vectors [N, hidden].
        """
        features = features.to(self.draft.dtype)
        table = self._rotary.table(cache, features)
        if cache.graphs is not None:
            in_graph = partial(self._extend, table, cache.bare())
            inputs = (features, 0), (slots, 0), (positions, cache.num_columns - 1)
            outputs = cache.graphs.run_tokens("extend", in_graph, inputs)
            if outputs is not None:
                return outputs[0]
        return self._extend(table, cache, features, slots, positions)[0]

    def _extend(
        self,
        table: Rotary,
        cache: SlotCache,
        features: Tensor,
        slots: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor]:
        view = cache.view(slots, positions, slice(0, 0), 0)
        return (self._layers.project(features, self._fused, table.at(positions), view),)

    def propose(self, embedded: Tensor, packing: Packing, cache: SlotView) -> Tensor:
        """Hidden states [N, hidden] of packed embedded blocks [N, hidden], which attend to the cached context."""
        hidden = embedded.to(self.draft.dtype, copy=True)
        table = self._rotary.table(cache, hidden)
        by_graph = cache.by_graph(partial(self._in_box, table), "propose", hidden, packing)
        if by_graph is not None:
            return by_graph[0]
        queries = packing.pad(packing.positions)
        ends = queries[:, 0] + packing.spans[0]
        masks = self._masks(packing, queries, ends, cache.length)
        return self._run(hidden, table.at(packing.positions), cache, masks)

    def _in_box(
        self, table: Rotary, hidden: Tensor, box: Box, box_tokens: BoxTokens, packing: Packing, cache: SlotView
    ) -> tuple[Tensor]:
        queries, ends = (values.view(box.rows, box.width) for values in (box_tokens.positions, box_tokens.ends))
        masks = self._masks(packing, queries, ends[:, 0], box.length)
        return (self._run(hidden, table.at(box_tokens.positions), cache, masks),)

    def _run(self, hidden: Tensor, rotary: Rotary, cache: SlotView, masks: Sequence[Sequence[Mask]]) -> Tensor:
        """Hidden states of tokens [N, hidden] after all layers."""
        return self._layers(hidden, [rotary] * len(masks), cache, masks, ())[0]

    def _masks(self, packing: Packing, queries: Tensor, ends: Tensor, length: int) -> list[list[Mask]]:
        """Masks of every layer, for queries at positions [R, W] of blocks that end before columns [R]."""
        columns = torch.arange(length, device=queries.device)
        masks = self.draft.layer_masks(columns < ends[:, None, None], queries, columns[None])
        by_mask = {id(mask): [Mask(packing, mask, self._groups, self.draft.dtype)] for mask in masks}
        return [by_mask[id(mask)] for mask in masks]


class PreparedDFlash(PreparedDraft):
    """A DFlash draft prepared for a target: proposes all positions in one pass over a cache of projected context."""

    def __init__(self, decoder: CachedDFlash, target: PreTrainedModel) -> None:
        draft, target_embeddings = decoder.draft, target.get_input_embeddings()
        if is_copy(draft.embed_tokens, target_embeddings):
            draft.embed_tokens = None
        if is_copy(draft.lm_head, target.get_output_embeddings()):
            draft.lm_head = draft.vocabulary = None
        if draft.lm_head is None:
            self.head = DraftHead.from_target(target, draft.vocabulary, draft.edges)
        else:
            head = prepared(draft, "lm_head")
            self.head = DraftHead(
                head, draft.vocabulary, target.config.vocab_size, draft.edges, draft.options.soft_cap
            )
        self._decoder, self._embed = decoder, draft.embedding(target_embeddings)

    def new_cache(self, num_slots: int, length: int) -> SlotCache:
        return self._decoder.new_cache(num_slots, length)

    def update_cache(
        self, features: Tensor, following: Sequence[int], slots: Sequence[int], packing: Packing, cache: SlotCache
    ) -> Tensor:
        index = tensor_on(features.device, slots)
        return self._decoder.extend(features, index[packing.rows], packing.positions, cache)

    def propose(self, request: DraftRequest, cache: SlotCache, choose: Choose) -> Candidates | ConditionalCandidates:
        ends = list(accumulate(request.depths))
        rows = [row for row, depth in enumerate(request.depths) for _ in range(depth)]
        inside = (i for depth in request.depths for i in range(1, depth + 1))
        positions = [request.starts[row] + i for row, i in zip(rows, inside, strict=True)]
        hidden = self._run(request, cache)
        candidates = choose(hidden, rows, positions)
        if self.head.edges is None:
            return candidates
        before = candidates.tokens.roll(1, dims=0)
        first = [end - depth for end, depth in zip(ends, request.depths, strict=True)]
        first_slots, anchors = tensor_on(before.device, [first, request.anchors])
        before[first_slots] = anchors[:, None]
        return self.head.edges.link(candidates, hidden, before, [request.sampling[row] for row in rows], request.num)

    def _run(self, request: DraftRequest, cache: SlotCache) -> Tensor:
        """Hidden states [M, hidden] of all requested positions, those after the rows' anchors."""
        device, from_anchor = cache.device, self._decoder.draft.options.sample_from_anchor
        # 1. Blocks: every row's anchor, then mask tokens.
        blocks = Packing([depth + 1 - from_anchor for depth in request.depths], request.starts, device)
        tokens = list[int]()
        for anchor, size in zip(request.anchors, blocks.sizes, strict=True):
            tokens += [anchor, *[self._decoder.mask_token_id] * (size - 1)]
        # 2. One pass over the cached context of their slots.
        rows = read_slots(request.slots)
        index = blocks.rows if isinstance(rows, slice) else sent(rows, device)[blocks.rows]
        view = cache.view(index, blocks.columns, rows, blocks.length)
        outputs = self._decoder.propose(self._embed(tensor_on(device, tokens)), blocks, view)
        return outputs if from_anchor else outputs[blocks.after_first]
