"""Matches of the ends of texts against a slow search through the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.native.matching import HELD_DECAY, TextIndex
from helpers.texts import slow_match

texts_of_few_tokens = st.lists(st.integers(0, 3), max_size=200)


@given(st.lists(texts_of_few_tokens, min_size=1, max_size=3), st.lists(st.integers(1, 30), max_size=20))
def test_the_longest_matches_are_those_of_a_search(texts: list[list[int]], cuts: list[int]) -> None:
    """Texts added in parts or whole, with few different tokens, so that much is repeated."""
    index, done, most = TextIndex(4, 200), 0, 5
    numbers = list(reversed(range(len(texts))))
    for number in numbers:
        index.match(numbers[:1], [[9, 9, 9]], most)
        index.clear(number)
    index.clear(numbers[0])
    held, expected = [0.5] * len(texts), [-1] * len(texts)
    for size in [*cuts, 200]:
        added = [text[done : done + size] for text in texts]
        matches = index.match(numbers, added, most)
        done += size
        for r, tokens in enumerate(added):
            if tokens and expected[r] >= 0:
                held[r] = HELD_DECAY * held[r] + (1 - HELD_DECAY) * (tokens[0] == expected[r])
        for r, text in enumerate(texts):
            length, following, agree, seen = slow_match(text[:done], most)
            expected[r] = following[0] if following else -1
            if matches is None:
                assert not following
                continue
            assert matches.seen[r] == seen
            assert matches.known[r].tolist() == pytest.approx([length, agree, held[r]])
            assert matches.paths[r, : matches.sizes[r]].tolist() == following


def test_memory_is_linear_and_room_is_kept() -> None:
    assert TextIndex(3, 1 << 13).num_bytes == 3 * 12 * (1 << 13)
    index = TextIndex(1, 4)
    index.clear(0)
    index.match([0], [[1, 2, 3, 4]], 5)
    with pytest.raises(ValueError, match="5 tokens: a text has room for 4"):
        index.match([0], [[5]], 5)
