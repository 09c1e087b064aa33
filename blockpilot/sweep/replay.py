"""What every block size would have accepted on a known text, without decoding it again.

The keyed sampler makes a request's text the same for every block size, so the target runs once over the finished text
and what a step emits follows from the draft alone: draft at the anchor, compare with the text, jump. Replaying gives
what the engine counts, at any temperature (where layers are in C; elsewhere but for near ties).

The LM head runs position by position over the blocks that are right so far, so a block costs about tau of its rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from blockpilot.drafts.blocks import ANCHORS_PER_ROW, Blocks, KnownContext
from blockpilot.drafts.choices import own_chances
from blockpilot.engine.drafting import draft_candidates
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.sweep.trees import MOST_NODES, nodes_needed
from blockpilot.types import Candidates, Sampling

PREFILL_COLUMNS = 1024  # of all texts of a group, scored by the target in one pass
HEAD_ROWS = 512  # of the LM head at once: their logits take 4 * vocabulary bytes each
ANCHORS_AT_ONCE = 32 * ANCHORS_PER_ROW  # of one text


class Text(NamedTuple):
    """A finished request: tokens of prompt and answer, and the length that it was not allowed to pass."""

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    limit: int
    sampling: Sampling


class KnownTexts(NamedTuple):
    """N texts with the draft's context of them."""

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
        """Hidden states [R, sum(widths), hidden] of blocks, each text having `rows_each` rows of them."""
        known = KnownContext(self.keys, self.values, rows_each, tokens=self.tokens, contexts=self.context)
        embedding = cast(Tensor, pair.target.get_input_embeddings().weight)
        return pair.draft.at_anchors(blocks, known, embedding)

    def rows(self, index: Tensor) -> "KnownTexts":
        """Some of the texts."""
        return KnownTexts(
            tuple(self.texts[i] for i in index.tolist()),
            self.tokens[index],
            tuple(keys[index] for keys in self.keys),
            tuple(values[index] for values in self.values),
            self.context[index],
        )


