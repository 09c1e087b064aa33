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

from blockpilot.control.acceptance import OF_PATH, Array, Paths
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, Verified
from blockpilot.device import tensor_on
from blockpilot.drafts.choices import Linked
from blockpilot.drafts.head import DraftHead
from blockpilot.drafts.interface import Asked, PreparedDraft
from blockpilot.engine.constrained import NO_SLOTS, allowed
from blockpilot.engine.rows import Row
from blockpilot.engine.sampling import candidates
from blockpilot.engine.trees import MAX_DEPTH, Node, Slots, best_first, choices_of, places_of
from blockpilot.engine.work import Work
from blockpilot.models.graphs import Graphs
from blockpilot.models.packing import Packing, SideBySide
from blockpilot.native.growing import Lists, grow, with_paths
from blockpilot.native.library import has_functions
from blockpilot.types import DRAFTED, LOOKED_UP, Candidates, Sampling, Step


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
    """Candidates for R rows of a step, `slots` in its batch: a draft's, `drafted` [R] positions of each, and paths.

    choices and steps [N, P, K]: flat places of the choices of `lists` among the draft's and among the paths' tokens
    [R, M], -1 for none; None where all are the draft's. inputs [R, M, len(OF_PATH)] of the paths' tokens, drawn [R].
    unknown: list of the next slot that follows a token which is none of the choices.
    """

    slots: Sequence[int]
    drafted: Array
    lists: Lists
    choices: Array | None = None
    steps: Array | None = None
    inputs: Array | None = None
    drawn: Array | None = None
    unknown: int = 0

    def of_row(self, r: int) -> Slots:
        """As lists, of one row."""
        first, depth = self.lists.firsts[r], self.lists.depths[r]
        tokens, chances, places = self.lists.tokens, self.lists.chances, self.lists.places
        some = slice(first, first + depth)
        # Empty places, at the ends of lists that paths share, have no token.
        of_slots = [[[t for t in each if t >= 0] for each in lists] for lists in tokens[some].tolist()]
        sources = None
        if self.choices is not None and self.steps is not None:
            sources = (DRAFTED * (self.choices[some] >= 0) + LOOKED_UP * (self.steps[some] >= 0)).tolist()
        return Slots(of_slots, chances[:, some].tolist(), places[some].tolist(), self.unknown, sources)


def offer(
    found: Candidates | Linked,
    slots: Sequence[int],
    adapts: Sequence[bool],
    depths: Sequence[int],
    controller: Controller,
) -> Offered:
    """A draft's choices, so deep for rows [R] in these slots, with their chances: the controller has planned those
    that adapt.
    """
    choices, links = (found.found, found.places) if isinstance(found, Linked) else (found, None)
    num_lists = 1 if links is None else links.shape[1]
    known = _slots_of(tuple(depths), tuple(adapts), num_lists)
    shape = sum(depths), num_lists, choices.tokens.shape[1]
    places = np.zeros(shape, dtype=np.int64) if links is None else links.numpy(force=True).astype(np.int64)
    proposal = controller.propose(known.adapts, choices, known.below)
    tokens = np.ascontiguousarray(choices.tokens.numpy(force=True), dtype=np.int64).reshape(shape)
    lists = Lists(known.firsts, known.depths, tokens, proposal.chances.reshape(-1, *shape), places)
    return Offered(slots, known.depths, lists, unknown=0 if links is None else -1)


def offer_paths(of_draft: Offered | None, paths: Paths, weights: Array) -> Offered:
    """Paths of all rows of a step beside what a draft offers to some, by the weights of their chances."""
    of_draft = of_draft or NOTHING_DRAFTED
    slots = sorted({*of_draft.slots, *np.flatnonzero(paths.sizes).tolist()})
    firsts, drafted = np.zeros((2, len(slots)), dtype=np.int64)
    places = [slots.index(slot) for slot in of_draft.slots]
    firsts[places], drafted[places] = of_draft.lists.firsts, of_draft.drafted
    of_rows = [np.ascontiguousarray(each[slots]) for each in paths[:4]]
    lists = of_draft.lists._replace(firsts=firsts, depths=drafted)
    tokens, sizes, known, drawn = of_rows
    found = with_paths(lists, of_draft.unknown == 0, tokens, sizes, known, drawn, weights)
    unknown = -1 if of_draft.unknown < 0 else of_draft.unknown + 1
    return Offered(slots, drafted, *found, drawn=drawn, unknown=unknown)


class _SlotsOfRows(NamedTuple):
    """First slots and depths [R] of rows; of each list of choices the place below the anchor, and if it adapts."""

    firsts: Array
    depths: Array
    below: Array
    adapts: Array


