"""Candidates for a step's rows with their acceptance probabilities, and the trees grown from them.

Candidates are the draft's choices for every slot, and paths from prompt lookup. Trees grow best first (trees.py; in
C, native/growing.c); the controller selects how many of their nodes are verified.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import OF_PATH, Array, Paths
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, VerifiedNodes
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.engine.constrained import NO_SLOTS, allowed
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH, Node, Slots, best_first, choices_of, tree_order
from blockpilot.native.growing import Lists, Nodes, OrderedNodes, grow, ordered, with_paths
from blockpilot.native.library import has_functions
from blockpilot.types import DRAFTED, LOOKED_UP, Candidates, Step, Tree


class StepCandidates(NamedTuple):
    """Candidates for R rows, in `slots` of the batch: a draft's choices for `drafted` [R] positions, and paths.

    drawn [R]: 1 for rows with a temperature above 0, 0 for greedy ones; None without paths. unknown: index of the
    next slot's list after a token that is not one of the choices (`Slots.unknown`).
    """

    slots: Sequence[int]
    drafted: Array
    lists: Lists
    drawn: Array | None = None
    unknown: int = 0

    def row_slots(self, r: int) -> Slots:
        """The candidates of row r as Python lists."""
        first, depth = self.lists.firsts[r], self.lists.depths[r]
        tokens, chances, next_lists = self.lists.tokens, self.lists.chances, self.lists.next_lists
        span = slice(first, first + depth)
        token_lists = list[list[list[int]]]()
        for lists in tokens[span].tolist():
            # Lists that a path was merged into may have empty entries (-1) at their ends.
            token_lists.append([[token for token in tokens_after if token >= 0] for tokens_after in lists])
        sources = None
        choice_index, path_index = self.lists.choice_index, self.lists.path_index
        if choice_index is not None and path_index is not None:
            sources = (DRAFTED * (choice_index[span] >= 0) + LOOKED_UP * (path_index[span] >= 0)).tolist()
        return Slots(token_lists, chances[:, span].tolist(), next_lists[span].tolist(), self.unknown, sources)


def score_candidates(
    proposed: Candidates | ConditionalCandidates,
    slots: Sequence[int],
    adapts: Sequence[bool],
    depths: Sequence[int],
    controller: Controller,
) -> StepCandidates:
    """A draft's choices, with acceptance probabilities, for rows [R] in `slots`: depths[r] positions of row r.

    adapts [R]: rows whose depth the controller planned.
    """
    choices, links = (
        (proposed.candidates, proposed.next_lists)
        if isinstance(proposed, ConditionalCandidates)
        else (proposed, None)
    )
    num_lists = 1 if links is None else links.shape[1]
    firsts, drafted, below, planned = _slots_of(tuple(depths), tuple(adapts), num_lists)
    shape = sum(depths), num_lists, choices.tokens.shape[1]
    next_lists = np.zeros(shape, dtype=np.int64) if links is None else links.numpy(force=True).astype(np.int64)
    proposal = controller.propose(planned, choices, below)
    tokens = np.ascontiguousarray(choices.tokens.numpy(force=True), dtype=np.int64).reshape(shape)
    lists = Lists(firsts, drafted, tokens, proposal.chances.reshape(-1, *shape), next_lists)
    return StepCandidates(slots, drafted, lists, unknown=0 if links is None else -1)


def merge_paths(draft_candidates: StepCandidates | None, paths: Paths, weights: Array) -> StepCandidates:
    """Merge the paths of all rows of a step into the draft's candidates; weights: those of the path regression."""
    draft_candidates = draft_candidates or NOTHING_DRAFTED
    slots, lists, drafted = list(draft_candidates.slots), draft_candidates.lists, draft_candidates.drafted
    if carried := set(np.flatnonzero(paths.sizes).tolist()).difference(slots):
        slots = sorted({*slots, *carried})
        firsts, drafted = np.zeros((2, len(slots)), dtype=np.int64)
        indices = [slots.index(slot) for slot in draft_candidates.slots]
        firsts[indices], drafted[indices] = lists.firsts, draft_candidates.drafted
        lists = lists._replace(firsts=firsts, depths=drafted)
    is_whole = len(slots) == len(paths.sizes)
    tokens, sizes, matches, drawn = (values if is_whole else values[slots] for values in paths[:4])
    merged = with_paths(lists, draft_candidates.unknown == 0, tokens, sizes, matches, drawn, weights)
    unknown = -1 if draft_candidates.unknown < 0 else draft_candidates.unknown + 1
    return StepCandidates(slots, drafted, merged, drawn, unknown)


