"""The draft over a cache of its own: it proposes choices for every slot, and is kept up with what became final.

The target's features of every final token of a row that may draft go into the cache at once, also in steps in which
the row decodes plainly: a draft that misses part of its context is accepted less, and nothing else would show it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from blockpilot.control.acceptance import Array
from blockpilot.control.choose import Trees
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

    A row's slots follow each other: firsts[r] is its first one, depths[r] how many it has. tokens and places
    [N, P, K], chances [A, N, P, K] as in `Slots`.
    """

    firsts: Array
    depths: Array
    tokens: Array
    chances: Array
    places: Array

    def of_row(self, r: int) -> Slots:
        """As lists, of one row."""
        some = slice(self.firsts[r], self.firsts[r] + self.depths[r])
        return Slots(self.tokens[some].tolist(), self.chances[:, some].tolist(), self.places[some].tolist())


def offer(
    found: Candidates | Linked, adapts: Sequence[bool], depths: Sequence[int], controller: Controller
) -> Offered:
    """Choices with their chances: the controller has planned rows [R] that adapt."""
    candidates, places = (found.found, found.places.numpy(force=True)) if isinstance(found, Linked) else (found, None)
    of_rows, (firsts, below) = np.array(depths), _slots_of(tuple(depths))
    num, k = len(below), candidates.tokens.shape[1]
    places = np.zeros((num, 1, k), dtype=np.int64) if places is None else places.astype(np.int64)
    per_slot = places.shape[1]
    known = np.array(adapts).repeat(of_rows * per_slot)
    proposal = controller.propose(known, candidates, below.repeat(per_slot))
    tokens = candidates.tokens.numpy(force=True).reshape(places.shape)
    return Offered(firsts, of_rows, tokens, proposal.chances.reshape(-1, *places.shape), places)


@lru_cache(maxsize=64)
def _slots_of(depths: tuple[int, ...]) -> tuple[Array, Array]:
    """The first slot [R] of rows of these depths, and every slot's place below its anchor."""
    ends = np.cumsum(depths)
    firsts = ends - np.array(depths)
    return firsts, np.arange(ends[-1]) - firsts.repeat(depths)


Select = Callable[[Trees], Array]
"""How many nodes of every tree are verified."""


def grow_all(
    rows: Sequence[Row],
    slots: Sequence[int],
    offered: Offered | None,
    select: Select,
    most: int,
) -> list[list[Node]]:
    """Nodes to verify of rows [R]: a row that adapts has as many as `select` says, others their fixed size.

    `slots` are those that draft, with what is offered them. most: nodes of a tree.
    """
    place = {slot: i for i, slot in enumerate(slots)}
    drafted = [slot for slot in slots if rows[slot].automaton is None]
    constrained = [slot for slot, row in enumerate(rows) if row.automaton is not None]
    growing = [*drafted, *constrained]
    if not growing:
        return [[] for _ in rows]
    limits = [most if rows[slot].adapts else rows[slot].next_block_size - 1 for slot in growing]
    growths = list[_Growth]()
    if offered is not None and drafted:
        growths += _grown(
            offered, [rows[slot] for slot in drafted], [place[slot] for slot in drafted], limits[: len(drafted)], most
        )
    for slot, limit in zip(constrained, limits[len(drafted) :], strict=True):
        of_row = offered.of_row(place[slot]) if offered is not None and slot in place else NO_SLOTS
        growths.append(_listed(_allowed(rows[slot], of_row, limit), len(of_row.tokens)))
    sizes = [len(growth.chances) for growth in growths]
    free = [i for i, slot in enumerate(growing) if rows[slot].adapts]
    if free:
        drawn = [not rows[growing[i]].request.sampling.is_greedy for i in free]
        trees = _trees([growths[i] for i in free], drawn)
        for i, size in zip(free, select(trees).tolist(), strict=True):
            sizes[i] = size
    found: list[list[Node]] = [[] for _ in rows]
    for slot, growth, size in zip(growing, growths, sizes, strict=True):
        found[slot] = growth.take(size)
    return found


