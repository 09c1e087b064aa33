"""Paths from prompt lookup, without texts."""

import numpy as np
import pytest

from blockpilot.control.acceptance import Paths
from blockpilot.native.library import has_functions

needs_functions = pytest.mark.skipif(not has_functions(), reason="paths need the functions in C")


def paths(lengths: list[int], most: int = 8, drawn: int = 0, agree: float = 1.0) -> Paths:
    """Paths of rows after matches of these lengths; a row with length 0 has no path."""
    match_inputs = np.array([[float(length), agree, 0.5] for length in lengths])
    sizes = np.where(match_inputs[:, 0] > 0, most, 0)
    tokens = np.arange(len(lengths) * most, dtype=np.int32).reshape(len(lengths), most)
    return Paths(tokens, sizes, match_inputs, np.full(len(lengths), drawn), np.zeros(len(lengths)))
