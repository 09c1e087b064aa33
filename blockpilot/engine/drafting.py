"""The draft over a cache of its own: it proposes choices for every slot, and its cache holds what became final.

The target's features of every final token of a row that may draft are kept, also of steps in which the row decodes
plainly: a draft that misses part of its context is accepted less, and nothing else would show it. They go into the
cache together before the row drafts: in runs of plain steps one token at a time would cost 3% of a step.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockpilot.control.acceptance import Array
from blockpilot.control.choose import Trees
from blockpilot.control.controller import NOTHING_VERIFIED, Controller, Verified
from blockpilot.device import tensor_on
from blockpilot.drafts.choices import Linked
from blockpilot.drafts.head import DraftHead
from blockpilot.drafts.interface import Asked, PreparedDraft
from blockpilot.drafts.markov import WIDTH
from blockpilot.engine.constrained import NO_SLOTS, best_allowed
from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import candidates
from blockpilot.engine.trees import MAX_DEPTH, Node, Slots, best_first, places_of
from blockpilot.engine.work import Work
from blockpilot.models.graphs import Graphs
from blockpilot.models.packing import Packing, SideBySide
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

    def note(self, work: Work, paths: Sequence[Sequence[int]], chosen: Sequence[int], features: Tensor) -> None:
        """Keep the target's features of a step's tokens [N, F] that are final, of rows that may draft.

        paths [R] are the accepted ones of blocks, chosen [M] the target's choices.
        """
        final, following = work.final(paths), work.following(chosen)
        of_final = features[tensor_on(features.device, [place for places in final.values() for place in places])]
        of_rows = of_final.split([len(places) for places in final.values()])
        for (row, places), of_row in zip(final.items(), of_rows, strict=True):
            row.features.append(of_row)
            row.following += [following[place] for place in places]

    def keep_up(self, rows: Sequence[Row], slots: Sequence[int]) -> dict[Row, Tensor]:
        """Take in what the cache lacks of rows [R] in these slots.

        Returns the context vector [hidden] of the last token of each row that lacked any.
        """
        lacking = [(row, slot) for row, slot in zip(rows, slots, strict=True) if row.following]
        if not lacking:
            return {}
        sizes = [len(row.following) for row, _ in lacking]
        features = torch.cat([of_step for row, _ in lacking for of_step in row.features])
        following = [token for row, _ in lacking for token in row.following]
        packing = SideBySide([Packing(sizes, [row.num_drafted_from for row, _ in lacking], features.device)])
        vectors = self._draft.keep_up(features, following, [slot for _, slot in lacking], packing, self.cache)
        for (row, _), size in zip(lacking, sizes, strict=True):
            row.num_drafted_from += size
            row.features, row.following = [], []
        last = vectors[tensor_on(vectors.device, [end - 1 for end in accumulate(sizes)])]
        return {row: vector for (row, _), vector in zip(lacking, last, strict=True)}


class Offered(NamedTuple):
    """Candidates of a draft for the rows of a step, on the host: N slots with P lists of K choices each.

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
    choices, links = (found.found, found.places) if isinstance(found, Linked) else (found, None)
    num_lists = 1 if links is None else links.shape[1]
    slots = _slots_of(tuple(depths), tuple(adapts), num_lists)
    shape = sum(depths), num_lists, choices.tokens.shape[1]
    places = np.zeros(shape, dtype=np.int64) if links is None else links.numpy(force=True).astype(np.int64)
    proposal = controller.propose(slots.known, choices, slots.below)
    tokens = choices.tokens.numpy(force=True).reshape(shape)
    return Offered(slots.firsts, slots.depths, tokens, proposal.chances.reshape(-1, *shape), places)


class _SlotsOfRows(NamedTuple):
    """First slots and depths [R] of rows; of each list of choices the place below the anchor, and if it adapts."""

    firsts: Array
    depths: Array
    below: Array
    known: Array


@lru_cache(maxsize=64)
def _slots_of(depths: tuple[int, ...], adapts: tuple[bool, ...], num_lists: int) -> _SlotsOfRows:
    of_rows = np.array(depths)
    ends = of_rows.cumsum()
    firsts = ends - of_rows
    below = np.arange(ends[-1]) - firsts.repeat(of_rows)
    return _SlotsOfRows(firsts, of_rows, below.repeat(num_lists), np.array(adapts).repeat(of_rows).repeat(num_lists))


Select = Callable[[Trees], Array]
"""Number of nodes to verify of every tree."""