class _Growth(NamedTuple):
    """Nodes [n] of a row by falling chance; `take` makes the first so many. Depths as in `Trees`."""

    chances: Array
    depths: Array
    take: Callable[[int], list[Node]]


def _trees(growths: Sequence[_Growth], drawn: Sequence[bool]) -> Trees:
    num = np.array([len(growth.chances) for growth in growths])
    trees = Trees(
        np.array(drawn, dtype=int), num, np.zeros((len(num), num.max())), np.zeros((len(num), num.max()), dtype=int)
    )
    for r, growth in enumerate(growths):
        trees.chances[r, : num[r]], trees.depths[r, : num[r]] = growth.chances, growth.depths
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


def _grown(
    offered: Offered, rows: Sequence[Row], places: Sequence[int], limits: Sequence[int], most: int
) -> list[_Growth]:
    """Growths of rows by their places in the offer: trees of all choices, chains of the first ones."""
    at, num_choices = np.array(places), offered.places.shape[2]
    firsts, depths = offered.firsts[at], offered.depths[at]
    widest = np.array([num_choices if row.is_tree else 1 for row in rows])
    sizes = np.where(widest > 1, limits, np.minimum(limits, depths))
    if (found := grow(offered.chances, offered.places, firsts, depths, sizes, widest, most)) is None:
        of_rows = zip(places, widest.tolist(), sizes.tolist(), strict=True)
        return [_in_python(offered, *of_row) for of_row in of_rows]
    return [
        _Growth(found.chances[r, :num], found.depths[r, :num], partial(_take, offered, found, r))
        for r, num in enumerate(found.num.tolist())
    ]


def _take(offered: Offered, found: Grown, r: int, num: int) -> list[Node]:
    choices = found.choices[r, :num]
    tokens, width = offered.tokens.reshape(-1)[choices].tolist(), offered.places.shape[2]
    columns = (values[r, :num].tolist() for values in (found.chances, found.parents, found.laters, found.depths))
    return [
        Node(token, parent, chance, depth, later + choice % width == 0, choice, later)
        for token, choice, chance, parent, later, depth in zip(tokens, choices.tolist(), *columns, strict=True)
    ]


def _in_python(offered: Offered, r: int, widest: int, limit: int) -> _Growth:
    slots, start = offered.of_row(r), int(offered.firsts[r]) * offered.places[0].size
    nodes = islice(best_first(slots if widest > 1 else slots.first_choices()), limit)
    return _listed([node._replace(choice=start + node.choice) for node in nodes], len(slots.tokens))


def _allowed(row: Row, slots: Slots, limit: int) -> list[Node]:
    """Nodes that a row's automaton allows."""
    assert row.automaton is not None
    deepest = min(row.deepest, MAX_DEPTH) if row.is_tree else row.deepest
    return list(islice(best_allowed(row.automaton, slots, deepest, is_chain=not row.is_tree), max(limit, 0)))


def _listed(nodes: list[Node], drafted: int) -> _Growth:
    """Nodes of a row that drafted so many positions: below them, and where it drafted none, they are forced."""
    chances = [node.chance for node in nodes]
    depths = [node.depth if node.depth <= drafted else 0 for node in nodes]
    return _Growth(np.array(chances, dtype=float), np.array(depths, dtype=int), lambda num: nodes[:num])


def verified(
    drafts: Sequence[Sequence[Node]], paths: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]
) -> Verified:
    """What became of nodes of rows [R]: paths [R] are the places in their trees whose tokens went before emitted [R],
    the anchor first.

    A node is right where its token was emitted, also if the text ends with it. Nodes below that are not known.
    """
    columns = list[tuple[int, int, bool]]()
    for nodes, path, tokens in zip(drafts, paths, emitted, strict=True):
        places, on_path = places_of(nodes), set(path)
        columns += [
            (node.choice, node.num_later, node.token == tokens[node.depth - 1])
            for node in nodes
            if node.choice >= 0 and places[node.parent] in on_path
        ]
    return Verified(*map(np.array, zip(*columns, strict=True))) if columns else NOTHING_VERIFIED
