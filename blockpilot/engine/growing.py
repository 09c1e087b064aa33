"""Candidates of a step's rows with their chances, and the trees that grow of them.

Candidates are a draft's choices for every slot and the paths that rows' own texts offer. Trees grow best first
(trees.py; in C, native/growing.c); the controller says how many of their nodes are worth verifying.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import OF_PATH, Array, Paths
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, Verified
from blockpilot.drafts.choices import Linked
from blockpilot.engine.constrained import NO_SLOTS, allowed
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH, Node, Slots, best_first, choices_of, places_of
from blockpilot.native.growing import Lists, Nodes, grow, with_paths
from blockpilot.native.library import has_functions
from blockpilot.types import DRAFTED, LOOKED_UP, Candidates, Step


class Offered(NamedTuple):
    """Candidates for R rows of a step, `slots` in its batch: a draft's, `drafted` [R] positions of each, and paths.

    drawn [R]: rows whose tokens are drawn, where there are paths. unknown: list of the next slot that follows a token
    which is none of the choices.
    """

    slots: Sequence[int]
    drafted: Array
    lists: Lists
    drawn: Array | None = None
    unknown: int = 0

    def of_row(self, r: int) -> Slots:
        """As lists, of one row."""
        first, depth = self.lists.firsts[r], self.lists.depths[r]
        tokens, chances, places = self.lists.tokens, self.lists.chances, self.lists.places
        some = slice(first, first + depth)
        of_slots = list[list[list[int]]]()
        for lists in tokens[some].tolist():
            # Empty places, at the ends of lists that paths share, have no token.
            of_slots.append([[token for token in tokens_after if token >= 0] for tokens_after in lists])
        sources = None
        choices, steps = self.lists.choices, self.lists.steps
        if choices is not None and steps is not None:
            sources = (DRAFTED * (choices[some] >= 0) + LOOKED_UP * (steps[some] >= 0)).tolist()
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
    firsts, of_rows, below, known = _slots_of(tuple(depths), tuple(adapts), num_lists)
    shape = sum(depths), num_lists, choices.tokens.shape[1]
    places = np.zeros(shape, dtype=np.int64) if links is None else links.numpy(force=True).astype(np.int64)
    proposal = controller.propose(known, choices, below)
    tokens = np.ascontiguousarray(choices.tokens.numpy(force=True), dtype=np.int64).reshape(shape)
    lists = Lists(firsts, of_rows, tokens, proposal.chances.reshape(-1, *shape), places)
    return Offered(slots, of_rows, lists, unknown=0 if links is None else -1)


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
    return Offered(slots, drafted, found, drawn, unknown)


@lru_cache(maxsize=64)
def _slots_of(depths: tuple[int, ...], adapts: tuple[bool, ...], num_lists: int) -> tuple[Array, Array, Array, Array]:
    """First slots and depths [R] of rows; of each list of choices the place below the anchor, and if it adapts."""
    of_rows = np.array(depths, dtype=np.int64)
    ends = of_rows.cumsum()
    firsts = ends - of_rows
    below = np.arange(ends[-1]) - firsts.repeat(of_rows)
    return firsts, of_rows, below.repeat(num_lists), np.array(adapts).repeat(of_rows).repeat(num_lists)


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
    trees = list[list[Node]]([] for _ in rows)
    limits = [most if row.adapts else max(0, row.next_block_size - 1) for row in rows]
    places = {slot: i for i, slot in enumerate(offered.slots)} if offered is not None else {}
    # 1. Rows grow in C; those with an automaton, which may force tokens that nobody offered, one by one.
    in_c, apart = list[int](), list[int]()
    for slot, row in enumerate(rows):
        if row.automaton is not None or (slot in places and not has_functions()):
            apart.append(slot)
        elif slot in places:
            in_c.append(slot)
    growing = [*in_c, *apart]
    if not growing:
        return trees
    parts = [_grown(offered, rows, in_c, places, limits, most)] if offered is not None and in_c else []
    if apart:
        parts.append(_listed([_nodes(rows[slot], offered, places.get(slot), limits[slot]) for slot in apart], most))
    grown = parts[0] if len(parts) == 1 else Nodes._make(map(np.concatenate, zip(*parts, strict=True)))
    # 2. How many nodes of each are verified: the controller says so of rows that adapt.
    sizes, free = grown.num.copy(), [i for i, slot in enumerate(growing) if rows[slot].adapts]
    if free:
        slots = np.array(growing)[free]
        drafted = np.zeros(len(rows), dtype=np.int64)
        if offered is not None:
            drafted[list(offered.slots)] = offered.drafted
        # Depth of what is drafted, 0 of what is looked up, -1 of what is neither: forced.
        depths = np.where(grown.steps >= 0, 0, np.where(grown.choices >= 0, grown.depths, -1))
        of_trees = grown.num[free], grown.chances[free], depths[free]
        sizes[free] = select(Trees(kinds[slots], drafted[slots], *of_trees))
    for slot, nodes in zip(growing, _first(grown, sizes), strict=True):
        trees[slot] = nodes
    return trees


def _first(trees: Nodes, sizes: Array) -> list[list[Node]]:
    """The first sizes[r] nodes of every tree."""
    taken = np.arange(trees.chances.shape[1]) < sizes[:, None]
    nodes = map(Node, *(values[taken].tolist() for values in trees[:-1]))
    return [list(islice(nodes, size)) for size in sizes.tolist()]


def _listed(trees: Sequence[Sequence[Node]], most: int) -> Nodes:
    kinds = (int, int, float, int, int, int, int, int)
    arrays = [np.zeros((len(trees), most), dtype=kind) for kind in kinds]
    for r, nodes in enumerate(trees):
        for values, of_nodes in zip(arrays, zip(*nodes, strict=True), strict=False):
            values[r, : len(nodes)] = of_nodes
    return Nodes._make([*arrays, np.array(list(map(len, trees)))])


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
    return found


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
    tokens_of = {step.request_id: step.tokens for step in steps}
    told, taken, emitted = list[Sequence[Node]](), list[Sequence[int]](), list[Sequence[int]]()
    for row, nodes, path in zip(rows, drafts, paths, strict=True):
        if row.adapts and row.request_id in tokens_of:
            told.append(nodes)
            taken.append(path)
            emitted.append(tokens_of[row.request_id])
    return verified(told, taken, emitted, offered)


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
        # A node is known if its parent is on the accepted path.
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
    if offered is not None and offered.lists.inputs is not None and offered.drawn is not None:
        inputs, drawn = offered.lists.inputs, offered.drawn
        of_paths = inputs.reshape(-1, len(OF_PATH))[of_steps[0]], drawn[of_steps[0] // inputs.shape[1]]
    choice, laters, chosen = of_choices
    return Verified(choice, laters, chosen.astype(bool), *of_paths, of_steps[1].astype(bool))
