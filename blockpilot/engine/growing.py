"""Candidates for a step's rows with their acceptance probabilities, and the trees grown from them.

Candidates are the draft's choices for every slot, and paths from prompt lookup. Trees grow best first (trees.py; in
C, native/growing.c); the controller selects how many of their nodes are verified.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from blockpilot.control.acceptance import OF_PATH, Array, Paths, Proposal
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, VerifiedNodes
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.engine.constrained import NO_SLOTS, allowed
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH, Node, Slots, best_first, choices_of, tree_order
from blockpilot.native.growing import Lists, Nodes, OrderedNodes, grow, ordered, with_paths
from blockpilot.native.library import has_functions
from blockpilot.types import DRAFTED, LOOKED_UP, NO_TREE, Candidates, Step, Tree


class StepCandidates(NamedTuple):
    """Candidates for the R decoding rows of a step: a draft's choices for `drafted` [R] positions, and paths.

    proposal: the draft's choices with their acceptance probabilities; None if no row drafts. sampled [R]: 1 for rows
    with a temperature above 0, 0 for greedy ones; None without paths. unknown: index of the next slot's list after a
    token that is not one of the choices (`Slots.unknown`).
    """

    drafted: Array
    lists: Lists
    proposal: Proposal | None = None
    sampled: Array | None = None
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
    adapts: Sequence[bool],
    depths: Sequence[int],
    controller: Controller,
) -> StepCandidates:
    """A draft's choices for depths[r] positions of each row [R], 0 if it does not draft, with their probabilities.

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
    return StepCandidates(drafted, lists, proposal, unknown=0 if links is None else -1)


def merge_paths(draft_candidates: StepCandidates | None, paths: Paths, weights: Array) -> StepCandidates:
    """Merge the paths of rows [R] into the draft's candidates; weights: those of the path regression."""
    drafted, lists, proposal, _, unknown = draft_candidates or _nothing_drafted(len(paths.sizes))
    merged = with_paths(lists, unknown == 0, paths.tokens, paths.sizes, paths.known, paths.drawn, weights)
    return StepCandidates(drafted, merged, proposal, paths.drawn, -1 if unknown < 0 else unknown + 1)


@lru_cache(maxsize=64)
def _nothing_drafted(num_rows: int) -> StepCandidates:
    """Candidates of rows that do not draft."""
    zeros, no_choices = np.zeros(num_rows, dtype=np.int64), np.zeros((0, 0, 0), dtype=np.int64)
    return StepCandidates(zeros, Lists(zeros, zeros, no_choices, np.zeros((1, 0, 0, 0)), no_choices), unknown=-1)


@lru_cache(maxsize=64)
def _slots_of(depths: tuple[int, ...], adapts: tuple[bool, ...], num_lists: int) -> tuple[Array, Array, Array, Array]:
    """First slots [R] and depths [R] of rows; for each list its slot below the anchor, and whether its row adapts."""
    drafted = np.array(depths, dtype=np.int64)
    ends = drafted.cumsum()
    firsts = ends - drafted
    below = np.arange(ends[-1]) - firsts.repeat(drafted)
    return firsts, drafted, below.repeat(num_lists), np.array(adapts).repeat(drafted).repeat(num_lists)


Select = Callable[[Trees], Array]
"""Maps R trees to the number of nodes to verify of each, [R]."""


class GrownTrees(NamedTuple):
    """Nodes grown for rows [R], of which the first sizes[r] are verified, and the trees of these.

    indices [R, 1 + M]: index of the anchor and of every verified node in the row's tree.
    """

    nodes: Nodes
    sizes: Array
    indices: Array
    trees: Sequence[Tree]


def grow_all(
    rows: Sequence[Row], candidates: StepCandidates | None, kinds: Array, select: Select, most: int
) -> GrownTrees | None:
    """Nodes to verify for rows [R] of these kinds [R], at most `most` each; `select` limits those that adapt.

    None if no row has candidates or an automaton.
    """
    constrained = [r for r, row in enumerate(rows) if row.automaton is not None]
    if candidates is None and not constrained:
        return None
    # 1. Trees grow in C; in Python for rows with an automaton, which may force tokens that are not candidates.
    limits = [most if row.adapts else max(0, row.next_block_size - 1) for row in rows]
    nodes = None
    if candidates is not None and len(constrained) < len(rows) and has_functions():
        nodes = _grown(candidates.lists, rows, limits, most)
    if nodes is None:
        nodes = as_arrays([_isolated(row, candidates, r, limits[r]) for r, row in enumerate(rows)], most)
    elif constrained:
        constrained_nodes = [_isolated(rows[r], candidates, r, limits[r]) for r in constrained]
        for values, constrained_values in zip(nodes, as_arrays(constrained_nodes, most), strict=True):
            values[constrained] = constrained_values
    # 2. The number of nodes to verify: the controller selects it for rows that adapt.
    sizes: Array = nodes.num
    drafted = np.zeros_like(kinds) if candidates is None else candidates.drafted
    adapting = [r for r, row in enumerate(rows) if row.adapts]
    if len(adapting) == len(rows):
        sizes = select(Trees(kinds, drafted, nodes))
    elif adapting:
        adapting_nodes = Nodes._make(values[adapting] for values in nodes)
        sizes = sizes.copy()
        sizes[adapting] = select(Trees(kinds[adapting], drafted[adapting], adapting_nodes))
    return GrownTrees(nodes, sizes, *trees_of(nodes, sizes))