@lru_cache(maxsize=64)
def _slots_of(depths: tuple[int, ...], adapts: tuple[bool, ...], num_lists: int) -> tuple[Array, Array, Array, Array]:
    """First slots [R] and depths [R] of rows; for each list its slot below the anchor, and whether its row adapts."""
    drafted = np.array(depths, dtype=np.int64)
    ends = drafted.cumsum()
    firsts = ends - drafted
    below = np.arange(ends[-1]) - firsts.repeat(drafted)
    return firsts, drafted, below.repeat(num_lists), np.array(adapts).repeat(drafted).repeat(num_lists)


_NONE = np.zeros((2, 0), dtype=np.int64)
_NO_CHOICES = np.zeros((2, 0, 0, 0), dtype=np.int64)
NOTHING_DRAFTED = StepCandidates(
    (), _NONE[0], Lists(_NONE[0], _NONE[1], _NO_CHOICES[0], np.zeros((1, 0, 0, 0)), _NO_CHOICES[1]), unknown=-1
)

Select = Callable[[Trees], Array]
"""Maps R trees to the number of nodes to verify of each, [R]."""


class GrownTrees(NamedTuple):
    """Nodes grown for G rows of a step, of which the first sizes[g] are verified, and the trees of these.

    slots [G]: the rows' slots in the batch. indices [G, 1 + M]: index of the anchor and of every verified node in the
    row's tree.
    """

    slots: Sequence[int]
    nodes: Nodes
    sizes: Array
    indices: Array
    trees: Sequence[Tree]


_NO_NODES = np.zeros((0, 0), dtype=np.int64)
NOTHING_GROWN = GrownTrees((), Nodes._make([*[_NO_NODES] * 8, _NONE[0]]), _NONE[0], _NO_NODES, ())


def grow_all(
    rows: Sequence[Row], candidates: StepCandidates | None, kinds: Array, select: Select, most: int
) -> GrownTrees:
    """Nodes to verify for rows [R] of these kinds [R], at most `most` each; `select` limits those that adapt."""
    limits = [most if row.adapts else max(0, row.next_block_size - 1) for row in rows]
    index_of = {slot: i for i, slot in enumerate(candidates.slots)} if candidates is not None else {}
    # 1. Trees grow in C; in Python for rows with an automaton, which may force tokens that are not candidates.
    in_c, in_python = list[int](), list[int]()
    for slot, row in enumerate(rows):
        if row.automaton is not None or (slot in index_of and not has_functions()):
            in_python.append(slot)
        elif slot in index_of:
            in_c.append(slot)
    slots = [*in_c, *in_python]
    if not slots:
        return NOTHING_GROWN
    parts = [_grown(candidates, rows, in_c, index_of, limits, most)] if candidates is not None and in_c else []
    if in_python:
        nodes_of = [_isolated(rows[slot], candidates, index_of.get(slot), limits[slot]) for slot in in_python]
        parts.append(as_arrays(nodes_of, most))
    nodes = parts[0] if len(parts) == 1 else Nodes._make(map(np.concatenate, zip(*parts, strict=True)))
    # 2. The number of nodes to verify: the controller selects it for rows that adapt.
    sizes: Array = nodes.num
    drafted = np.zeros(len(rows), dtype=np.int64)
    if candidates is not None:
        drafted[list(candidates.slots)] = candidates.drafted
    adapting = [i for i, slot in enumerate(slots) if rows[slot].adapts]
    if len(adapting) == len(slots):
        sizes = select(Trees(kinds[slots], drafted[slots], nodes))
    elif adapting:
        chosen = np.array(slots)[adapting]
        adapting_nodes = Nodes._make(values[adapting] for values in nodes)
        sizes = sizes.copy()
        sizes[adapting] = select(Trees(kinds[chosen], drafted[chosen], adapting_nodes))
    return GrownTrees(slots, nodes, sizes, *trees_of(nodes, sizes))


