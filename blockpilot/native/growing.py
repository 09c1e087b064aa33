"""Chances of a draft's choices, and trees of all rows of a step grown by them, in C (growing.c).

Python takes some microseconds for a tree's node, and a step of sixteen rows has hundreds that may be verified. All
arrays are contiguous; None without C.
"""

from ctypes import c_double, c_int, c_long, c_void_p
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.native.library import pointer, text_library

Array = NDArray[Any]

NUM_CONTEXTS = 3
MATCH_INPUTS, PATH_INPUTS = 3, 9  # of growing.c


class Lists(NamedTuple):
    """Choices of R rows: lists of K each, for every slot after P others, the best first. Integers are int64.

    Row r has depths[r] of N slots, from firsts[r] on. tokens and places [N, P, K], chances [A, N, P, K] float64, as
    in `Slots`. is_later [N, P, K] uint8: the choice counts as one that is no first one; None: all but the best do.
    """

    firsts: Array
    depths: Array
    tokens: Array
    chances: Array
    places: Array
    is_later: Array | None = None


class WithPaths(NamedTuple):
    """Lists of choices with paths: list 0 follows a row's path, the others are the draft's.

    choices [N, P, K]: flat places among the draft's choices, -1 for none. steps [N, P, K]: flat places among the
    paths' tokens [R, M], -1 for none. inputs [R, M, PATH_INPUTS] of the chances of these.
    """

    lists: Lists
    choices: Array
    steps: Array
    inputs: Array


class Grown(NamedTuple):
    """Nodes of rows by falling chance, of each `num` [R]: arrays [R, M].

    parents: numbers of nodes in their row, 0 for the anchor. choices: flat places in [N, P, K]. laters: how many of
    the choices above are no first ones. depths: 1 for what follows the anchor.
    """

    chances: Array
    parents: Array
    choices: Array
    laters: Array
    depths: Array
    num: Array


def choice_chances(
    scores: Array, log_probs: Array, drawn: Array, slots: Array, known: Array, weights: Array
) -> Array | None:
    """Chances [NUM_CONTEXTS, N, K] as `AcceptanceModel.propose` has them.

    scores, log_probs [N, K] float32; drawn, known [N] bool; slots [N] int64; weights [2, 11] float64.
    """
    if (library := text_library()) is None:
        return None
    found = np.empty((NUM_CONTEXTS, *scores.shape))
    given = map(pointer, (scores, log_probs, drawn, slots, known, weights, found))
    library.choice_chances(*map(c_long, scores.shape), *given)
    return found


def follow_paths(sizes: Array, matches: Array, drawn: Array, weights: Array, least: float) -> tuple[Array, Array]:
    """Sizes [R] int64 of paths, cut where a token is reached with a probability below `least`, and the tokens [R]
    that they are expected to add, before a draft. As of `with_paths`; RuntimeError without C.
    """
    if (library := text_library()) is None:
        raise RuntimeError("paths need the functions in C")
    sizes, gains = sizes.copy(), np.empty(len(sizes))
    given = map(pointer, (sizes, matches, drawn, weights))
    library.follow_paths(c_long(len(sizes)), *given, c_double(least), pointer(gains))
    return sizes, gains


def with_paths(
    of_draft: Lists, is_apart: bool, paths: Array, sizes: Array, matches: Array, drawn: Array, weights: Array
) -> WithPaths:
    """Lists of R rows, and beside them paths [R, M] int32, of which row r has sizes[r] int64.

    is_apart: the draft's choices do not depend on those above. matches [R, MATCH_INPUTS] and weights
    [2, PATH_INPUTS] float64, drawn [R] int64. RuntimeError without C.
    """
    if (library := text_library()) is None:
        raise RuntimeError("paths need the functions in C")
    (laters, num, contexts, width), (rows, most) = of_draft.chances.shape, paths.shape
    depths = np.maximum(of_draft.depths, sizes)
    ends = depths.cumsum()
    shape = int(ends[-1]), contexts + 1, width + 1
    tokens, places, choices, steps = np.empty((4, *shape), dtype=np.int64)
    lists = Lists(ends - depths, depths, tokens, np.empty((laters, *shape)), places, np.empty(shape, dtype=np.uint8))
    inputs = np.zeros((rows, most, PATH_INPUTS))
    drafted = (of_draft.tokens, of_draft.chances, of_draft.places)
    library.lists_with_paths(
        *(c_long(rows), pointer(of_draft.firsts), pointer(of_draft.depths)),
        *map(c_long, (num, contexts, width, laters)),
        *(*map(pointer, drafted), c_int(is_apart)),
        *(*map(pointer, (drawn, sizes, paths)), c_long(most), *map(pointer, (matches, weights))),
        *(pointer(lists.firsts), c_long(shape[0])),
        *map(pointer, (tokens, lists.chances, places, choices, lists.is_later, steps, inputs)),
    )
    return WithPaths(lists, choices, steps, inputs)


def grow(lists: Lists, most: Array, widest: Array, room: int) -> Grown | None:
    """Trees of R rows: most[r] nodes at most, which is at most `room`, of the widest[r] best choices of each list."""
    if (library := text_library()) is None:
        return None
    rows, (laters, *shape) = len(lists.depths), lists.chances.shape
    whole = np.empty((4, rows, room), dtype=np.int64)
    found = Grown._make([np.empty((rows, room)), *whole, np.empty(rows, dtype=np.int64)])
    of_rows = map(pointer, (lists.firsts, lists.depths, most, widest))
    is_later = c_void_p() if lists.is_later is None else pointer(lists.is_later)
    sizes, given = map(c_long, (*shape, laters)), (pointer(lists.chances), pointer(lists.places), is_later)
    if library.grow_trees(c_long(rows), *of_rows, *sizes, *given, c_long(room), *map(pointer, found)):
        raise MemoryError("no memory for a tree")
    return found


def select_nodes(worth: Array, num: Array, tokens: int, of_token: float, of_tile: float, tile: int) -> Array | None:
    """Number of nodes to verify of trees [R], as choose_nodes of control/choose.py says.

    worth [R, M] float64 falls, of each num [R] int64. A token costs of_token in a step that has `tokens`, and of_tile
    for every `tile` of them.
    """
    if (library := text_library()) is None:
        return None
    taken, heads = np.empty_like(num), np.empty_like(num)
    costs = c_long(tokens), c_double(of_token), c_double(of_tile), c_long(tile)
    sizes = map(c_long, worth.shape)
    library.select_nodes(*sizes, pointer(worth), pointer(num), *costs, pointer(taken), pointer(heads))
    return taken
