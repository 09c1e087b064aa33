"""Index of texts that grow: where the end of one stood before in it, and what followed there (prompt lookup).

In C (matching.c) by hash chains: a match takes microseconds whatever the length of the text. Suffix trees, as of
arctic-inference, find no more of one text than its longest match, and hold some hundred bytes a token.
"""

from collections.abc import Sequence
from ctypes import CDLL, c_int, c_long
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blockpilot.native.library import pointer, text_library

Array = NDArray[Any]

MOST_PLACES, MOST_FOLLOWERS, LONGEST, HELD_DECAY = 256, 64, 32, 0.8  # of matching.c


class Matches(NamedTuple):
    """Earlier places of R texts that share the longest end with them, and the tokens that followed there.

    paths [R, M] int32 of which row r has sizes[r]: M, or 0 for no such place. known [R, 3]: tokens that are shared,
    of LONGEST at most; share of the `seen` [R] latest places of the last two tokens that the same token followed; how
    often such a path's first token was right in this text, lately (one half at first).
    """

    paths: Array
    sizes: Array
    known: Array
    seen: Array


class TextIndex:
    """Tokens of `num_texts` texts of at most `room` tokens each; memory of num_bytes, 12 to 16 bytes a token of room.

    Raises RuntimeError where there is no C (`has_functions`).
    """

    def __init__(self, num_texts: int, room: int) -> None:
        library = text_library()
        if library is None:
            raise RuntimeError("an index of texts needs the functions in C")
        self._library: CDLL = library
        # A chain for each of 2^bits hashes: heads hold its latest place, `previous` the one before every place.
        self._bits = max(4, (room - 1).bit_length())
        self._tokens, self._previous = np.zeros((2, num_texts, room), dtype=np.int32)
        self._heads = np.full((num_texts, 1 << self._bits), -1, dtype=np.int32)
        self._num = np.zeros(num_texts, dtype=np.int64)
        self._expected, self._held = np.full(num_texts, -1, dtype=np.int32), np.full(num_texts, 0.5)

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._previous.nbytes + self._heads.nbytes

    @property
    def lengths(self) -> Array:
        """Tokens of every text."""
        return self._num

    def clear(self, text: int) -> None:
        """Begin a text anew, without tokens."""
        self._heads[text], self._num[text] = -1, 0
        self._expected[text], self._held[text] = -1, 0.5

    def extend(self, texts: Array, added: Sequence[Sequence[int]]) -> None:
        """Append tokens to texts [R] int64; ValueError beyond the room."""
        sizes = np.array(list(map(len, added)), dtype=np.int64)
        if ((self._num[texts] + sizes) > self._tokens.shape[1]).any():
            most = int((self._num[texts] + sizes).max())
            raise ValueError(f"{most} tokens: a text has room for {self._tokens.shape[1]}")
        flat, ends = np.fromiter(chain.from_iterable(added), dtype=np.int32), sizes.cumsum()
        self._library.extend_texts(*self._texts(texts), pointer(flat), pointer(ends))

    def match(self, texts: Array, most: int) -> Matches:
        """The longest matches of the ends of texts [R] int64, each with `most` tokens that followed."""
        rows = len(texts)
        sizes, seen = np.empty((2, rows), dtype=np.int64)
        found = Matches(np.empty((rows, most), dtype=np.int32), sizes, np.empty((rows, 3)), seen)
        self._library.match_texts(*self._texts(texts), c_long(most), *(pointer(each) for each in found))
        return found

    def _texts(self, texts: Array) -> tuple[object, ...]:
        of_texts: tuple[Array, ...] = (self._tokens, self._previous, self._heads, self._num)
        arrays = map(pointer, (*of_texts, self._expected, self._held))
        return c_long(len(texts)), pointer(texts), c_long(self._tokens.shape[1]), c_int(self._bits), *arrays
