"""Replay: the tokens that every block size accepts on a finished text, without decoding it again.

The keyed sampler makes a request's text the same for every block size. The target therefore runs once over the
finished text, and the draft alone decides what a step emits: draft at the anchor, compare with the text, move to the
next anchor. The replay accepts as many tokens as the engine, at any temperature (near ties may differ
without layers in C).

The LM head runs slot by slot, for blocks whose tokens so far match the text: about tau rows per block.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.drafts.blocks import ANCHORS_PER_ROW, Blocks, KnownContext
from blockpilot.drafts.choices import draft_probs
from blockpilot.engine.drafting import draft_candidates
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.sweep.trees import MOST_NODES, nodes_needed
from blockpilot.types import Candidates, Sampling

PREFILL_COLUMNS = 1024  # tokens of a group of texts that the target scores in one pass
HEAD_ROWS = 512  # positions that the LM head scores in one pass: 4 * vocabulary bytes of logits each
ANCHORS_AT_ONCE = 32 * ANCHORS_PER_ROW  # anchors of one text in one draft pass


class Text(NamedTuple):
    """Finished request: tokens of prompt and answer, and its maximum length."""

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    limit: int
    sampling: Sampling


class KnownTexts(NamedTuple):
    """N texts with the draft's keys, values and context vectors at their positions."""

    texts: tuple[Text, ...]
    tokens: Tensor  # [N, S], padded
    keys: tuple[Tensor, ...]  # [N, heads, S, head_dim] of every draft layer
    values: tuple[Tensor, ...]
    context: Tensor  # [N, S, hidden]: the context vector at every position

    @property
    def prefill_context(self) -> Tensor:
        """The context vectors [N, hidden] at the last prompt tokens."""
        lengths = torch.tensor([text.num_prompt_tokens for text in self.texts], device=self.tokens.device)
        return self.context[torch.arange(len(lengths), device=lengths.device), lengths - 1]

    def blocks_at(self, pair: Pair, blocks: Blocks, rows_each: int = 1) -> Tensor:
        """Hidden states [R, sum(widths), hidden] of blocks; `rows_each` rows of `blocks` belong to each text."""
        context = KnownContext(self.keys, self.values, rows_each, tokens=self.tokens, contexts=self.context)
        return pair.draft.at_anchors(blocks, context, pair.target.get_input_embeddings())

    def rows(self, index: Tensor) -> "KnownTexts":
        """The texts at `index`."""
        return KnownTexts(
            tuple(self.texts[i] for i in index.tolist()),
            self.tokens[index],
            tuple(keys[index] for keys in self.keys),
            tuple(values[index] for values in self.values),
            self.context[index],
        )


