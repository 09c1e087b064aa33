"""The draft over a cache of its own: it proposes choices for every slot, and is kept up with what became final.

The target's features of every final token of a row that may draft go into the cache at once, also in steps in which
the row decodes plainly: a draft that misses part of its context is accepted less, and nothing else would show it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

from torch import Tensor

from blockpilot.drafts.choices import Linked, own_chances
from blockpilot.drafts.head import DraftHead
from blockpilot.drafts.interface import Asked, PreparedDraft
from blockpilot.drafts.markov import WIDTH
from blockpilot.engine.constrained import NO_SLOTS, best_allowed
from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import candidates
from blockpilot.engine.trees import MAX_DEPTH, Node, Slots, best_first, drawn_apart, first_choices, tree_of
from blockpilot.engine.work import Final
from blockpilot.models.graphs import Graphs
from blockpilot.types import NO_TREE, Candidates, Forecast, Reader, Sampling, Tree


class Drafter:
    """A draft and its cache of `num_slots` slots."""

    def __init__(self, draft: PreparedDraft, num_slots: int, length: int) -> None:
        self._draft = draft
        self.cache = draft.new_cache(num_slots, length)

    def propose(self, rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int) -> list[Slots]:
        """The `num` best choices for each of the depths[r] (1 or more) positions after the anchor of every row [R].

        The rows lie in `slots` [R]. Draft and target draw a position's token with the same key: where their
        distributions agree, so do the tokens, at any temperature.
        """
        found = self.proposed(rows, slots, depths, num)
        if isinstance(found, Linked):
            return linked_with_chances(found, rows, depths)
        return with_chances(found, rows, depths)

    def proposed(
        self, rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int
    ) -> Candidates | Linked:
        """Choices on the device, before anybody has given them their chances."""
        starts, anchors = [row.anchor_position for row in rows], [row.tokens[-1] for row in rows]
        sampling = [row.request.sampling for row in rows]
        width = num if any(row.is_tree for row in rows) else 1

        def choose(hidden: Tensor, of_rows: Sequence[int], positions: Sequence[int]) -> Candidates:
            head, own = self._draft.head, [sampling[r] for r in of_rows]
            if all(rows[r].processor is None for r in set(of_rows)):
                return draft_candidates(head, hidden, positions, own, num, self.cache.graphs)
            return _changed_candidates(head, hidden, positions, [rows[r] for r in of_rows], num)

        asked = Asked(slots, starts, anchors, depths, sampling, num, width)
        return self._draft.propose(asked, self.cache, choose)

    def keep_up(self, features: Tensor, following: Sequence[int], final: Final) -> Tensor:
        """Take in final tokens with the target's features [N, F], and those that follow them [N].

        Returns their context vectors [N, hidden].
        """
        return self._draft.keep_up(features, following, final.slots, final.packing, self.cache)


def grow_all(
    rows: Sequence[Row],
    proposed: Mapping[int, Slots],
    buy: Callable[[Sequence[Iterator[Node]], int], list[list[Node]]],
    most: int,
) -> list[Tree]:
    """Trees to verify of rows [R], those of `proposed` with slots: a row with a forecast has what `buy` takes for it.

    most: tokens of a tree.
    """
    trees, free = [NO_TREE] * len(rows), dict[int, Iterator[Node]]()
    for r, row in enumerate(rows):
        slots = proposed.get(r, NO_SLOTS)
        fixed = row.next_block_size - 1
        if row.automaton is not None:
            deepest = min(row.deepest, MAX_DEPTH) if row.is_tree else row.deepest
            nodes = best_allowed(row.automaton, slots, deepest, is_chain=not row.is_tree)
            fixed = fixed if row.can_draft or row.request.block_size else most  # what is forced needs no draft
        elif r not in proposed:
            continue
        else:
            nodes = best_first(slots if row.is_tree else slots.first_choices())
        if row.forecast is not None:
            free[r] = nodes
        elif row.is_tree or row.automaton is not None:
            trees[r] = tree_of(islice(nodes, fixed))
        else:
            trees[r] = first_choices(slots)
    bought = buy(list(free.values()), most) if free else []
    for r, taken in zip(free, bought, strict=True):
        trees[r] = tree_of(taken)
    return trees


def draft_candidates(
    head: DraftHead,
    hidden: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    graphs: Graphs | None = None,
) -> Candidates:
    """The draft's `num` best choices at hidden states [N, hidden]; at least WIDTH for a Markov head to link."""
    return candidates(head(hidden), positions, sampling, _num_of(head, num), head.subset, graphs)


