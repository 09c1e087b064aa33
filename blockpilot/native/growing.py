"""Draft trees of all rows of a step grown in C (growing.c), as engine/trees.py grows each.

A tree's node takes Python some microseconds, and a step of sixteen rows has hundreds that may be verified.
"""

from ctypes import c_long, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blockpilot.native.library import library_for

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Grown(NamedTuple):
    """Nodes of rows by falling chance, of each `num` [R]: arrays [R, M].

    parents: numbers of nodes in their row, 0 for the anchor. choices: flat places in [N, P, K]. laters: how many of
    the choices above are no first ones.
    """

    chances: Floats
    parents: Ints
    choices: Ints
    laters: Ints
    num: Ints


def grow(
    chances: Floats, places: Ints, firsts: Ints, depths: Ints, most: Ints, widest: Ints, room: int
) -> Grown | None:
    """Of chances [A, N, P, K] and places [N, P, K] of N slots, depths[r] of row r from firsts[r] on; None without C.

    most[r] nodes at most, which is at most `room`, of the widest[r] best choices of each list.
    """
    library = library_for(torch.float32, torch.device("cpu"))
    if library is None:
        return None
    rows, (laters, *shape) = len(depths), chances.shape
    of_nodes = (np.empty((rows, room), dtype=np.int64) for _ in range(3))
    found = Grown(np.empty((rows, room)), *of_nodes, np.empty(rows, dtype=np.int64))
    of_rows = map(_pointer, (firsts, depths, most, widest))
    sizes, given = map(c_long, (*shape, laters)), (_pointer(chances), _pointer(places))
    if library.grow_trees(c_long(rows), *of_rows, *sizes, *given, c_long(room), *map(_pointer, found)):
        raise MemoryError("no memory for a tree")
    return found


def _pointer(values: NDArray[Any]) -> c_void_p:
    return c_void_p(values.ctypes.data)
