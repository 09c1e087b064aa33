"""The draft over a cache of its own: it proposes choices for every slot, and is kept up with what became final.

The target's features of every final token of a row that may draft go into the cache at once, also in steps in which
the row decodes plainly: a draft that misses part of its context is accepted less, and nothing else would show it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from blockpilot.control.acceptance import Array
from blockpilot.control.controller import NOTHING_VERIFIED, Controller, Verified
from blockpilot.drafts.choices import Linked
from blockpilot.drafts.head import DraftHead
from blockpilot.drafts.interface import Asked, PreparedDraft
from blockpilot.drafts.markov import WIDTH
from blockpilot.engine.constrained import NO_SLOTS, best_allowed
from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import candidates
from blockpilot.engine.trees import MAX_DEPTH, Node, Slots, best_first, places_of
from blockpilot.engine.work import Final
from blockpilot.models.graphs import Graphs
from blockpilot.native.growing import Grown, grow
from blockpilot.types import Candidates, Sampling

Select = Callable[[Sequence[Array]], list[int]]
"""How many nodes of every row are verified, given the chances [n] of each by falling chance."""


class Drafter:
    """A draft and its cache of `num_slots` slots."""

    def __init__(self, draft: PreparedDraft, num_slots: int, length: int) -> None:
        self._draft = draft
        self.cache = draft.new_cache(num_slots, length)

    def propose(
        self, rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int
    ) -> Candidates | Linked:
        """The `num` best choices for each of the depths[r] (1 or more) positions after the anchor of every row [R].

        The rows lie in `slots` [R]. Draft and target draw a position's token with the same key: where their
        distributions agree, so do the tokens, at any temperature.
        """
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


class Offered(NamedTuple):
    """What a draft offers the rows of a step, on the host: N slots with P lists of K choices each.

    A row's slots follow each other: firsts[r] is its first one, depths[r] how many it has. chances [A, N, P, K] and
    places [N, P, K] as in `Slots`; tokens [N * P * K].
    """

    firsts: list[int]
    depths: list[int]
    tokens: list[int]
    chances: Array
    places: Array

    def of_row(self, r: int) -> Slots:
        """As lists, of one row."""
        some = slice(self.firsts[r], self.firsts[r] + self.depths[r])
        places = self.places[some]
        size = places[0].size if len(places) else 0
        tokens = np.array(self.tokens[some.start * size : some.stop * size], dtype=int).reshape(places.shape)
        return Slots(tokens.tolist(), self.chances[:, some].tolist(), places.tolist())


def offer(found: Candidates | Linked, rows: Sequence[int], depths: Sequence[int], controller: Controller) -> Offered:
    """Choices with their chances: rows [R] are places among those that the controller has planned, -1 for others."""
    candidates, places = (found.found, found.places.numpy(force=True)) if isinstance(found, Linked) else (found, None)
    num, k = sum(depths), candidates.tokens.shape[1]
    places = np.zeros((num, 1, k), dtype=np.int64) if places is None else places.astype(np.int64)
    per_slot = places.shape[1]
    of_slots = np.repeat(np.repeat(np.array(rows), depths), per_slot)
    below = np.repeat(np.concatenate([np.arange(depth) for depth in depths]), per_slot)
    proposal = controller.propose(of_slots, candidates, below)
    ends = np.cumsum(depths)
    chances = np.ascontiguousarray(proposal.chances.reshape(-1, num, per_slot, k))
    return Offered((ends - depths).tolist(), list(depths), candidates.tokens.flatten().tolist(), chances, places)


class _Growth(NamedTuple):
    """Nodes of a row by falling chance; `take` makes the first so many."""

    chances: Array
    take: Callable[[int], list[Node]]


def grow_all(
    rows: Sequence[Row], slots: Sequence[int], offered: Offered | None, select: Select, most: int
) -> list[list[Node]]:
    """Nodes to verify of rows [R]: a row that adapts has as many as `select` says, others their fixed size.

    `slots` are those that draft, with what is offered them. most: nodes of a tree.
    """
    place, growths = {slot: i for i, slot in enumerate(slots)}, dict[int, _Growth]()
    sizes = [most if row.adapts else row.next_block_size - 1 for row in rows]
    drafted = [slot for slot in slots if rows[slot].automaton is None]
    if offered is not None and drafted:
        places = [place[slot] for slot in drafted]
        widest = [offered.places.shape[2] if rows[slot].is_tree else 1 for slot in drafted]
        limits = [min(sizes[slot], most if rows[slot].is_tree else offered.depths[place[slot]]) for slot in drafted]
        growths |= zip(drafted, _grown(offered, places, widest, limits, most), strict=True)
    for slot, row in enumerate(rows):
        if row.automaton is not None:
            of_row = offered.of_row(place[slot]) if offered is not None and slot in place else NO_SLOTS
            deepest = min(row.deepest, MAX_DEPTH) if row.is_tree else row.deepest
            found = list(islice(best_allowed(row.automaton, of_row, deepest, is_chain=not row.is_tree), sizes[slot]))
            growths[slot] = _listed(found)
    free = [slot for slot in growths if rows[slot].adapts]
    taken = dict(zip(free, select([growths[slot].chances for slot in free]), strict=True)) if free else {}
    return [growths[slot].take(taken.get(slot, sizes[slot])) if slot in growths else [] for slot in range(len(rows))]


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


def _grown(
    offered: Offered, rows: Sequence[int], widest: Sequence[int], limits: Sequence[int], most: int
) -> list[_Growth]:
    """Growths of rows by their places in the offer, of the widest[r] best choices of each list, up to limits[r]."""
    firsts, depths = ([values[r] for r in rows] for values in (offered.firsts, offered.depths))
    sizes = (np.array(values, dtype=np.int64) for values in (firsts, depths, limits, widest))
    found = grow(offered.chances, offered.places, *sizes, most)
    if found is None:
        return [_in_python(offered, *of_row) for of_row in zip(rows, widest, limits, strict=True)]
    made = enumerate(zip(found.num.tolist(), firsts, strict=True))
    return [_Growth(found.chances[r, :num], partial(_take, offered, found, r, first)) for r, (num, first) in made]


def _take(offered: Offered, found: Grown, r: int, first: int, num: int) -> list[Node]:
    num_contexts, width = offered.places.shape[1:]
    columns = (values[r, :num].tolist() for values in (found.choices, found.parents, found.chances, found.laters))
    return [
        Node(offered.tokens[choice], parent, chance, choice // (num_contexts * width) - first + 1,
             later + choice % width == 0, choice, later)
        for choice, parent, chance, later in zip(*columns, strict=True)
    ]  # fmt: skip


def _in_python(offered: Offered, r: int, widest: int, limit: int) -> _Growth:
    slots, start = offered.of_row(r), offered.firsts[r] * offered.places[0].size
    nodes = islice(best_first(slots if widest > 1 else slots.first_choices()), limit)
    return _listed([node._replace(choice=start + node.choice) for node in nodes])


def _listed(nodes: list[Node]) -> _Growth:
    return _Growth(np.array([node.chance for node in nodes]), lambda num: nodes[:num])


def verified(drafts: Sequence[Sequence[Node]], paths: Sequence[Sequence[int]]) -> Verified:
    """What became of nodes of rows [R]: paths [R] are the accepted ones, of places in their trees, the anchor first."""
    columns = list[tuple[int, int, float, int, int, bool, bool]]()
    for r, (nodes, path) in enumerate(zip(drafts, paths, strict=True)):
        places, on_path = places_of(nodes), set(path)
        for place, node in zip(places[1:], nodes, strict=True):
            reached, right = places[node.parent] in on_path, place in on_path
            columns.append((r, node.depth, node.chance, node.choice, node.num_later, reached, right))
    return Verified(*map(np.array, zip(*columns, strict=True))) if columns else NOTHING_VERIFIED
