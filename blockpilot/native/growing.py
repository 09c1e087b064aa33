"""Chances of a draft's choices, and trees of all rows of a step grown by them, in C (growing.c).

Python takes some microseconds for a tree's node, and a step of sixteen rows has hundreds that may be verified. All
arrays are contiguous; None without C.
"""

from ctypes import c_double, c_long, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.native.library import library_for

Array = NDArray[Any]

NUM_CONTEXTS = 3


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
    if (library := library_for(torch.float32, torch.device("cpu"))) is None:
        return None
    found = np.empty((NUM_CONTEXTS, *scores.shape))
    given = map(_pointer, (scores, log_probs, drawn, slots, known, weights, found))
    library.choice_chances(*map(c_long, scores.shape), *given)
    return found


def grow(
    chances: Array, places: Array, firsts: Array, depths: Array, most: Array, widest: Array, room: int
) -> Grown | None:
    """Trees of chances [A, N, P, K] and places [N, P, K] of N slots, depths[r] of row r from firsts[r] on.

    most[r] nodes at most, which is at most `room`, of the widest[r] best choices of each list. Integers are int64,
    chances float64.
    """
    if (library := library_for(torch.float32, torch.device("cpu"))) is None:
        return None
    rows, (laters, *shape) = len(depths), chances.shape
    whole = np.empty((4, rows, room), dtype=np.int64)
    found = Grown._make([np.empty((rows, room)), *whole, np.empty(rows, dtype=np.int64)])
    of_rows = map(_pointer, (firsts, depths, most, widest))
    sizes, given = map(c_long, (*shape, laters)), (_pointer(chances), _pointer(places))
    if library.grow_trees(c_long(rows), *of_rows, *sizes, *given, c_long(room), *map(_pointer, found)):
        raise MemoryError("no memory for a tree")
    return found


def select_nodes(chances: Array, num: Array, tokens: int, of_token: float, of_tile: float, tile: int) -> Array | None:
    """Number of nodes to verify of trees [R], as choose_nodes of control/choose.py says.

    chances [R, M] float64 fall, of each num [R] int64. A token costs of_token in a step that has `tokens`, and
    of_tile for every `tile` of them.
    """
    if (library := library_for(torch.float32, torch.device("cpu"))) is None:
        return None
    taken, heads = np.empty_like(num), np.empty_like(num)
    costs = c_long(tokens), c_double(of_token), c_double(of_tile), c_long(tile)
    sizes = map(c_long, chances.shape)
    library.select_nodes(*sizes, _pointer(chances), _pointer(num), *costs, _pointer(taken), _pointer(heads))
    return taken


def _pointer(values: Array) -> c_void_p:
    assert values.flags.c_contiguous
    return c_void_p(values.ctypes.data)
