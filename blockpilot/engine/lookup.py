"""Prompt lookup (n-gram): paths of tokens that followed earlier occurrences of a text's end in the same text.

A text is a request's prompt and its accepted tokens so far; other requests' texts are never searched.
"""

from collections.abc import Callable, Sequence

import numpy as np

from blockpilot.control.acceptance import Array, Paths
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.native.library import has_functions
from blockpilot.native.matching import Matches, TextIndex


class Lookup:
    """Index of the texts of `num_slots` rows, of at most `length` tokens each. Without C, `paths` returns None."""

    def __init__(self, num_slots: int, length: int) -> None:
        self._index = TextIndex(num_slots, length) if has_functions() else None
        self._texts = dict[Row, int]()
        self._lengths = [0] * num_slots  # tokens of every text in the index
        self._free = list(range(num_slots))

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes if self._index is not None else 0

    def paths(
        self, rows: Sequence[Row], sampled: Array, most: int, cut: Callable[[Paths], Paths | None]
    ) -> Paths | None:
        """Paths of rows [R], at most `most` tokens each, cut by `cut`; None if there are none.

        sampled [R]: 1 for rows with a temperature above 0, 0 for greedy ones.
        """
        indices = [r for r, row in enumerate(rows) if row.looks_up]
        if not indices or self._index is None or most < 1:
            return None
        matches = self._matches([rows[r] for r in indices], min(most, MAX_DEPTH), self._index)
        if matches is None:
            return None
        # Cut at each row's limit here, and by the controller (`cut`) where the rest is too improbable.
        sizes = [
            min(size, max(0, rows[r].max_depth)) for r, size in zip(indices, matches.sizes.tolist(), strict=True)
        ]
        if not any(sizes):
            return None
        tokens, cut_sizes, inputs = _spread([matches.paths, np.array(sizes), matches.known], indices, len(rows))
        return cut(Paths(tokens, cut_sizes, inputs, sampled, np.zeros(len(rows))))

    def _matches(self, rows: Sequence[Row], most: int, index: TextIndex) -> Matches | None:
        """Matches of the rows' texts, after their new tokens are added to the index; None if there are none."""
        texts, added = [self._text_of(row, index) for row in rows], list[list[int]]()
        for row, text in zip(rows, texts, strict=True):
            added.append(row.tokens[self._lengths[text] :])
            self._lengths[text] = len(row.tokens)
        return index.match(texts, added, most)

    def end(self, row: Row) -> None:
        """Free the text of a row, if it has one."""
        if row in self._texts:
            self._free.append(self._texts.pop(row))

    def _text_of(self, row: Row, index: TextIndex) -> int:
        if row not in self._texts:
            text = self._texts[row] = self._free.pop()
            index.clear(text)
            self._lengths[text] = 0
        return self._texts[row]


def _spread(arrays: Sequence[Array], indices: Sequence[int], num: int) -> list[Array]:
    """Scatter arrays [N, ...] to the N indices of arrays [num, ...] of zeros."""
    if len(indices) == num:
        return list(arrays)
    spread = [np.zeros((num, *array.shape[1:]), dtype=array.dtype) for array in arrays]
    for target, array in zip(spread, arrays, strict=True):
        target[indices] = array
    return spread