@lru_cache(maxsize=64)
def _slots_of(depths: tuple[int, ...], adapts: tuple[bool, ...], num_lists: int) -> _SlotsOfRows:
    of_rows = np.array(depths, dtype=np.int64)
    ends = of_rows.cumsum()
    firsts = ends - of_rows
    below = np.arange(ends[-1]) - firsts.repeat(of_rows)
    return _SlotsOfRows(firsts, of_rows, below.repeat(num_lists), np.array(adapts).repeat(of_rows).repeat(num_lists))


_NONE = np.zeros((2, 0), dtype=np.int64)
_NO_CHOICES = np.zeros((2, 0, 0, 0), dtype=np.int64)
NOTHING_DRAFTED = Offered(
    (), _NONE[0], Lists(_NONE[0], _NONE[1], _NO_CHOICES[0], np.zeros((1, 0, 0, 0)), _NO_CHOICES[1]), unknown=-1
)

Select = Callable[[Trees], Array]
"""Number of nodes to verify of every tree."""


def grow_all(
    rows: Sequence[Row], offered: Offered | None, kinds: Array, select: Select, most: int
) -> list[list[Node]]:
    """Nodes to verify of rows [R] of these kinds [R], `most` of each at most: as many as `select` says of a row that
    adapts, of others their fixed size.
    """
    limits = [most if row.adapts else max(0, row.next_block_size - 1) for row in rows]
    places = {slot: i for i, slot in enumerate(offered.slots)} if offered is not None else {}
    in_c = [slot for slot in places if rows[slot].automaton is None] if has_functions() else []
    forced = (slot for slot, row in enumerate(rows) if row.automaton is not None)
    others = sorted({*places, *forced} - {*in_c})
    growing, found = [*in_c, *others], list[list[Node]]([] for _ in rows)
    if not growing:
        return found
    parts = [_grown(offered, rows, in_c, places, limits, most)] if offered is not None and in_c else []
    if others:
        parts.append(_listed([_nodes(rows[slot], offered, places.get(slot), limits[slot]) for slot in others], most))
    grown = parts[0] if len(parts) == 1 else Nodes._make(map(np.concatenate, zip(*parts, strict=True)))
    sizes, free = grown.num.copy(), [i for i, slot in enumerate(growing) if rows[slot].adapts]
    if free:
        of_slots = dict(zip(offered.slots, offered.drafted.tolist(), strict=True)) if offered is not None else {}
        drafted = np.array([of_slots.get(growing[i], 0) for i in free])
        depths = np.where(grown.steps >= 0, 0, np.where(grown.choices >= 0, grown.depths, -1))
        of_rows = kinds[[growing[i] for i in free]], drafted, grown.num[free], grown.chances[free], depths[free]
        sizes[free] = select(Trees(*of_rows))
    for slot, nodes in zip(growing, grown.first(sizes), strict=True):
        found[slot] = nodes
    return found


class Nodes(NamedTuple):
    """Nodes of R trees, of each `num` [R]: arrays [R, M] of what a `Node` has."""

    tokens: Array
    parents: Array
    chances: Array
    depths: Array
    choices: Array
    laters: Array
    steps: Array
    sources: Array
    num: Array

    def first(self, sizes: Array) -> list[list[Node]]:
        """The first sizes[r] nodes of every tree."""
        taken = np.arange(self.chances.shape[1]) < sizes[:, None]
        nodes = map(Node, *(values[taken].tolist() for values in self[:-1]))
        return [list(islice(nodes, size)) for size in sizes.tolist()]


def _listed(trees: Sequence[Sequence[Node]], most: int) -> Nodes:
    kinds = (int, int, float, int, int, int, int, int)
    arrays = [np.zeros((len(trees), most), dtype=kind) for kind in kinds]
    for r, nodes in enumerate(trees):
        for values, of_nodes in zip(arrays, zip(*nodes, strict=True), strict=False):
            values[r, : len(nodes)] = of_nodes
    return Nodes._make([*arrays, np.array(list(map(len, trees)))])


def draft_candidates(
    head: DraftHead,
    hidden: Tensor,
    positions: Sequence[int],
    sampling: Sequence[Sampling],
    num: int,
    graphs: Graphs | None = None,
) -> Candidates:
    """The draft's `num` best choices at hidden states [N, hidden], or as many as its edges look at."""
    return candidates(head(hidden), positions, sampling, _num_of(head, num), head.subset, graphs)