@torch.inference_mode()
def know(pair: Pair, texts: Sequence[Text]) -> KnownTexts:
    """Run the target over the texts, a stretch of columns at a time, and keep the draft up with them.

    A stretch takes the texts that reach it, so short ones cost no more beside long ones.
    """
    target, draft = Target(pair.target, pair.layer_ids), pair.prepared_draft
    device, lengths = pair.target.device, [len(text.tokens) for text in texts]
    length = max(lengths)
    tokens = torch.tensor([[*text.tokens, *[0] * (length - len(text.tokens))] for text in texts], device=device)
    following = functional.pad(tokens, (0, 1))[:, 1:]
    target_cache, draft_cache = target.new_cache(len(texts), length), draft.new_cache(len(texts), length)
    context = torch.zeros(len(texts), length, pair.draft.context_size, dtype=pair.draft.dtype, device=device)
    start = 0
    while start < length:
        slots = [i for i, of_text in enumerate(lengths) if of_text > start]
        rows = torch.tensor(slots, device=device)
        end = min(start - (-PREFILL_COLUMNS // len(rows)), length)
        scored = target.score_rows(tokens[rows, start:end], start, target_cache, rows)
        assert scored.features is not None
        packing = Packing([end - start] * len(rows), [start] * len(rows), device)
        after = following[rows, start:end].flatten().tolist()
        found = draft.keep_up(scored.features.flatten(0, 1), after, slots, packing, draft_cache)
        context[rows, start:end] = found.view(len(rows), end - start, -1)
        start = end
    keys, values = (tuple(of_layers) for of_layers in draft_cache.unpadded(length).unbind(dim=1))
    return KnownTexts(tuple(texts), tokens, keys, values, context)


@torch.inference_mode()
def walk(pair: Pair, known: KnownTexts, candidates: Sequence[int]) -> list[list[list[int]]]:
    """Replay every text with every block size (2 or more): for each text and candidate, what each step emitted."""
    emitted: list[list[list[int]]] = [[[] for _ in candidates] for _ in known.texts]
    device = known.tokens.device
    last = torch.tensor([len(text.tokens) - 1 for text in known.texts], device=device)[:, None]
    limits = torch.tensor([text.limit for text in known.texts], device=device)[:, None]
    first = torch.tensor([text.num_prompt_tokens for text in known.texts], device=device)[:, None]
    anchors = first.expand(-1, len(candidates)).clone()
    widths = torch.tensor(candidates, device=device)
    ids = torch.arange(len(known.texts), device=device)
    while True:
        unfinished = (anchors < last).any(dim=1)
        if not unfinished.any():
            return emitted
        if not unfinished.all():
            index = unfinished.nonzero()[:, 0]
            known, ids = known.rows(index), ids[index]
            anchors, last, limits = anchors[index], last[index], limits[index]
        running = anchors < last
        sizes = torch.where(running, torch.minimum(widths, limits - anchors - 1), 1)
        blocks = Blocks(anchors, known.tokens.gather(1, anchors), sizes, tuple(candidates))
        hidden = known.blocks_at(pair, blocks)
        num_emitted = torch.minimum(count_accepted(pair, known, hidden, blocks) + 1, last - anchors)
        for row, counts, active in zip(ids.tolist(), num_emitted.tolist(), running.tolist(), strict=True):
            for candidate, count in enumerate(counts):
                if active[candidate]:
                    emitted[row][candidate].append(count)
        anchors = anchors + num_emitted


@torch.inference_mode()
def accepted_everywhere(pair: Pair, known: KnownTexts, block_size: int) -> list[list[int]]:
    """For each text, the drafted tokens accepted at every anchor of its answer, in order."""
    return [_accepted_everywhere(pair, known.rows(torch.tensor([i])), block_size) for i in range(len(known.texts))]


def _accepted_everywhere(pair: Pair, known: KnownTexts, block_size: int) -> list[int]:
    (text,) = known.texts
    every = torch.arange(text.num_prompt_tokens, len(text.tokens) - 1, device=known.tokens.device)
    found: list[int] = []
    for num, blocks, hidden in _drafted_at(pair, known, every, block_size):
        num_rows = len(blocks.anchors)
        same = known._replace(texts=known.texts * num_rows, tokens=known.tokens.expand(num_rows, -1))
        found += count_accepted(pair, same, hidden, blocks).flatten()[:num].tolist()
    return found


def _drafted_at(
    pair: Pair, known: KnownTexts, every: Tensor, block_size: int
) -> Iterator[tuple[int, Blocks, Tensor]]:
    """Draft at some anchors [M] of one text, a stretch of them at a time.

    Gives (num, blocks, hidden [R, sum(widths), hidden]); the first `num` blocks are theirs, others repeat the last.
    """
    (text,) = known.texts
    for some in every.split(ANCHORS_AT_ONCE) if len(every) else ():
        rows_each = -(-len(some) // ANCHORS_PER_ROW)
        anchors = torch.cat([some, some[-1:].expand(rows_each * ANCHORS_PER_ROW - len(some))])
        anchors = anchors.view(rows_each, ANCHORS_PER_ROW)
        sizes = (text.limit - anchors - 1).clamp_max(block_size)
        blocks = Blocks(anchors, known.tokens[0][anchors], sizes, (block_size,) * ANCHORS_PER_ROW)
        yield len(some), blocks, known.blocks_at(pair, blocks, rows_each)


class Offers(NamedTuple):
    """What the draft proposes at P anchors for each of D slots, and what was right."""

    ranks: Tensor
    """[P, D] int8: the place of the text's token among the k choices, -1 for none, -2 where it is not known."""
    scores: Tensor
    """[P, D, k] float16, as log_probs: those of `Candidates`."""
    log_probs: Tensor
    nodes: Tensor | None
    """[P, D] uint8: `nodes_needed` by the draft's own chances; None where a slot depends on the choices above."""


@torch.inference_mode()
def offers_at(pair: Pair, known: KnownTexts, anchors: Tensor, num_choices: int) -> Offers:
    """The best choices of the draft's trained block at some anchors [P] of one text."""
    (text,), block_size = known.texts, pair.block_size
    is_linked = pair.draft.is_sequential or pair.prepared_draft.head.edges is not None
    ends = functional.pad(known.tokens[0], (0, block_size), value=-1)
    parts = []
    for num, blocks, hidden in _drafted_at(pair, known, anchors, block_size):
        hidden = hidden.view(-1, block_size, hidden.shape[-1])[:num, 1:]
        places = blocks.anchors.flatten()[:num, None] + torch.arange(1, block_size, device=anchors.device)
        sampling = [text.sampling] * places.numel()
        before = known.tokens[0][(places - 1).clamp(max=known.tokens.shape[1] - 1)].flatten()
        found = _candidates(pair, hidden.flatten(0, 1), places.flatten().tolist(), sampling, num_choices, before)
        same = found.tokens == ends[places.flatten()][:, None]
        ranks = torch.where(same.any(dim=1), same.int().argmax(dim=1), -1).view(num, -1)
        drafted = places - places[:, :1] + 1 < blocks.sizes.flatten()[:num, None]
        ranks = torch.where(drafted & (places < len(text.tokens)), ranks, -2)
        shape = num, block_size - 1, -1
        nodes = None if is_linked else _nodes(own_chances(found)[0].view(shape), ranks, drafted.sum(dim=1))
        parts.append(Offers(ranks.char(), found.scores.half().view(shape), found.log_probs.half().view(shape), nodes))
    nodes = None if is_linked else torch.cat([part.nodes for part in parts if part.nodes is not None])
    ranks, scores, log_probs = (torch.cat(values) for values in list(zip(*parts, strict=True))[:3])
    return Offers(ranks, scores, log_probs, nodes)


def _nodes(chances: Tensor, ranks: Tensor, num_drafted: Tensor) -> Tensor:
    """`nodes_needed` [P, D] for chances [P, D, k] and ranks [P, D], of which num_drafted [P] are drafted."""
    places = zip(chances.tolist(), ranks.tolist(), num_drafted.tolist(), strict=True)
    needed = [nodes_needed(of_place[:num], right[:num]) for of_place, right, num in places]
    width = ranks.shape[1]
    return torch.tensor([of_place + [MOST_NODES + 1] * (width - len(of_place)) for of_place in needed]).byte()


def _candidates(
    pair: Pair, hidden: Tensor, positions: Sequence[int], sampling: Sequence[Sampling], num: int, before: Tensor
) -> Candidates:
    """The draft's best choices at hidden states [M, hidden], after the tokens `before` [M], HEAD_ROWS at once."""
    parts, head = [], pair.prepared_draft.head
    for start in range(0, max(len(hidden), 1), HEAD_ROWS):
        some = slice(start, start + HEAD_ROWS)
        found = draft_candidates(head, hidden[some], positions[some], sampling[some], num)
        if head.edges is not None:
            found = head.edges.link(found, hidden[some], before[some, None], sampling[some], num).found
        parts.append(found)
    return Candidates(*(torch.cat(values) for values in zip(*parts, strict=True)))


def count_accepted(pair: Pair, known: KnownTexts, hidden: Tensor, blocks: Blocks) -> Tensor:
    """Drafted tokens of every block that equal the text up to the first that does not: [R, A].

    hidden [R, sum(widths), hidden] are of the blocks' positions; row r's text is known.texts[r].
    """
    accepted = torch.zeros_like(blocks.anchors)
    lengths = torch.tensor([len(text.tokens) for text in known.texts], device=accepted.device)
    ends = torch.minimum(blocks.sizes, lengths[:, None] - blocks.anchors)
    starts = torch.tensor([0, *blocks.widths[:-1]], device=accepted.device).cumsum(0)
    row, block = (ends > 1).nonzero(as_tuple=True)
    for slot in range(1, max(blocks.widths)):
        positions = blocks.anchors[row, block] + slot
        drawn = _draw(pair, known, hidden[row, starts[block] + slot], positions, row)
        right = drawn == known.tokens[row, positions]
        row, block = row[right], block[right]
        accepted[row, block] += 1
        further = ends[row, block] > slot + 1
        row, block = row[further], block[further]
        if not len(row):
            break
    return accepted


def _draw(pair: Pair, known: KnownTexts, hidden: Tensor, positions: Tensor, row: Tensor) -> Tensor:
    """The draft's tokens, drawn as the engine does: hidden [M, hidden] -> [M]."""
    sampling = [known.texts[i].sampling for i in row.tolist()]
    before = known.tokens[row, positions - 1]
    return _candidates(pair, hidden, positions.tolist(), sampling, 1, before).tokens[:, 0]