def trees_of(nodes: Nodes, sizes: Array) -> tuple[Array, list[Tree]]:
    """Indices [R, 1 + M] of anchor and nodes in their tree, and the trees of every row's first sizes[r] nodes."""
    in_order = (ordered(nodes, sizes) if has_functions() else None) or _ordered(nodes, sizes)
    sizes_of_rows = sizes.tolist()
    largest = max(sizes_of_rows)
    tokens, parents, sources = (values[:, :largest].tolist() for values in in_order[1:])
    trees = list[Tree]()
    for r, size in enumerate(sizes_of_rows):
        tree = Tree(tuple(tokens[r][:size]), tuple(parents[r][:size]), tuple(sources[r][:size])) if size else NO_TREE
        trees.append(tree)
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


def _grown(lists: Lists, rows: Sequence[Row], limits: Sequence[int], most: int) -> Nodes:
    """Nodes of rows [R], grown in C: trees of all choices, or chains of first choices; none under an automaton."""
    width = lists.next_lists.shape[2]
    widest = np.array([width if row.is_tree else 1 for row in rows])
    sizes = np.array([limit if row.automaton is None else 0 for limit, row in zip(limits, rows, strict=True)])
    nodes = grow(lists, sizes, widest, most)
    assert nodes is not None
    return nodes


def _isolated(row: Row, candidates: StepCandidates | None, r: int, limit: int) -> list[Node]:
    """`_nodes`, and none if the row's automaton raises: the row then fails when its tokens are chosen."""
    try:
        return _nodes(row, candidates, r, limit)
    except Exception as error:  # raised by the automaton
        row.error = row.error or error
        return []


def _nodes(row: Row, candidates: StepCandidates | None, r: int, limit: int) -> list[Node]:
    """Nodes of row r, grown in Python; an automaton restricts their tokens."""
    slots = NO_SLOTS if candidates is None else candidates.row_slots(r)
    follow, max_depth = choices_of(slots), len(slots.tokens)
    if row.automaton is not None:
        follow = allowed(row.automaton, slots)
        max_depth = min(row.max_depth, MAX_DEPTH) if row.is_tree else row.max_depth
    nodes = islice(best_first(follow, max_depth, is_chain=not row.is_tree), limit)
    if candidates is None or not slots.tokens:
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
    for r, row in enumerate(rows):
        if row.adapts and row.automaton is None and (tokens := tokens_of.get(row.request_id)):
            on_path[r, paths[r]] = True
            emitted[r, : len(tokens)] = tokens
    # 2. Nodes whose parent is on the accepted path, by source.
    index, taken = np.arange(num)[:, None], np.arange(most) < grown.sizes[:, None]
    seen = on_path[index, grown.indices[index, nodes.parents]] & taken
    right = np.equal(nodes.tokens, emitted[index, nodes.depths - 1])
    is_looked_up = taken & (nodes.path_index >= 0)
    has_path = np.logical_or.reduce(is_looked_up, axis=1, keepdims=True)
    looked_up, drafted = seen & is_looked_up, seen & (nodes.choice_index >= 0) & ~has_path
    # 3. Inputs of the path regression.
    path_index = nodes.path_index[looked_up]
    path_inputs: tuple[Array, Array] = np.zeros((0, len(OF_PATH))), np.zeros(0, dtype=int)
    if candidates is not None and candidates.lists.inputs is not None and candidates.sampled is not None:
        inputs, sampled = candidates.lists.inputs, candidates.sampled
        path_inputs = inputs.reshape(-1, len(OF_PATH))[path_index], sampled[path_index // inputs.shape[1]]
    return VerifiedNodes(
        nodes.choice_index[drafted], nodes.num_later[drafted], right[drafted], *path_inputs, right[looked_up]
    )