def _num_of(head: DraftHead, num: int) -> int:
    return num if head.edges is None else max(num, head.edges.width)


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
    places: dict[int, int],
    limits: Sequence[int],
    most: int,
) -> Nodes:
    """Nodes of rows in these slots and places of an offer: trees of all choices, or chains of the first ones."""
    lists, of_slots = offered.lists, [places[slot] for slot in slots]
    if len(of_slots) < len(places):
        lists = lists._replace(firsts=lists.firsts[of_slots], depths=lists.depths[of_slots])
    widest = np.array([lists.places.shape[2] if rows[slot].is_tree else 1 for slot in slots])
    sizes = np.array([limits[slot] for slot in slots])
    sizes = np.where(widest > 1, sizes, np.minimum(sizes, lists.depths))
    found = grow(lists, sizes, widest, most)
    assert found is not None
    inside = np.arange(most) < found.num[:, None]
    flat = np.where(inside, found.choices, 0)
    choices = found.choices if offered.choices is None else offered.choices.reshape(-1)[flat]
    steps = np.full_like(flat, -1) if offered.steps is None else offered.steps.reshape(-1)[flat]
    sources = DRAFTED * (choices >= 0) + LOOKED_UP * (steps >= 0)
    of_lists = lists.tokens.reshape(-1)[flat], found.parents, found.chances, found.depths
    return Nodes._make([*of_lists, choices, found.laters, steps, sources, found.num])


def _nodes(row: Row, offered: Offered | None, r: int | None, limit: int) -> list[Node]:
    """Nodes of one row, the r-th of the offer if any; of one with an automaton those that it allows."""
    slots, start = NO_SLOTS, 0
    if offered is not None and r is not None:
        slots, start = offered.of_row(r), int(offered.lists.firsts[r]) * offered.lists.places[0].size
    follow, deepest = choices_of(slots), len(slots.tokens)
    if row.automaton is not None:
        follow = allowed(row.automaton, slots)
        deepest = min(row.deepest, MAX_DEPTH) if row.is_tree else row.deepest
    nodes = islice(best_first(follow, deepest, is_chain=not row.is_tree), limit)
    return [node if node.choice < 0 else node._replace(choice=start + node.choice) for node in nodes]


def outcomes_of(
    rows: Sequence[Row],
    drafts: Sequence[Sequence[Node]],
    paths: Sequence[Sequence[int]],
    steps: Sequence[Step],
    offered: Offered | None,
) -> Verified:
    """`verified` of the rows of a batch that adapt and emitted something in these steps."""
    emitted = {step.request_id: step.tokens for step in steps}
    told = [r for r, row in enumerate(rows) if row.adapts and row.request_id in emitted]
    of_rows = [emitted[rows[r].request_id] for r in told]
    return verified([drafts[r] for r in told], [paths[r] for r in told], of_rows, offered)


def verified(
    drafts: Sequence[Sequence[Node]],
    paths: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
    offered: Offered | None = None,
) -> Verified:
    """Outcomes of nodes of rows [R]: paths [R] are the places in their trees whose tokens went before emitted [R],
    the anchor first; `offered` has the inputs of looked-up tokens, if there are any.

    A node is right where its token was emitted, also if the text ends with it. Nodes below that are not known, and
    of rows with looked-up tokens the draft's choices are left out: they share what those leave.
    """
    choices, steps = list[tuple[int, int, bool]](), list[tuple[int, bool]]()
    for nodes, path, tokens in zip(drafts, paths, emitted, strict=True):
        if not nodes:
            continue
        places, on_path = places_of(nodes), set(path)
        is_alone = all(node.step < 0 for node in nodes)
        for node in nodes:
            if places[node.parent] in on_path:
                right = node.token == tokens[node.depth - 1]
                if node.choice >= 0 and is_alone:
                    choices.append((node.choice, node.num_later, right))
                if node.step >= 0:
                    steps.append((node.step, right))
    of_choices = np.array(choices, dtype=int).reshape(-1, 3).T
    of_steps = np.array(steps, dtype=int).reshape(-1, 2).T
    of_paths: tuple[Array, Array] = np.zeros((0, len(OF_PATH))), np.zeros(0, dtype=int)
    if offered is not None and offered.inputs is not None and offered.drawn is not None:
        inputs, drawn = offered.inputs, offered.drawn
        of_paths = inputs.reshape(-1, len(OF_PATH))[of_steps[0]], drawn[of_steps[0] // inputs.shape[1]]
    choice, laters, chosen = of_choices
    return Verified(choice, laters, chosen.astype(bool), *of_paths, of_steps[1].astype(bool))
