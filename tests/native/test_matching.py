"""Matches of texts' ends against a search through all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.native.matching import TextIndex
from helpers.texts import slow_match

texts_of_few_tokens = st.lists(st.integers(0, 3), max_size=200)


@given(st.lists(texts_of_few_tokens, min_size=1, max_size=3), st.lists(st.integers(1, 30), max_size=20))
def test_the_longest_matches_are_those_of_a_search(texts: list[list[int]], cuts: list[int]) -> None:
    """However the texts came, by parts or whole; of few different tokens, so that much is repeated."""
    index, done, most = TextIndex(4, 200), 0, 5
    numbers = np.arange(len(texts))[::-1].copy()
    for number in numbers:
        index.extend(numbers[:1], [[9, 9, 9]])
        index.clear(int(number))
    index.clear(int(numbers[0]))
    for size in [*cuts, 200]:
        index.extend(numbers, [text[done : done + size] for text in texts])
        done += size
        found = index.match(numbers, most)
        for r, text in enumerate(texts):
            length, following, agree, seen = slow_match(text[:done], most)
            assert (found.lengths[r], found.seen[r]) == (length, seen)
            assert found.agree[r] == pytest.approx(agree)
            assert found.paths[r, : found.sizes[r]].tolist() == following


def test_memory_is_linear_and_room_is_kept() -> None:
    assert TextIndex(3, 1 << 13).num_bytes == 3 * 12 * (1 << 13)
    index = TextIndex(1, 4)
    index.clear(0)
    index.extend(np.zeros(1, dtype=np.int64), [[1, 2, 3, 4]])
    with pytest.raises(ValueError, match="5 tokens: a text has room for 4"):
        index.extend(np.zeros(1, dtype=np.int64), [[5]])