def trees_of(nodes: Nodes, sizes: Array) -> tuple[Array, list[Tree]]:
    """Indices [R, 1 + M] of anchor and nodes in their tree, and the trees of every row's first sizes[r] nodes."""
    in_order = (ordered(nodes, sizes) if has_functions() else None) or _ordered(nodes, sizes)
    tokens, parents, sources = (values.tolist() for values in in_order[1:])
    trees = list[Tree]()
    for r, size in enumerate(sizes.tolist()):
        trees.append(Tree(tuple(tokens[r][:size]), tuple(parents[r][:size]), tuple(sources[r][:size])))
    return in_order.indices, trees


def _ordered(nodes: Nodes, sizes: Array) -> OrderedNodes:
    """Python version of `ordered` (native/growing.py)."""
    rows, room = nodes.tokens.shape
    in_order = OrderedNodes(np.zeros((rows, 1 + room), dtype=int), *np.zeros((3, rows, room), dtype=int))
    for r, size in enumerate(sizes.tolist()):
        parents = nodes.parents[r, :size]
        order = np.array(tree_order(parents.tolist()))
        at = order[1:] - 1
        in_order.indices[r, : 1 + size], in_order.parents[r, at] = order, order[parents]
        in_order.tokens[r, at], in_order.sources[r, at] = nodes.tokens[r, :size], nodes.sources[r, :size]
    return in_order


def as_arrays(trees: Sequence[Sequence[Node]], most: int) -> Nodes:
    """Nodes of trees as arrays [R, most]."""
    dtypes = (int, int, float, int, int, int, int, int)
    arrays = [np.zeros((len(trees), most), dtype=dtype) for dtype in dtypes]
    for r, nodes in enumerate(trees):
        for array, values in zip(arrays, zip(*nodes, strict=True), strict=False):
            array[r, : len(nodes)] = values
    return Nodes._make([*arrays, np.array(list(map(len, trees)))])


def _grown(
    candidates: StepCandidates,
    rows: Sequence[Row],
    slots: Sequence[int],
    index_of: dict[int, int],
    limits: Sequence[int],
    most: int,
) -> Nodes:
    """Nodes of the rows in `slots`, grown in C: trees of all choices, or chains of the first choices.

    index_of: each slot's index in `candidates`.
    """
    lists, indices = candidates.lists, [index_of[slot] for slot in slots]
    if len(indices) < len(index_of):
        lists = lists._replace(firsts=lists.firsts[indices], depths=lists.depths[indices])
    widest = np.array([lists.next_lists.shape[2] if rows[slot].is_tree else 1 for slot in slots])
    sizes = np.array([limits[slot] for slot in slots])
    sizes = np.where(widest > 1, sizes, np.minimum(sizes, lists.depths))
    nodes = grow(lists, sizes, widest, most)
    assert nodes is not None
    return nodes


def _isolated(row: Row, candidates: StepCandidates | None, r: int | None, limit: int) -> list[Node]:
    """`_nodes`, and none if the row's automaton raises: the row then fails when its tokens are chosen."""
    try:
        return _nodes(row, candidates, r, limit)
    except Exception as error:  # raised by the automaton
        row.error = row.error or error
        return []


