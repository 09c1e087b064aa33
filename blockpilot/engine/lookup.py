"""Lookup of what may follow in rows' own texts: where a text's end stood before, much of what followed may again.

Texts are prompt and answer so far, final tokens only; no other request's text is ever looked up.
"""

from collections.abc import Callable, Sequence

import numpy as np

from blockpilot.control.acceptance import Array, Paths
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.native.library import has_functions
from blockpilot.native.matching import TextIndex

HELD_DECAY = 0.8  # a step


class Lookup:
    """An index of the texts of `num_slots` rows of at most `length` tokens; without C functions nothing is found."""

    def __init__(self, num_slots: int, length: int) -> None:
        self._index = TextIndex(num_slots, length) if has_functions() else None
        self._texts = dict[Row, int]()
        self._free = list(range(num_slots))
        self._expected = np.full(num_slots, -1)  # what followed the latest match of each text
        self._held = np.zeros(num_slots)  # how often that was right, lately

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes if self._index is not None else 0

    def paths(self, rows: Sequence[Row], most: int, follow: Callable[[Paths], Paths]) -> Paths | None:
        """What may follow rows [R], `most` tokens at most, with chances by `follow`; None where nothing does."""
        looking = [r for r, row in enumerate(rows) if row.looks_up]
        if not looking or self._index is None:
            return None
        texts = np.array([self._text_of(rows[r], self._index) for r in looking])
        self._take_in([rows[r] for r in looking], texts, self._index)
        found = self._index.match(texts, min(most, MAX_DEPTH))
        self._expected[texts] = np.where(found.sizes > 0, found.paths[:, 0], -1)
        deepest = np.array([rows[r].deepest for r in looking])
        sizes = np.minimum(found.sizes, deepest.clip(min=0))
        if not sizes.any():
            return None
        known = np.stack([found.lengths, found.agree, self._held[texts]], axis=1).astype(float)
        drawn = np.array([int(not row.request.sampling.is_greedy) for row in rows])
        paths, sizes, known = _spread([found.paths, sizes, known], looking, len(rows))
        return follow(Paths(paths, sizes, known, drawn, np.zeros(paths.shape)))

    def end(self, row: Row) -> None:
        """Forget a row."""
        if row in self._texts:
            self._free.append(self._texts.pop(row))

    def _text_of(self, row: Row, index: TextIndex) -> int:
        if row not in self._texts:
            text = self._texts[row] = self._free.pop()
            index.clear(text)
            self._expected[text], self._held[text] = -1, 0.5
        return self._texts[row]

    def _take_in(self, rows: Sequence[Row], texts: Array, index: TextIndex) -> None:
        """Enter the rows' new tokens, and note which of them were expected."""
        added = [row.tokens[length:] for row, length in zip(rows, index.lengths[texts].tolist(), strict=True)]
        expected, first = self._expected[texts], np.array([each[0] if each else -2 for each in added])
        held = HELD_DECAY * self._held[texts] + (1 - HELD_DECAY) * (first == expected)
        self._held[texts] = np.where((expected >= 0) & (first >= 0), held, self._held[texts])
        index.extend(texts, added)


def _spread(values: Sequence[Array], places: Sequence[int], num: int) -> list[Array]:
    """Arrays [N, ...] at N places among `num`, zeros elsewhere."""
    if len(places) == num:
        return list(values)
    found = [np.zeros((num, *each.shape[1:]), dtype=each.dtype) for each in values]
    for whole, each in zip(found, values, strict=True):
        whole[places] = each
    return found
