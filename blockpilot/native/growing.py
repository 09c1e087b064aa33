"""Acceptance probabilities of a draft's choices, and growth of all trees of a step, in C (growing.c).

Python takes a few microseconds per node, and a step of sixteen rows has hundreds of candidate nodes. All arrays are
contiguous. Functions return None without C, unless they say otherwise.
"""

from ctypes import c_double, c_int, c_long, c_void_p
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.native.library import pointer, text_library

Array = NDArray[Any]

NUM_CONTEXTS = 3
PATH_INPUTS = 9  # of growing.c


class Lists(NamedTuple):
    """Choices of R rows: for each of N slots, P lists of K choices after a choice of the slot before, best first.

    Row r has depths[r] slots, from firsts[r] on. tokens and next_lists [N, P, K] int64, chances [A, N, P, K]
    float64, as in `Slots`. The other fields are set if paths were merged (`with_paths`): then list 0 follows a row's
    path, and the others are the draft's.
    """

    firsts: Array
    depths: Array
    tokens: Array
    chances: Array
    next_lists: Array
    is_later: Array | None = None
    """[N, P, K] uint8: 1 for later choices, which are not the draft's first; None: all but the first of a list."""
    choice_index: Array | None = None
    """[N, P, K]: flat indices among the draft's choices, -1 for none; None: these are the draft's choices."""
    path_index: Array | None = None
    """[N, P, K]: flat indices among the paths' tokens [R, M], -1 for none; None: there are no paths."""
    inputs: Array | None = None
    """[R, M, PATH_INPUTS]: regression inputs of the paths' tokens."""


class Nodes(NamedTuple):
    """Nodes of R trees, num[r] of tree r, in descending order of probability: the fields of `Node` as arrays [R, M].

    Entries after a tree's last node are 0.
    """

    tokens: Array
    parents: Array
    chances: Array
    depths: Array
    choice_index: Array
    num_later: Array
    path_index: Array
    sources: Array
    num: Array

    @property
    def grown(self) -> Array:
        """Mask [R, M] of the entries that are nodes."""
        mask: Array = np.arange(self.tokens.shape[1]) < self.num[:, None]
        return mask

    @property
    def learned_depths(self) -> Array:
        """[R, M]: depths of drafted nodes, 0 of looked-up ones, -1 of forced ones, which are not learned from."""
        return np.where(self.path_index >= 0, 0, np.where(self.choice_index >= 0, self.depths, -1))


class OrderedNodes(NamedTuple):
    """Verified nodes of R trees in the order of `Tree`: tokens, parents and sources [R, M].

    indices [R, 1 + M]: those of the anchor and of every verified node in its `Tree`.
    """

    indices: Array
    tokens: Array
    parents: Array
    sources: Array


def choice_chances(
    scores: Array, log_probs: Array, drawn: Array, slots: Array, planned: Array, weights: Array
) -> Array | None:
    """Acceptance probabilities [NUM_CONTEXTS, N, K] for `AcceptanceModel.propose`.

    scores, log_probs [N, K] float32; drawn, planned [N] bool; slots [N] int64; weights [2, 11] float64.
    """
    if (library := text_library()) is None:
        return None
    chances = np.empty((NUM_CONTEXTS, *scores.shape))
    arrays = map(pointer, (scores, log_probs, drawn, slots, planned, weights, chances))
    library.choice_chances(*map(c_long, scores.shape), *arrays)
    return chances


def cut_paths(sizes: Array, matches: Array, drawn: Array, weights: Array, least: float) -> tuple[Array, Array]:
    """Sizes [R] int64 of paths, cut before drafting where their probability falls below `least`, and the tokens [R]
    that they are expected to add. Arguments as in `with_paths`; RuntimeError without C.
    """
    if (library := text_library()) is None:
        raise RuntimeError("paths need the functions in C")
    sizes, gains = sizes.copy(), np.empty(len(sizes))
    arrays = map(pointer, (sizes, matches, drawn, weights))
    library.cut_paths(c_long(len(sizes)), *arrays, c_double(least), pointer(gains))
    return sizes, gains


