"""Index of growing texts for prompt lookup: earlier occurrences of a text's end, and the tokens that followed.

In C (matching.c) by hash chains: a match takes microseconds regardless of the text's length. Suffix trees, as in
arctic-inference, find the same longest match in one text, and take some hundred bytes per token.
"""

from array import array
from collections.abc import Sequence
from ctypes import CDLL, c_int, c_long
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.native.library import pointer, text_library

Array = NDArray[Any]

MOST_PLACES, MOST_FOLLOWERS, LONGEST, HELD_DECAY = 256, 64, 32, 0.8  # of matching.c


class Matches(NamedTuple):
    """Longest matches of the ends of R texts, and the tokens that followed them.

    paths [R, M] int32, sizes[r] of row r: M, or 0 without a match. known [R, 3]: length of the match, at most
    LONGEST; share of the latest seen[r] occurrences of the last two tokens that the path's first token followed;
    recent accuracy of the first tokens of paths in this text (initially 0.5).
    """

    paths: Array
    sizes: Array
    known: Array
    seen: Array


class TextIndex:
    """Tokens of `num_texts` texts of at most `room` tokens each; num_bytes are 12 to 16 bytes per token of room.

    Raises RuntimeError without C (`has_functions`).
    """

    def __init__(self, num_texts: int, room: int) -> None:
        library = text_library()
        if library is None:
            raise RuntimeError("an index of texts needs the functions in C")
        self._library: CDLL = library
        # A chain for each of 2^bits hashes: its latest position in heads, and the one before each in `previous`.
        self._bits = max(4, (room - 1).bit_length())
        self._tokens, self._previous = np.zeros((2, num_texts, room), dtype=np.int32)
        self._heads = np.full((num_texts, 1 << self._bits), -1, dtype=np.int32)
        self._num = np.zeros(num_texts, dtype=np.int64)
        self._expected, self._held = np.full(num_texts, -1, dtype=np.int32), np.full(num_texts, 0.5)
        shape = c_long(room), c_int(self._bits)
        arrays = self._tokens, self._previous, self._heads, self._num, self._expected, self._held
        self._state = *shape, *(pointer(values) for values in arrays)
        self._matches = Matches(*[np.empty((0, 0))] * 4)  # buffers of the latest matches

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._previous.nbytes + self._heads.nbytes

    def clear(self, text: int) -> None:
        """Empty a text."""
        self._heads[text], self._num[text] = -1, 0
        self._expected[text], self._held[text] = -1, 0.5

    def match(self, texts: Sequence[int], added: Sequence[Sequence[int]], most: int) -> Matches | None:
        """Append tokens to texts [R], and return the longest matches of their ends, with `most` following tokens.

        None if no end has a match. Raises ValueError if the tokens exceed `room`.
        """
        # Arrays of the standard library: those of numpy take several times as long to make.
        numbers, ends = array("q", texts), array("q", accumulate(map(len, added)))
        flat, rows = array("i", chain.from_iterable(added)), len(texts)
        text = c_long(rows), pointer(numbers)
        tokens = pointer(flat), pointer(ends)
        if longest := self._library.extend_texts(*text, *self._state, *tokens):
            raise ValueError(f"{longest} tokens: a text has room for {self._tokens.shape[1]}")
        if self._matches.paths.shape != (len(self._num), most):
            sizes, seen = np.empty((2, len(self._num)), dtype=np.int64)
            paths, known = np.empty((len(self._num), most), dtype=np.int32), np.empty((len(self._num), 3))
            self._matches = Matches(paths, sizes, known, seen)
        matches = self._matches
        if not self._library.match_texts(*text, *self._state, c_long(most), *map(pointer, matches)):
            return None
        return Matches._make(values[:rows].copy() for values in matches)
