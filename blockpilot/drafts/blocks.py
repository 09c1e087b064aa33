"""Blocks at many anchors of known texts, side by side in one draft pass: what training scores and a replay walks.

A row holds the blocks of one text, one after the other. Each sees the context strictly before its own anchor and
itself, never another block.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.draft_training.answers import Document
from blockpilot.drafts.dflash import DraftModel

ANCHORS_PER_ROW = 8


class Blocks(NamedTuple):
    """A blocks in each of R rows. Block a is `widths[a]` slots wide in every row, of which sizes [R, A] are its own.

    The slots beyond a block's size are padding: nobody attends to them.
    """

    anchors: Tensor  # [R, A] positions
    tokens: Tensor  # [R, A]: those at the anchors
    sizes: Tensor  # [R, A]
    widths: tuple[int, ...]

    def slots(self) -> tuple[Tensor, Tensor]:
        """Block and offset in its block of every slot of a row: two [sum(widths)]."""
        device = self.anchors.device
        block = torch.arange(len(self.widths), device=device)
        offset = torch.cat([torch.arange(width, device=device) for width in self.widths])
        return block.repeat_interleave(torch.tensor(self.widths, device=device)), offset


class KnownContext:
    """The draft's key/value store for known texts: of all context, followed by the blocks' own.

    keys and values hold a tensor [N, heads, S, head_dim] for every layer; a text serves `rows_each` rows of blocks.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], rows_each: int = 1) -> None:
        self._keys, self._values, self._rows_each = keys, values, rows_each

    @classmethod
    def of(cls, draft: DraftModel, features: Tensor, rows_each: int = 1) -> Self:
        """Project the target's features [N, S, F] of tokens at positions 0 .. S-1."""
        context = draft.fuse(features)
        positions = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
        rotary = draft.rotary_emb(context, positions)
        projected = [draft.project(i, context, rotary) for i in range(len(draft.layers))]
        return cls([keys for keys, _ in projected], [values for _, values in projected], rows_each)

    @property
    def num_columns(self) -> int:
        return self._keys[0].shape[2]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        known = self._keys[layer_idx], self._values[layer_idx]
        if self._rows_each > 1:
            known = known[0].repeat_interleave(self._rows_each, 0), known[1].repeat_interleave(self._rows_each, 0)
        return torch.cat([known[0], keys], dim=2), torch.cat([known[1], values], dim=2)


def draft_blocks(draft: DraftModel, embedding: Tensor, context: KnownContext, blocks: Blocks) -> Tensor:
    """Hidden states [R, sum(widths), hidden] of all slots; embedding [vocab, hidden] is the target's."""
    block, offset = blocks.slots()
    tokens = torch.where(offset == 0, blocks.tokens[:, block], draft.options.mask_token_id)
    positions = blocks.anchors[:, block] + offset
    columns = torch.arange(context.num_columns, device=positions.device).expand(len(positions), -1)
    distance = positions[:, :, None] - torch.cat([columns, positions], dim=1)[:, None]
    masks = draft.layer_masks(block_mask(blocks, context.num_columns), distance)
    hidden: Tensor = draft(functional.embedding(tokens, embedding), positions, masks, context)
    return hidden


def block_mask(blocks: Blocks, num_columns: int) -> Tensor:
    """Block-diffusion mask [R, sum(widths), num_columns + sum(widths)].

    A slot sees the context strictly before its own anchor, and the slots of its own block.
    """
    block, offset = blocks.slots()
    columns = torch.arange(num_columns, device=block.device)
    before = columns < blocks.anchors[:, block, None]
    own = (block[:, None] == block) & (offset < blocks.sizes[:, block])[:, None]
    return torch.cat([before, own], dim=2)


class Batch(NamedTuple):
    """N documents padded to S tokens, with A anchors each; `valid` is false for anchors that only fill up."""

    tokens: Tensor  # [N, S] int64
    lengths: Tensor  # [N]
    features: Tensor  # [N, S, F]
    hidden: Tensor  # [N, S, hidden]: of the target, before its LM head
    anchors: Tensor  # [N, A] positions
    valid: Tensor  # [N, A] bool


def collate(documents: Sequence[Document], anchors: Sequence[Tensor]) -> Batch:
    """Pad documents and their anchors (positions, one tensor a document)."""
    lengths = torch.tensor([len(d.tokens) for d in documents])
    num_anchors = torch.tensor([len(a) for a in anchors])
    return Batch(
        _padded([d.tokens for d in documents]),
        lengths,
        _padded([d.features for d in documents]),
        _padded([d.hidden for d in documents]),
        _padded(anchors),
        torch.arange(int(num_anchors.max())) < num_anchors[:, None],
    )


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def possible_anchors(document: Document) -> Tensor:
    """Positions of the answer that have at least one token after them, in order."""
    return torch.arange(document.num_prompt_tokens, max(document.num_prompt_tokens, len(document.tokens) - 1))


def slots(batch: Batch, block_size: int) -> tuple[Tensor, Tensor]:
    """Positions [N, A, B-1] of the slots 1 .. B-1, and which of them lie inside their document."""
    offsets = torch.arange(1, block_size, device=batch.tokens.device)
    positions = batch.anchors[:, :, None] + offsets
    inside = (positions < batch.lengths[:, None, None]) & batch.valid[:, :, None]
    return positions.clamp_max(batch.tokens.shape[1] - 1), inside


def at(values: Tensor, positions: Tensor) -> Tensor:
    """values [N, S, ...] at positions [N, A, K] -> [N, A, K, ...]."""
    rows = torch.arange(len(values), device=values.device)[:, None, None]
    return values[rows, positions]


def draft_batch(draft: DraftModel, embedding: Tensor, batch: Batch, block_size: int) -> Tensor:
    """Hidden states [N, A, B, hidden] of the blocks at every anchor of a batch.

    A document's anchors are spread over rows of ANCHORS_PER_ROW: what is masked is computed all the same.
    """
    num_documents, num_anchors = batch.anchors.shape
    rows_each = -(-num_anchors // ANCHORS_PER_ROW)
    anchors = functional.pad(batch.anchors, (0, rows_each * ANCHORS_PER_ROW - num_anchors))
    tokens = batch.tokens.gather(1, anchors).view(-1, ANCHORS_PER_ROW)
    anchors = anchors.view(-1, ANCHORS_PER_ROW)
    blocks = Blocks(anchors, tokens, torch.full_like(anchors, block_size), (block_size,) * ANCHORS_PER_ROW)
    hidden = draft_blocks(draft, embedding, KnownContext.of(draft, batch.features, rows_each), blocks)
    return hidden.view(num_documents, -1, block_size, hidden.shape[-1])[:, :num_anchors]


def emitted_along(num_accepted: Sequence[int]) -> list[int]:
    """Tokens of each step that decodes a text, given the drafts accepted at each of its anchors, in order."""
    emitted: list[int] = []
    position = 0
    while position < len(num_accepted):
        emitted.append(min(num_accepted[position] + 1, len(num_accepted) - position))
        position += emitted[-1]
    return emitted