@torch.inference_mode()
def know(pair: Pair, texts: Sequence[Text]) -> KnownTexts:
    """Run the target over the texts by chunked prefill, and update the draft's cache with each chunk.

    A chunk leaves out texts that have already ended, so most of the padding of short texts is skipped.
    """
    target, draft = Target(pair.target, pair.layer_ids), pair.prepared_draft
    device, lengths = pair.target.device, [len(text.tokens) for text in texts]
    length = max(lengths)
    tokens = torch.tensor([[*text.tokens, *[0] * (length - len(text.tokens))] for text in texts], device=device)
    shifted_tokens = functional.pad(tokens, (0, 1))[:, 1:]
    target_cache, draft_cache = target.new_cache(len(texts), length), draft.new_cache(len(texts), length)
    context = torch.zeros(len(texts), length, pair.draft.context_size, dtype=pair.draft.dtype, device=device)
    start = 0
    while start < length:
        slots = [i for i, text_length in enumerate(lengths) if text_length > start]
        rows = torch.tensor(slots, device=device)
        end = min(start - (-PREFILL_COLUMNS // len(rows)), length)
        scored = target.score_rows(tokens[rows, start:end], start, target_cache, rows)
        assert scored.features is not None
        packing = Packing([end - start] * len(rows), [start] * len(rows), device)
        next_tokens = shifted_tokens[rows, start:end].flatten().tolist()
        context_vectors = draft.update_cache(scored.features.flatten(0, 1), next_tokens, slots, packing, draft_cache)
        context[rows, start:end] = context_vectors.view(len(rows), end - start, -1)
        start = end
    keys, values = (tuple(layers) for layers in draft_cache.unpadded(length).unbind(dim=1))
    return KnownTexts(tuple(texts), tokens, keys, values, context)


@torch.inference_mode()
def walk(pair: Pair, known_texts: KnownTexts, candidates: Sequence[int]) -> list[list[list[int]]]:
    """Replay every text with every block size (2 or more): [text][candidate][step] = tokens emitted by the step."""
    emitted: list[list[list[int]]] = [[[] for _ in candidates] for _ in known_texts.texts]
    device = known_texts.tokens.device
    last_positions = torch.tensor([len(text.tokens) - 1 for text in known_texts.texts], device=device)[:, None]
    limits = torch.tensor([text.limit for text in known_texts.texts], device=device)[:, None]
    first_anchors = torch.tensor([text.num_prompt_tokens for text in known_texts.texts], device=device)[:, None]
    anchors = first_anchors.expand(-1, len(candidates)).clone()
    widths = torch.tensor(candidates, device=device)
    text_index = torch.arange(len(known_texts.texts), device=device)
    while True:
        unfinished = (anchors < last_positions).any(dim=1)
        if not unfinished.any():
            return emitted
        if not unfinished.all():
            index = unfinished.nonzero()[:, 0]
            known_texts, text_index = known_texts.rows(index), text_index[index]
            anchors, last_positions, limits = anchors[index], last_positions[index], limits[index]
        is_running = anchors < last_positions
        block_sizes = torch.where(is_running, torch.minimum(widths, limits - anchors - 1), 1)
        blocks = Blocks(anchors, known_texts.tokens.gather(1, anchors), block_sizes, tuple(candidates))
        hidden = known_texts.blocks_at(pair, blocks)
        num_emitted = torch.minimum(count_accepted(pair, known_texts, hidden, blocks) + 1, last_positions - anchors)
        for row, counts, active in zip(text_index.tolist(), num_emitted.tolist(), is_running.tolist(), strict=True):
            for candidate, count in enumerate(counts):
                if active[candidate]:
                    emitted[row][candidate].append(count)
        anchors = anchors + num_emitted


@torch.inference_mode()
def accepted_everywhere(pair: Pair, known_texts: KnownTexts, block_size: int) -> list[list[int]]:
    """Numbers of accepted tokens [text][anchor]; every position of the answer but the last is an anchor, in order."""
    one_by_one = (known_texts.rows(torch.tensor([i])) for i in range(len(known_texts.texts)))
    return [_accepted_everywhere(pair, text, block_size) for text in one_by_one]


def _accepted_everywhere(pair: Pair, known_texts: KnownTexts, block_size: int) -> list[int]:
    (text,) = known_texts.texts
    anchors = torch.arange(text.num_prompt_tokens, len(text.tokens) - 1, device=known_texts.tokens.device)
    num_accepted: list[int] = []
    for num_anchors, blocks, hidden in _drafted_at(pair, known_texts, anchors, block_size):
        num_rows = len(blocks.anchors)
        repeated = known_texts._replace(
            texts=known_texts.texts * num_rows, tokens=known_texts.tokens.expand(num_rows, -1)
        )
        num_accepted += count_accepted(pair, repeated, hidden, blocks).flatten()[:num_anchors].tolist()
    return num_accepted


def _drafted_at(
    pair: Pair, known_texts: KnownTexts, all_anchors: Tensor, block_size: int
) -> Iterator[tuple[int, Blocks, Tensor]]:
    """Draft at the anchors [M] of one text, ANCHORS_AT_ONCE at a time.

    Yields (num_anchors, blocks, hidden [R, sum(widths), hidden]). The first `num_anchors` blocks are those of the
    group's anchors; padding repeats the last one.
    """
    (text,) = known_texts.texts
    for group in all_anchors.split(ANCHORS_AT_ONCE) if len(all_anchors) else ():
        rows_each = -(-len(group) // ANCHORS_PER_ROW)
        anchors = torch.cat([group, group[-1:].expand(rows_each * ANCHORS_PER_ROW - len(group))])
        anchors = anchors.view(rows_each, ANCHORS_PER_ROW)
        sizes = (text.limit - anchors - 1).clamp_max(block_size)
        blocks = Blocks(anchors, known_texts.tokens[0][anchors], sizes, (block_size,) * ANCHORS_PER_ROW)
        yield len(group), blocks, known_texts.blocks_at(pair, blocks, rows_each)


class ProposedChoices(NamedTuple):
    """The draft's k best choices for each of D slots at P anchors, and which of them is the text's token."""

    ranks: Tensor
    """[P, D] int8: index of the text's token among the k choices; -1: absent; -2: not drafted, or past the text."""
    scores: Tensor
    """[P, D, k] float16, as log_probs; see `Candidates`."""
    log_probs: Tensor
    nodes: Tensor | None
    """[P, D] uint8: `nodes_needed` by the draft's own probabilities; None if a slot depends on earlier choices."""


@torch.inference_mode()
def choices_at(pair: Pair, known_texts: KnownTexts, anchors: Tensor, num_choices: int) -> ProposedChoices:
    """The draft's best choices at the anchors [P] of one text, over its trained block size."""
    (text,), block_size = known_texts.texts, pair.block_size
    is_linked = pair.draft.is_sequential or pair.prepared_draft.head.edges is not None
    padded_tokens = functional.pad(known_texts.tokens[0], (0, block_size), value=-1)
    groups = []
    for num_anchors, blocks, hidden in _drafted_at(pair, known_texts, anchors, block_size):
        hidden = hidden.view(-1, block_size, hidden.shape[-1])[:num_anchors, 1:]
        positions = blocks.anchors.flatten()[:num_anchors, None] + torch.arange(1, block_size, device=anchors.device)
        sampling = [text.sampling] * positions.numel()
        before = known_texts.tokens[0][(positions - 1).clamp(max=known_texts.tokens.shape[1] - 1)].flatten()
        flat = positions.flatten()
        candidates = _candidates(pair, hidden.flatten(0, 1), flat.tolist(), sampling, num_choices, before)
        is_right = candidates.tokens == padded_tokens[flat][:, None]
        ranks = torch.where(is_right.any(dim=1), is_right.int().argmax(dim=1), -1).view(num_anchors, -1)
        is_drafted = positions - positions[:, :1] + 1 < blocks.sizes.flatten()[:num_anchors, None]
        ranks = torch.where(is_drafted & (positions < len(text.tokens)), ranks, -2)
        shape = num_anchors, block_size - 1, -1
        scores, log_probs = candidates.scores.half().view(shape), candidates.log_probs.half().view(shape)
        nodes = None
        if not is_linked:
            nodes = _nodes_needed_at(draft_probs(candidates)[0].view(shape), ranks, is_drafted.sum(dim=1))
        groups.append(ProposedChoices(ranks.char(), scores, log_probs, nodes))
    nodes = None if is_linked else torch.cat([group.nodes for group in groups if group.nodes is not None])
    ranks, scores, log_probs = (torch.cat(values) for values in list(zip(*groups, strict=True))[:3])
    return ProposedChoices(ranks, scores, log_probs, nodes)


def _nodes_needed_at(probs: Tensor, ranks: Tensor, num_drafted: Tensor) -> Tensor:
    """`nodes_needed` [P, D] for probabilities [P, D, k], ranks [P, D] and numbers of drafted slots [P]."""
    width, rows = ranks.shape[1], []
    for anchor_probs, anchor_ranks, num in zip(probs.tolist(), ranks.tolist(), num_drafted.tolist(), strict=True):
        num_nodes = nodes_needed(anchor_probs[:num], anchor_ranks[:num])
        rows.append(num_nodes + [MOST_NODES + 1] * (width - num))
    return torch.tensor(rows).byte()


def _candidates(
    pair: Pair,
    hidden: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num_choices: int,
    before: Tensor,
) -> Candidates:
    """The draft's best choices for slots with hidden states [M, hidden] and preceding tokens `before` [M]."""
    parts, head = [], pair.prepared_draft.head
    for start in range(0, max(len(hidden), 1), HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        candidates = draft_candidates(head, hidden[part], positions[part], sampling[part], num_choices)
        if head.edges is not None:
            linked = head.edges.link(candidates, hidden[part], before[part, None], sampling[part], num_choices)
            candidates = linked.candidates
        parts.append(candidates)
    return Candidates(*(torch.cat(values) for values in zip(*parts, strict=True)))


def count_accepted(pair: Pair, known_texts: KnownTexts, hidden: Tensor, blocks: Blocks) -> Tensor:
    """Number of accepted tokens [R, A] per block: drafted tokens before the first that differs from the text.

    hidden [R, sum(widths), hidden] are those of the blocks' positions; row r's text is known_texts.texts[r].
    """
    accepted = torch.zeros_like(blocks.anchors)
    lengths = torch.tensor([len(text.tokens) for text in known_texts.texts], device=accepted.device)
    ends = torch.minimum(blocks.sizes, lengths[:, None] - blocks.anchors)
    starts = torch.tensor([0, *blocks.widths[:-1]], device=accepted.device).cumsum(0)
    rows, columns = (ends > 1).nonzero(as_tuple=True)
    for slot in range(1, max(blocks.widths)):
        positions = blocks.anchors[rows, columns] + slot
        draft_tokens = _draw(pair, known_texts, hidden[rows, starts[columns] + slot], positions, rows)
        is_right = draft_tokens == known_texts.tokens[rows, positions]
        rows, columns = rows[is_right], columns[is_right]
        accepted[rows, columns] += 1
        has_next = ends[rows, columns] > slot + 1
        rows, columns = rows[has_next], columns[has_next]
        if not len(rows):
            break
    return accepted


def _draw(pair: Pair, known_texts: KnownTexts, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Draft tokens [M], sampled as in the engine; hidden [M, hidden]: states at positions [M] of texts `rows`."""
    sampling = [known_texts.texts[i].sampling for i in rows.tolist()]
    before = known_texts.tokens[rows, positions - 1]
    return _candidates(pair, hidden, positions.tolist(), sampling, 1, before).tokens[:, 0]