def with_paths(
    draft_lists: Lists,
    is_independent: bool,
    paths: Array,
    sizes: Array,
    matches: Array,
    drawn: Array,
    weights: Array,
) -> Lists:
    """Merge paths [R, M] int32, of sizes [R] int64, into the draft's lists of R rows.

    is_independent: the draft's choices do not depend on those above. matches [R, 3] and weights [2, PATH_INPUTS]
    float64, drawn [R] int64. RuntimeError without C.
    """
    if (library := text_library()) is None:
        raise RuntimeError("paths need the functions in C")
    # 1. Shapes. A row has as many slots as the deeper of its draft and its path. The path adds one list to each slot,
    # and one entry to each list.
    (laters, num, per_slot, width), (rows, most) = draft_lists.chances.shape, paths.shape
    depths = np.maximum(draft_lists.depths, sizes)
    ends = depths.cumsum()
    shape = int(ends[-1]), per_slot + 1, width + 1
    # 2. Buffers for the merged lists, which C fills completely.
    tokens, next_lists, choice_index, path_index = np.empty((4, *shape), dtype=np.int64)
    chances, is_later = np.empty((laters, *shape)), np.empty(shape, dtype=np.uint8)
    inputs = np.zeros((rows, most, PATH_INPUTS))
    lists = Lists(ends - depths, depths, tokens, chances, next_lists, is_later, choice_index, path_index, inputs)
    drafted = (draft_lists.tokens, draft_lists.chances, draft_lists.next_lists)
    library.lists_with_paths(
        *(c_long(rows), pointer(draft_lists.firsts), pointer(draft_lists.depths)),
        *map(c_long, (num, per_slot, width, laters)),
        *(*map(pointer, drafted), c_int(is_independent)),
        *(*map(pointer, (drawn, sizes, paths)), c_long(most), *map(pointer, (matches, weights))),
        *(pointer(lists.firsts), c_long(shape[0])),
        *map(pointer, (tokens, chances, next_lists, choice_index, is_later, path_index, inputs)),
    )
    return lists


def grow(lists: Lists, most: Array, widest: Array, room: int) -> Nodes | None:
    """Trees of R rows with at most most[r] <= room nodes, from the widest[r] best choices of each list."""
    if (library := text_library()) is None:
        return None
    rows, (laters, *shape) = len(lists.depths), lists.chances.shape
    chances, num = np.zeros((rows, room)), np.empty(rows, dtype=np.int64)
    integers = np.zeros((7, rows, room), dtype=np.int64)
    limits = map(pointer, (lists.firsts, lists.depths, most, widest))
    # Without paths the arrays that only paths need are NULL: C uses defaults.
    inputs = lists.chances, lists.next_lists, lists.is_later, lists.tokens, lists.choice_index, lists.path_index
    choices_in = (c_void_p() if values is None else pointer(values) for values in inputs)
    nodes_out = map(pointer, (chances, *integers, num))
    if library.grow_trees(
        c_long(rows), *limits, *map(c_long, (*shape, laters)), *choices_in, c_long(room), *nodes_out
    ):
        raise MemoryError("no memory for a tree")
    tokens, parents, *others = integers
    return Nodes._make([tokens, parents, chances, *others, num])


def ordered(nodes: Nodes, sizes: Array) -> OrderedNodes | None:
    """The first sizes[r] nodes of every tree, in the order in which they are verified (`trees.tree_order`)."""
    if (library := text_library()) is None:
        return None
    rows, room = nodes.tokens.shape
    in_order = OrderedNodes(np.zeros((rows, 1 + room), dtype=np.int64), *np.zeros((3, rows, room), dtype=np.int64))
    arrays = map(pointer, (sizes, nodes.tokens, nodes.parents, nodes.sources, *in_order))
    library.order_trees(c_long(rows), c_long(room), *arrays)
    return in_order


def select_nodes(
    saved_s: Array,
    num: Array,
    tokens: int,
    token_s: float,
    tile_s: float,
    tiles: tuple[int, int],
    experts_s: float,
    expert_share: float,
) -> Array | None:
    """Number of nodes to verify of each tree [R], for `choose_nodes` of control/choose.py.

    saved_s [R, M] float64: expected gains in seconds, descending, of num[r] nodes. The step has `tokens` so far. One
    more costs token_s, the first of every further tile (`Tiles`) also tile_s; experts that no other token has
    selected cost their share of experts_s.
    """
    if (library := text_library()) is None:
        return None
    # `heads` is room for C: the next node of every tree.
    selected, heads = np.empty_like(num), np.empty_like(num)
    costs = c_long(tokens), c_double(token_s), c_double(tile_s), *map(c_long, tiles), c_double(experts_s)
    sizes = map(c_long, saved_s.shape)
    library.select_nodes(
        *sizes, pointer(saved_s), pointer(num), *costs, c_double(expert_share), pointer(selected), pointer(heads)
    )
    return selected
