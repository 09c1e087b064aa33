"""Chances of a draft's choices, and trees of all rows of a step grown by them, in C (growing.c).

Python takes some microseconds for a tree's node, and a step of sixteen rows has hundreds that may be verified. All
arrays are contiguous; None without C.
"""

from ctypes import c_double, c_int, c_long, c_void_p
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.native.library import pointer, text_library
from blockpilot.types import DRAFTED, LOOKED_UP

Array = NDArray[Any]

NUM_CONTEXTS = 3
MATCH_INPUTS, PATH_INPUTS = 3, 9  # of growing.c


class Lists(NamedTuple):
    """Choices of R rows: lists of K each, for every slot after P others, the best first. Integers are int64.

    Row r has depths[r] of N slots, from firsts[r] on. tokens and places [N, P, K], chances [A, N, P, K] float64, as
    in `Slots`. With paths list 0 follows a row's path and the others are the draft's; there the rest is known, too.
    """

    firsts: Array
    depths: Array
    tokens: Array
    chances: Array
    places: Array
    is_later: Array | None = None
    """[N, P, K] uint8: the choice counts as one that is no first one; None: all but the best do."""
    choices: Array | None = None
    """[N, P, K]: flat places among the draft's choices, -1 for none; None: all are the draft's, in their places."""
    steps: Array | None = None
    """[N, P, K]: flat places among the paths' tokens [R, M], -1 for none; None: none is."""
    inputs: Array | None = None
    """[R, M, PATH_INPUTS] of the chances of these."""


class Nodes(NamedTuple):
    """Nodes of R trees by falling chance, of each `num` [R]: arrays [R, M] of what a `Node` has."""

    tokens: Array
    parents: Array
    chances: Array
    depths: Array
    choices: Array
    laters: Array
    steps: Array
    sources: Array
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
) -> Lists:
    """Lists of R rows, and beside them paths [R, M] int32, of which row r has sizes[r] int64.

    is_apart: the draft's choices do not depend on those above. matches [R, MATCH_INPUTS] and weights
    [2, PATH_INPUTS] float64, drawn [R] int64. RuntimeError without C.
    """
    if (library := text_library()) is None:
        raise RuntimeError("paths need the functions in C")
    (laters, num, contexts, width), (rows, most) = of_draft.chances.shape, paths.shape
    # A row has as many slots as the deeper of both; a list of the path is added, and a place in each of the draft's.
    depths = np.maximum(of_draft.depths, sizes)
    ends = depths.cumsum()
    shape = int(ends[-1]), contexts + 1, width + 1
    tokens, places, choices, steps = np.empty((4, *shape), dtype=np.int64)
    chances, is_later = np.empty((laters, *shape)), np.empty(shape, dtype=np.uint8)
    inputs = np.zeros((rows, most, PATH_INPUTS))
    lists = Lists(ends - depths, depths, tokens, chances, places, is_later, choices, steps, inputs)
    drafted = (of_draft.tokens, of_draft.chances, of_draft.places)
    library.lists_with_paths(
        *(c_long(rows), pointer(of_draft.firsts), pointer(of_draft.depths)),
        *map(c_long, (num, contexts, width, laters)),
        *(*map(pointer, drafted), c_int(is_apart)),
        *(*map(pointer, (drawn, sizes, paths)), c_long(most), *map(pointer, (matches, weights))),
        *(pointer(lists.firsts), c_long(shape[0])),
        *map(pointer, (tokens, chances, places, choices, is_later, steps, inputs)),
    )
    return lists


def grow(lists: Lists, most: Array, widest: Array, room: int) -> Nodes | None:
    """Trees of R rows: most[r] nodes at most, which is at most `room`, of the widest[r] best choices of each list."""
    if (library := text_library()) is None:
        return None
    rows, (laters, *shape) = len(lists.depths), lists.chances.shape
    chances, num = np.empty((rows, room)), np.empty(rows, dtype=np.int64)
    parents, flat, num_later, depths = whole = np.empty((4, rows, room), dtype=np.int64)
    of_rows = map(pointer, (lists.firsts, lists.depths, most, widest))
    is_later = c_void_p() if lists.is_later is None else pointer(lists.is_later)
    sizes, given = map(c_long, (*shape, laters)), (pointer(lists.chances), pointer(lists.places), is_later)
    found = pointer(chances), *map(pointer, whole), pointer(num)
    if library.grow_trees(c_long(rows), *of_rows, *sizes, *given, c_long(room), *found):
        raise MemoryError("no memory for a tree")
    # Beyond a tree's last node arrays are not written: any valid place will do there.
    flat = np.where(np.arange(room) < num[:, None], flat, 0)
    choices = flat if lists.choices is None else lists.choices.reshape(-1)[flat]
    steps = np.full_like(flat, -1) if lists.steps is None else lists.steps.reshape(-1)[flat]
    sources = DRAFTED * (choices >= 0) + LOOKED_UP * (steps >= 0)
    tokens = lists.tokens.reshape(-1)[flat]
    return Nodes(tokens, parents, chances, depths, choices, num_later, steps, sources, num)


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
