"""Batches of documents with anchors, and the draft pass over the blocks at all anchors."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from blockpilot.draft_training.features import Document
from blockpilot.drafts.blocks import ANCHORS_PER_ROW, Blocks
from blockpilot.drafts.dflash import DraftModel


class DraftBatch(NamedTuple):
    """N documents padded to S tokens, with A anchors each; `valid` is False for padding anchors."""

    tokens: Tensor  # [N, S] int64
    lengths: Tensor  # [N]
    features: Tensor  # [N, S, F]
    hidden: Tensor  # [N, S, hidden] of the target, before its LM head
    anchors: Tensor  # [N, A] positions
    valid: Tensor  # [N, A] bool
    num_prompt_tokens: Tensor  # [N]


def collate(
    documents: Sequence[Document], anchors: Sequence[Tensor], num_anchors: int = 0, length_step: int = 1
) -> DraftBatch:
    """Pad documents and their anchors (one tensor of positions per document) to a batch.

    The batch has at least `num_anchors` anchors per document, and its length is a multiple of `length_step`: few
    shapes, for compiled kernels.
    """
    lengths, num = torch.tensor([len(d.tokens) for d in documents]), torch.tensor([len(a) for a in anchors])
    most_anchors, padding = max(num_anchors, int(num.max())), -int(lengths.max()) % length_step

    def by_token(rows: list[Tensor]) -> Tensor:
        padded = pad_sequence(rows, batch_first=True)
        return functional.pad(padded, (0, 0) * (padded.dim() - 2) + (0, padding))

    padded_anchors = pad_sequence(list(anchors), batch_first=True)
    return DraftBatch(
        by_token([d.tokens for d in documents]),
        lengths,
        by_token([d.features for d in documents]),
        by_token([d.hidden for d in documents]),
        functional.pad(padded_anchors, (0, most_anchors - padded_anchors.shape[1])),
        torch.arange(most_anchors) < num[:, None],
        torch.tensor([d.num_prompt_tokens for d in documents]),
    )


def possible_anchors(document: Document) -> Tensor:
    """Positions of the answer with at least one token after them, ascending."""
    return torch.arange(document.num_prompt_tokens, max(document.num_prompt_tokens, len(document.tokens) - 1))


def draw_anchors(document: Document, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Up to `num_anchors` distinct random anchors of a document."""
    anchors = possible_anchors(document)
    return anchors[torch.randperm(len(anchors), generator=generator)[:num_anchors]]


def drafted_positions(batch: DraftBatch, block_size: int) -> tuple[Tensor, Tensor]:
    """Positions [N, A, B-1] that the blocks draft, and a mask of those inside their document."""
    offsets = torch.arange(1, block_size, device=batch.tokens.device)
    positions = batch.anchors[:, :, None] + offsets
    inside = (positions < batch.lengths[:, None, None]) & batch.valid[:, :, None]
    return positions.clamp_max(batch.tokens.shape[1] - 1), inside


def at(values: Tensor, positions: Tensor) -> Tensor:
    """values [N, S, ...] at positions [N, A, K] -> [N, A, K, ...]."""
    rows = torch.arange(len(values), device=values.device)[:, None, None]
    return values[rows, positions]


def draft_batch(draft: DraftModel, embedding: Tensor, batch: DraftBatch, block_size: int) -> Tensor:
    """Hidden states [N, A, B, hidden] of the blocks at every anchor of a batch.

    A document's anchors are split into rows of ANCHORS_PER_ROW blocks: attention also computes the masked products,
    which grow with the length of a row.
    """
    num_documents, num_anchors = batch.anchors.shape
    rows_each = -(-num_anchors // ANCHORS_PER_ROW)
    anchors = functional.pad(batch.anchors, (0, rows_each * ANCHORS_PER_ROW - num_anchors))
    tokens = batch.tokens.gather(1, anchors).view(-1, ANCHORS_PER_ROW)
    anchors = anchors.view(-1, ANCHORS_PER_ROW)
    blocks = Blocks(anchors, tokens, torch.full_like(anchors, block_size), (block_size,) * ANCHORS_PER_ROW)
    embed = partial(functional.embedding, weight=embedding)
    hidden = draft.at_anchors(blocks, draft.known(batch.features, rows_each), embed)
    return hidden.view(num_documents, -1, block_size, hidden.shape[-1])[:, :num_anchors]