def _num_of(head: DraftHead, num: int) -> int:
    return num if head.markov is None else max(num, WIDTH)


def _changed_candidates(
    head: DraftHead, hidden: Tensor, positions: Sequence[int], rows: Sequence[Row], num: int
) -> Candidates:
    """`draft_candidates` for rows [N] of which some have logits processors, which change the draft's logits alike."""
    logits = head(hidden)
    logits = logits if head.subset is None else head.subset.expanded(logits)
    logits = logits.float()
    by_row: dict[Row, list[int]] = {}
    for i, row in enumerate(rows):
        by_row.setdefault(row, []).append(i)
    for row, places in by_row.items():
        if row.processor is not None:
            logits[places] = row.processor(logits[places], row.tokens, [positions[i] for i in places])
    return candidates(logits, positions, [row.request.sampling for row in rows], _num_of(head, num))


def with_chances(found: Candidates, rows: Sequence[Row], depths: Sequence[int]) -> list[Slots]:
    """Each row's slots [R], with the chances that its policy or else the draft itself gives them.

    `found` are those of depths[r] positions of every row, N in all.
    """
    tokens = _split(found.tokens.tolist(), depths)
    chances = _chances(found, [row.forecast for row in rows], depths)
    return [drawn_apart(*of_row) for of_row in zip(tokens, chances, strict=True)]


def linked_with_chances(linked: Linked, rows: Sequence[Row], depths: Sequence[int]) -> list[Slots]:
    """`with_chances` of slots that depend on the choices above: [N * P, k], N positions in all.

    A policy is asked of every choice above as if it were a row of its own, and at last of the chain, which a reader
    that learns from chains keeps.
    """
    num, width = linked.places.shape[:2]
    places, tokens = linked.places.tolist(), linked.found.tokens.view(num, width, -1).tolist()
    index, repeated, forecasts, start = list[int](), list[int](), list[Forecast | None](), 0
    for row, depth in zip(rows, depths, strict=True):
        positions = range(start, start + depth)
        index += [position * width + after for after in range(width) for position in positions]
        after = 0
        for position in positions:
            index.append(position * width + after)
            after = places[position][after][0]
        repeated += [depth] * (width + 1)
        forecasts += [row.forecast] * (width + 1)
        start += depth
    chances = _chances(linked.found.at(index), forecasts, repeated)
    slots = []
    of_rows = zip(_split(tokens, depths), _split(places, depths), strict=True)
    for r, (of_tokens, of_places) in enumerate(of_rows):
        after_each = chances[r * (width + 1) : (r + 1) * (width + 1) - 1]  # [P][A][D][K]
        by_context = zip(*after_each, strict=True)
        slots.append(Slots(of_tokens, [list(zip(*at, strict=True)) for at in by_context], of_places))
    return slots


def _split(values: list[Any], depths: Sequence[int]) -> list[list[Any]]:
    """Those of every row."""
    ends = list(accumulate(depths))
    return [values[end - depth : end] for end, depth in zip(ends, depths, strict=True)]


def _chances(
    found: Candidates, forecasts: Sequence[Forecast | None], depths: Sequence[int]
) -> list[list[list[list[float]]]]:
    """Chances [A][D][K] of every row's choices [R], by its policy or else the draft itself."""
    ends = list(accumulate(depths))
    by_reader: dict[Reader | None, list[int]] = {}
    for r, forecast in enumerate(forecasts):
        by_reader.setdefault(None if forecast is None else forecast.reader, []).append(r)
    chances: dict[int, list[list[list[float]]]] = {}
    for reader, members in by_reader.items():
        some, of_members = found, [depths[r] for r in members]
        if len(by_reader) > 1:
            some = found.at([i for r in members for i in range(ends[r] - depths[r], ends[r])])
        if reader is None:
            given = own_chances(some)
        else:
            given = reader.chances([forecasts[r] for r in members], some, of_members)
        of_rows = zip(*(_split(at, of_members) for at in given.tolist()), strict=True)
        chances.update(zip(members, map(list, of_rows), strict=True))
    return [chances[r] for r in range(len(forecasts))]
