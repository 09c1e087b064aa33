"""The prepared form of an EAGLE-3 draft: its layer over packed rows, its cache, chains and trees token by token.

The entry of a final token at position t is made of the target's feature there and the embedding of the token after
it; its output hidden state scores the token at t + 2. Entries of drafted tokens lie in the columns after those of
final ones, in the order of the passes: only the pass that follows them sees them, and later ones are written over.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockpilot.device import tensor_on
from blockpilot.drafts.choices import Linked, own_chances
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.head import DraftHead, is_copy
from blockpilot.drafts.interface import Asked, Choose, PreparedDraft
from blockpilot.models.cache import SlotCache, SlotView, num_kv_heads, read_slots
from blockpilot.models.kernels import prepared
from blockpilot.models.layers import DecoderLayers, LayerWeights, Mask, Rotary, RotaryTable, attend_parts
from blockpilot.models.packing import Packing, SideBySide
from blockpilot.types import MAX_BLOCK_SIZE, Candidates

MOST_CONTEXTS = 8  # of a drafted position: more prefixes than that are not followed


class Eagle3Cache(SlotCache):
    """Keys and values of entries, with room for drafted ones; each slot's last hidden state."""

    def __init__(self, config: Any, num_slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, num_slots, length + MOST_CONTEXTS * MAX_BLOCK_SIZE, dtype, device)
        self.hidden = torch.zeros(num_slots, config.hidden_size, dtype=dtype, device=device)
        """[num_slots, hidden]"""

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.hidden.nbytes

    def move(self, source: int, destination: int, length: int) -> None:
        super().move(source, destination, length)
        self.hidden[destination] = self.hidden[source]


class Eagle3Layers(DecoderLayers):
    """The one layer, whose attention reads the embedding of the next token beside the hidden state."""

    def __init__(self, draft: Eagle3Model) -> None:
        super().__init__([LayerWeights(draft.midlayer, draft.config)], draft.norm.weight, draft.config)
        self._hidden_norm = draft.midlayer.hidden_norm.weight.detach().clone()
        self._residual_is_normed = draft.midlayer.norm_before_residual

    def entries(
        self, embedded: Tensor, hidden: Tensor, rotary: Rotary, cache: SlotView, masks: Sequence[Mask]
    ) -> Tensor:
        """Hidden states [N, hidden] of entries, whose keys and values are stored; inputs are both [N, hidden]."""
        (layer,) = self._layers
        normed = self._add_norm(hidden, None, self._hidden_norm)
        both = torch.cat([self._add_norm(embedded, None, layer.before), normed], dim=-1)
        queries = self._store(0, both, rotary, cache)
        attended = attend_parts(masks, queries, *cache.read(0), self._dim**-0.5)
        hidden = (normed if self._residual_is_normed else hidden) + layer.out(attended)
        return hidden + layer.mlp(self._add_norm(hidden, None, layer.after))

    def normed(self, hidden: Tensor) -> Tensor:
        """[N, hidden], as the LM head reads it."""
        return self._add_norm(hidden, None, self._norm)


class Level(NamedTuple):
    """Drafted positions at one depth: choices after each of P contexts of some rows [R]."""

    rows: list[int]
    found: Candidates
    """[R * P, k]"""
    places: Tensor
    """[R, P, k]"""


