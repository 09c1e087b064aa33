"""Blocks at many anchors of known texts, side by side in one draft pass.

What training scores, and what tells how a draft would do on a text without decoding it: the keyed sampler makes the
text the same for every block size, so the tokens accepted at every anchor follow from the draft alone.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.draft import DraftModel
from blockpilot.draft_data import Document
from blockpilot.pairs import Pair
from blockpilot.verify import Sampling, keyed_sample

ANCHORS_PER_ROW = 8


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


def draft_blocks(draft: DraftModel, embedding: Tensor, batch: Batch, block_size: int) -> Tensor:
    """Hidden states [N, A, B, hidden] of the blocks at every anchor; embedding [vocab, hidden] is the target's.

    A document's anchors are spread over rows of ANCHORS_PER_ROW: blocks of a row are masked from each other, and what
    is masked is computed all the same.
    """
    num_documents, num_anchors = batch.anchors.shape
    device, num_columns = batch.tokens.device, batch.tokens.shape[1]
    rows_each = -(-num_anchors // ANCHORS_PER_ROW)
    spare = rows_each * ANCHORS_PER_ROW - num_anchors
    anchors = functional.pad(batch.anchors, (0, spare))
    first_tokens = batch.tokens.gather(1, anchors).view(-1, ANCHORS_PER_ROW)
    anchors = anchors.view(-1, ANCHORS_PER_ROW)
    block = torch.full((*anchors.shape, block_size), draft.options.mask_token_id, device=device)
    block[:, :, 0] = first_tokens
    positions = (anchors[:, :, None] + torch.arange(block_size, device=device)).flatten(1)
    columns = torch.arange(num_columns, device=device)
    embedded = functional.embedding(block.flatten(1), embedding).to(batch.features.dtype)
    of_key = torch.cat([columns.expand(len(anchors), -1), positions], dim=1)
    masks = draft.layer_masks(block_mask(anchors, num_columns, block_size), positions[:, :, None] - of_key[:, None])
    context = JoinedContext(draft, draft.fuse(batch.features), columns.expand(num_documents, -1), rows_each)
    hidden: Tensor = draft(embedded, positions, masks, context)
    return hidden.view(num_documents, -1, block_size, hidden.shape[-1])[:, :num_anchors]


class JoinedContext:
    """A key/value store of known texts: the context's keys, projected by each layer, before the blocks' own.

    context [N, S, hidden] at positions [N, S] serves `rows_each` rows of blocks a document.
    """

    def __init__(self, draft: DraftModel, context: Tensor, positions: Tensor, rows_each: int) -> None:
        self._draft, self._context, self._rows_each = draft, context, rows_each
        self._rotary = draft.rotary_emb(context, positions)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        projected = self._draft.project(layer_idx, self._context, self._rotary)
        of_context = [tensor.repeat_interleave(self._rows_each, dim=0) for tensor in projected]
        return torch.cat([of_context[0], keys], dim=2), torch.cat([of_context[1], values], dim=2)


def block_mask(anchors: Tensor, num_context: int, block_size: int) -> Tensor:
    """Block-diffusion mask [N, A*B, S + A*B]: context strictly before the own anchor, and the own block."""
    num_rows, num_anchors = anchors.shape
    of_query = anchors.repeat_interleave(block_size, dim=1)
    context = torch.arange(num_context, device=anchors.device) < of_query[:, :, None]
    block = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
    own = (block[:, None] == block).expand(num_rows, -1, -1)
    return torch.cat([context, own], dim=2)


@torch.inference_mode()
def count_accepted_everywhere(pair: Pair, document: Document, sampling: Sampling, block_size: int) -> list[int]:
    """Drafted tokens accepted at every anchor of an answer, in order, as the engine would with this sampling.

    The LM head runs slot by slot over the anchors whose slots before were all right: about tau rows an anchor.
    """
    anchors = possible_anchors(document)
    if not len(anchors):
        return []
    device, dtype = pair.target.device, pair.draft.dtype
    batch = Batch(*(tensor.to(device) for tensor in collate([document], [anchors])))
    batch = batch._replace(features=batch.features.to(dtype))
    embedding = cast(Tensor, pair.target.get_input_embeddings().weight)
    head = pair.target.get_output_embeddings()
    hidden = draft_blocks(pair.draft, embedding, batch, block_size)[0]
    positions, inside = (tensor[0] for tensor in slots(batch, block_size))
    accepted = torch.zeros(len(anchors), dtype=torch.long, device=device)
    alive = torch.arange(len(anchors), device=device)
    for slot in range(1, block_size):
        alive = alive[inside[alive, slot - 1]]
        if not len(alive):
            break
        at_slot = positions[alive, slot - 1]
        drawn = keyed_sample(head(hidden[alive, slot]), at_slot.tolist(), [sampling] * len(alive))
        alive = alive[drawn == batch.tokens[0, at_slot]]
        accepted[alive] += 1
    found: list[int] = accepted.tolist()
    return found


def count_steps(num_accepted: Sequence[int]) -> int:
    """Steps that decode a text, given how many drafts are accepted at each of its anchors, in order."""
    position, num_steps = 0, 0
    while position < len(num_accepted):
        position += num_accepted[position] + 1
        num_steps += 1
    return num_steps