def grow_all(
    rows: Sequence[Row], slots: Sequence[int], offered: Offered | None, select: Select, most: int
) -> list[list[Node]]:
    """Nodes to verify of rows [R]: a row that adapts has as many as `select` says, others their fixed size.

    `slots` are those that draft, with what is offered them. most: nodes of a tree.
    """
    places = {slot: i for i, slot in enumerate(slots)}
    limits = [most if row.adapts else row.next_block_size - 1 for row in rows]
    in_c = [slot for slot in slots if rows[slot].automaton is None]
    grown = _grown(offered, rows, in_c, [places[slot] for slot in in_c], limits, most) if offered and in_c else None
    in_c = in_c if grown is not None else []
    others = sorted({*slots, *(slot for slot, row in enumerate(rows) if row.automaton is not None)} - {*in_c})
    listed = [_nodes(rows[slot], offered, places.get(slot), limits[slot]) for slot in others]
    growing, found = [*in_c, *others], list[list[Node]]([] for _ in rows)
    if not growing:
        return found
    num, chances, depths = _nodes_of(grown, listed, most)
    sizes, free = num.tolist(), [i for i, slot in enumerate(growing) if rows[slot].adapts]
    if free:
        drawn = np.array([int(not rows[growing[i]].request.sampling.is_greedy) for i in free])
        of_slots = dict(zip(slots, offered.depths.tolist(), strict=True)) if offered is not None else {}
        drafted = np.array([of_slots.get(slot, 0) for slot in growing])
        some = slice(None) if len(free) == len(growing) else free
        selected = select(Trees(drawn, drafted[some], num[some], chances[some], depths[some]))
        for i, size in zip(free, selected.tolist(), strict=True):
            sizes[i] = size
    taken = _take(offered, grown, sizes[: len(in_c)]) if offered is not None and grown is not None else []
    taken += [nodes[:size] for nodes, size in zip(listed, sizes[len(in_c) :], strict=True)]
    for slot, nodes in zip(growing, taken, strict=True):
        found[slot] = nodes
    return found


def _nodes_of(grown: Grown | None, listed: Sequence[Sequence[Node]], most: int) -> tuple[Array, Array, Array]:
    """Number of nodes [R], and their chances and depths [R, most], of those grown in C and of others."""
    if grown is not None and not listed:
        return grown.num, grown.chances, grown.depths
    num = np.array([len(nodes) for nodes in listed])
    chances, depths = np.zeros((len(num), most)), np.zeros((len(num), most), dtype=int)
    for r, nodes in enumerate(listed):
        chances[r, : num[r]], depths[r, : num[r]] = [n.chance for n in nodes], [n.depth for n in nodes]
    if grown is None:
        return num, chances, depths
    pairs = (grown.num, num), (grown.chances, chances), (grown.depths, depths)
    return tuple(np.concatenate(pair) for pair in pairs)  # type: ignore[return-value]


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
    offered: Offered,
    rows: Sequence[Row],
    slots: Sequence[int],
    places: Sequence[int],
    limits: Sequence[int],
    most: int,
) -> Grown | None:
    """Nodes of rows in these slots and places of an offer: trees of all choices, or chains of the first ones.

    None without C.
    """
    whole = len(places) == len(offered.firsts)
    firsts, depths = (offered.firsts, offered.depths) if whole else (offered.firsts[places], offered.depths[places])
    widest = np.array([offered.places.shape[2] if rows[slot].is_tree else 1 for slot in slots])
    sizes = np.array([limits[slot] for slot in slots])
    sizes = np.where(widest > 1, sizes, np.minimum(sizes, depths))
    return grow(offered.chances, offered.places, firsts, depths, sizes, widest, most)


def _take(offered: Offered, found: Grown, sizes: Sequence[int]) -> list[list[Node]]:
    """The first sizes[r] nodes of every row [R]."""
    taken = np.arange(found.chances.shape[1]) < np.array(sizes)[:, None]
    choices, width = found.choices[taken], offered.places.shape[2]
    tokens = offered.tokens.reshape(-1)[choices].tolist()
    columns = (values[taken].tolist() for values in (found.chances, found.parents, found.laters, found.depths))
    nodes = iter(
        [
            Node(token, parent, chance, depth, later + choice % width == 0, choice, later)
            for token, choice, chance, parent, later, depth in zip(tokens, choices.tolist(), *columns, strict=True)
        ]
    )
    return [list(islice(nodes, size)) for size in sizes]


def _nodes(row: Row, offered: Offered | None, r: int | None, limit: int) -> list[Node]:
    """Nodes of one row, the r-th of the offer if any; of one with an automaton those that it allows."""
    slots = NO_SLOTS if offered is None or r is None else offered.of_row(r)
    if row.automaton is not None:
        deepest = min(row.deepest, MAX_DEPTH) if row.is_tree else row.deepest
        return list(islice(best_allowed(row.automaton, slots, deepest, is_chain=not row.is_tree), max(limit, 0)))
    assert offered is not None
    assert r is not None
    start = int(offered.firsts[r]) * offered.places[0].size
    nodes = islice(best_first(slots if row.is_tree else slots.first_choices()), limit)
    return [node._replace(choice=start + node.choice) for node in nodes]


def verified(
    drafts: Sequence[Sequence[Node]], paths: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]
) -> Verified:
    """Outcomes of nodes of rows [R]: paths [R] are the places in their trees whose tokens went before emitted [R],
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