class PreparedEagle3(PreparedDraft):
    """An EAGLE-3 draft beside its target: proposes position by position, by a pass for each but the first."""

    @torch.no_grad()
    def __init__(self, draft: Eagle3Model, target: PreTrainedModel) -> None:
        self._draft, config = draft, draft.config
        self._layers, self._rotary = Eagle3Layers(draft), RotaryTable(draft.rotary_emb)
        self._groups = config.num_attention_heads // num_kv_heads(config)
        if is_copy(draft.embed_tokens, target.get_input_embeddings()):
            draft.embed_tokens = None
        self._embed = draft.embed_tokens or target.get_input_embeddings()
        self._fc, self._head, tokens = prepared(draft, "fc"), prepared(draft, "lm_head"), draft.vocabulary
        self.head = DraftHead(self._scores, tokens, config.vocab_size)

    def new_cache(self, num_slots: int, length: int) -> Eagle3Cache:
        return Eagle3Cache(self._draft.config, num_slots, length, self._draft.dtype, self._draft.norm.weight.device)

    def keep_up(
        self, features: Tensor, following: Sequence[int], slots: Sequence[int], packing: SideBySide, cache: SlotCache
    ) -> Tensor:
        assert isinstance(cache, Eagle3Cache)
        device = features.device
        tokens, index = tensor_on(device, following).clamp(min=0), tensor_on(device, slots)
        view = cache.view(index[packing.rows], packing.columns, read_slots(slots), packing.length)
        masks = [Mask(part, part.visible, self._groups, self._draft.dtype) for part in packing.parts]
        fused = self._fc(features.to(self._draft.dtype))
        found = self._entries(tokens, fused, packing.positions, view, masks)
        ends = accumulate(size for part in packing.parts for size in part.sizes)
        cache.hidden[index] = found[tensor_on(device, [end - 1 for end in ends])]
        return found

    def propose(self, asked: Asked, cache: SlotCache, choose: Choose) -> Candidates | Linked:
        assert isinstance(cache, Eagle3Cache)
        device, rows = cache.layers.device, list(range(len(asked.slots)))
        width, levels = min(asked.width, MOST_CONTEXTS), list[Level]()
        hidden = cache.hidden[tensor_on(device, asked.slots)][:, None]  # [R, P, hidden], P = 1 at first
        above = hidden.new_zeros(hidden.shape[:2], dtype=torch.float32)  # logarithms of the contexts' chances
        seen = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=device)  # [R, P, drafted entries] of contexts
        own = torch.eye(width, dtype=torch.bool, device=device)
        for depth in range(1, max(asked.depths) + 1):
            num_contexts = hidden.shape[1]
            of_contexts = [row for row in rows for _ in range(num_contexts)]
            found = choose(hidden.flatten(0, 1), of_contexts, [asked.starts[row] + depth for row in of_contexts])
            tokens, parents, above, places = _followed(found, above, width)
            levels.append(Level(rows, found, places))
            kept = [i for i, row in enumerate(rows) if asked.depths[row] > depth]
            if not kept:
                break
            of_parents = parents[:, :, None]
            hidden, seen = (each.gather(1, of_parents.expand(-1, -1, each.shape[2])) for each in (hidden, seen))
            seen = torch.cat([seen, own.expand(len(rows), -1, -1)], dim=2)
            if len(kept) < len(rows):
                rows, index = [rows[i] for i in kept], tensor_on(device, kept)
                tokens, hidden, above, seen = (each[index] for each in (tokens, hidden, above, seen))
            slots, starts = ([of_rows[row] for row in rows] for of_rows in (asked.slots, asked.starts))
            hidden = self._follow(tokens, hidden, seen, depth - 1, slots, starts, cache)
        return _by_row(levels, asked.depths, width)

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

        seen [R, P, entries] are the drafted entries that each sees, its own the last ones; anchors lie at `starts`.
        """
        num_rows, width = tokens.shape
        packing = Packing([width] * num_rows, [start + depth * width for start in starts], tokens.device)
        index = tensor_on(tokens.device, slots)
        view = cache.view(index[packing.rows], packing.columns, read_slots(slots), packing.length)
        first = tensor_on(tokens.device, starts)[:, None]
        visible = (torch.arange(packing.length, device=tokens.device) < first)[:, None].repeat(1, width, 1)
        own = first + torch.arange(seen.shape[2], device=tokens.device)
        visible.scatter_(2, own[:, None].expand(-1, width, -1), seen)
        mask = Mask(packing, visible[:, None], self._groups, self._draft.dtype)
        positions = (first + depth).expand(-1, width).flatten()
        return self._entries(tokens.flatten(), hidden.flatten(0, 1), positions, view, [mask]).view_as(hidden)

    def _scores(self, hidden: Tensor) -> Tensor:
        return self._head(self._layers.normed(hidden))

    def _entries(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, view: SlotView, masks: Sequence[Mask]
    ) -> Tensor:
        embedded = self._embed(tokens).to(self._draft.dtype)
        rotary = self._rotary.at(positions, view.num_columns, embedded)
        return self._layers.entries(embedded, hidden, rotary, view, masks)


def _followed(found: Candidates, above: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `width` most probable of the choices [R * P, k] after contexts of log chances `above` [R, P].

    The first choice after the first context is always the first of them: a chain of first choices is followed
    whatever its chance. Returns their tokens, their contexts and log chances, all [R, width], and the place [R, P, k]
    of every choice among them, -1 for none.
    """
    num_rows, num_contexts = above.shape
    chances = above[:, :, None] + own_chances(found)[0].view(num_rows, num_contexts, -1).log()
    num = chances.shape[2]
    ordered = chances.flatten(1).clone()
    ordered[:, 0] = torch.inf
    chosen = ordered.topk(width, dim=1).indices
    places = torch.full_like(chosen[:, :1], -1).repeat(1, num_contexts * num)
    places.scatter_(1, chosen, torch.arange(width, device=chosen.device).expand(num_rows, -1))
    tokens = found.tokens.view(num_rows, -1).gather(1, chosen)
    return tokens, chosen // num, chances.flatten(1).gather(1, chosen), places.view(num_rows, num_contexts, num)


def _by_row(levels: Sequence[Level], depths: Sequence[int], width: int) -> Candidates | Linked:
    """Choices of all positions, row by row: level by level they were found."""
    index, start = list[tuple[int, int, int]](), 0
    for depth, level in enumerate(levels):
        index += [(row, depth, start + i) for i, row in enumerate(level.rows)]
        start += len(level.rows)
    order = tensor_on(levels[0].places.device, [place for *_, place in sorted(index)])

    def joined(of_levels: Sequence[Tensor]) -> Tensor:
        """[N, width, ...]; the one context of the first level stands for all."""
        first, *rest = of_levels
        return torch.cat([first.expand(-1, width, *first.shape[2:]), *rest])[order]

    apart = zip(
        *([values.unflatten(0, (len(level.rows), -1)) for values in level.found] for level in levels), strict=True
    )
    found = Candidates(*(joined(values).flatten(0, 1) for values in apart))
    return found if width == 1 else Linked(found, joined([level.places for level in levels]))
