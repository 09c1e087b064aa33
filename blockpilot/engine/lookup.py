"""Lookup of what may follow in rows' own texts: where a text's end stood before, much of what followed may again.

Texts are prompt and answer so far, final tokens only; no other request's text is ever looked up.
"""

from collections.abc import Callable, Sequence

import numpy as np

from blockpilot.control.acceptance import Array, Paths
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.native.library import has_functions
from blockpilot.native.matching import Matches, TextIndex


class Lookup:
    """An index of the texts of `num_slots` rows of at most `length` tokens; without C functions nothing is found."""

    def __init__(self, num_slots: int, length: int) -> None:
        self._index = TextIndex(num_slots, length) if has_functions() else None
        self._texts = dict[Row, int]()
        self._free = list(range(num_slots))

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes if self._index is not None else 0

    def paths(self, rows: Sequence[Row], drawn: Array, most: int, follow: Callable[[Paths], Paths]) -> Paths | None:
        """Paths of rows [R] that are `drawn` [R] (0 or 1), `most` tokens at most, as `follow` cuts them; None where
        there are none.
        """
        looking = [r for r, row in enumerate(rows) if row.looks_up]
        if not looking or self._index is None:
            return None
        found = self._matches([rows[r] for r in looking], min(most, MAX_DEPTH), self._index)
        # Cut at each row's limit, and where the controller finds the rest too unlikely.
        deepest = np.array([max(0, rows[r].deepest) for r in looking])
        sizes = np.minimum(found.sizes, deepest)
        if not sizes.any():
            return None
        tokens, sizes, known = _spread([found.paths, sizes, found.known], looking, len(rows))
        return follow(Paths(tokens, sizes, known, drawn, np.zeros(len(rows))))

    def _matches(self, rows: Sequence[Row], most: int, index: TextIndex) -> Matches:
        """Matches of the rows' texts, once their new tokens are entered."""
        texts = np.array([self._text_of(row, index) for row in rows])
        lengths = index.lengths[texts].tolist()
        index.extend(texts, [row.tokens[length:] for row, length in zip(rows, lengths, strict=True)])
        return index.match(texts, most)

    def end(self, row: Row) -> None:
        """Forget a row."""
        if row in self._texts:
            self._free.append(self._texts.pop(row))

    def _text_of(self, row: Row, index: TextIndex) -> int:
        if row not in self._texts:
            text = self._texts[row] = self._free.pop()
            index.clear(text)
        return self._texts[row]


def _spread(values: Sequence[Array], places: Sequence[int], num: int) -> list[Array]:
    """Arrays [N, ...] at N places among `num`, zeros elsewhere."""
    if len(places) == num:
        return list(values)
    found = [np.zeros((num, *each.shape[1:]), dtype=each.dtype) for each in values]
    for whole, each in zip(found, values, strict=True):
        whole[places] = each
    return found