def _nodes(row: Row, candidates: StepCandidates | None, r: int | None, limit: int) -> list[Node]:
    """Nodes of one row, grown in Python from row r of `candidates`, if any; an automaton restricts their tokens."""
    slots = NO_SLOTS if candidates is None or r is None else candidates.row_slots(r)
    follow, deepest = choices_of(slots), len(slots.tokens)
    if row.automaton is not None:
        follow = allowed(row.automaton, slots)
        deepest = min(row.deepest, MAX_DEPTH) if row.is_tree else row.deepest
    nodes = islice(best_first(follow, deepest, is_chain=not row.is_tree), limit)
    if candidates is None or r is None:
        return list(nodes)
    start = int(candidates.lists.firsts[r]) * candidates.lists.next_lists[0].size
    return [node if node.choice_index < 0 else _indexed(node, start, candidates.lists) for node in nodes]


def _indexed(node: Node, start: int, lists: Lists) -> Node:
    """The node with its indices among the draft's choices and the paths' tokens; its row's lists begin at `start`."""
    flat_index = start + node.choice_index
    if lists.choice_index is None or lists.path_index is None:
        return node._replace(choice_index=flat_index)
    choice_index, path_index = int(lists.choice_index.flat[flat_index]), int(lists.path_index.flat[flat_index])
    return node._replace(choice_index=choice_index, path_index=path_index)


def verified(
    rows: Sequence[Row],
    grown: GrownTrees,
    paths: Sequence[Sequence[int]],
    steps: Sequence[Step],
    candidates: StepCandidates | None,
) -> VerifiedNodes:
    """Outcomes of the verified nodes of rows [R] that adapt and emitted tokens in these steps.

    paths [R] are the accepted indices in the rows' trees, the anchor first. `candidates` has the regression inputs of
    looked-up tokens, if there are any.

    A node has an outcome if its parent is on the accepted path. It is right if its token was emitted, also if the
    text ends with it. Rows with looked-up tokens have no outcomes of the draft's choices, whose probabilities were
    scaled down to make room for the path's; constrained rows have none at all, since a grammar changes them.
    """
    nodes, (num, most) = grown.nodes, grown.nodes.tokens.shape
    # 1. The accepted path, and the token emitted after each of its nodes; empty for rows without outcomes.
    tokens_of = {step.request_id: step.tokens for step in steps}
    on_path: Array = np.zeros((num, most + 1), dtype=bool)
    emitted = np.full((num, most + 1), -1)
    for g, slot in enumerate(grown.slots):
        is_observed = rows[slot].adapts and rows[slot].automaton is None
        if is_observed and (tokens := tokens_of.get(rows[slot].request_id)):
            on_path[g, paths[slot]] = True
            emitted[g, : len(tokens)] = tokens
    # 2. Nodes whose parent is on the accepted path, by source.
    row, taken = np.arange(num)[:, None], np.arange(most) < grown.sizes[:, None]
    seen = on_path[row, grown.indices[row, nodes.parents]] & taken
    right = np.equal(nodes.tokens, emitted[row, nodes.depths - 1])
    is_looked_up = taken & (nodes.path_index >= 0)
    has_path = np.logical_or.reduce(is_looked_up, axis=1, keepdims=True)
    looked_up, drafted = seen & is_looked_up, seen & (nodes.choice_index >= 0) & ~has_path
    # 3. Inputs of the path regression.
    path_index = nodes.path_index[looked_up]
    path_inputs: tuple[Array, Array] = np.zeros((0, len(OF_PATH))), np.zeros(0, dtype=int)
    if candidates is not None and candidates.lists.inputs is not None and candidates.drawn is not None:
        inputs, drawn = candidates.lists.inputs, candidates.drawn
        path_inputs = inputs.reshape(-1, len(OF_PATH))[path_index], drawn[path_index // inputs.shape[1]]
    return VerifiedNodes(
        nodes.choice_index[drafted], nodes.num_later[drafted], right[drafted], *path_inputs, right[looked_up]
    )
