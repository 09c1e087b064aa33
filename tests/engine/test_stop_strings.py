"""StopSearch against a slow oracle, on strings that repeat themselves; and its work per character."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.engine.stop_strings import StopSearch
from helpers.texts import slow_stop


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.text("ab", max_size=12), max_size=8), st.lists(st.text("ab", min_size=1, max_size=9), max_size=4))
def test_strings_that_repeat_themselves(pieces: list[str], stops: list[str]) -> None:
    search, seen = StopSearch(stops), ""
    shown = ""
    for piece in pieces:
        seen += piece
        shown += search.push(piece)
        assert shown == slow_stop(seen, stops)[0]
    assert search.stopped == any(stop in seen for stop in stops)
    assert (shown, search.finish()) == slow_stop(seen, stops)


class Counted(list[int]):
    """A list that counts its look-ups."""

    num = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        self.num += 1
        return super().__getitem__(index)


def fibonacci(length: int) -> str:
    """Prefix of the Fibonacci word, a worst case of this search."""
    shorter, longer = "a", "ab"
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


@pytest.mark.parametrize("stop", ["a" * 20000 + "b", fibonacci(20000), "ab" * 10000 + "c"])
def test_no_character_takes_long(stop: str) -> None:
    """Few steps for a character that breaks a match, regardless of how much of a long stop string has matched."""
    search = StopSearch([stop])
    (match,) = search._matches
    counted = match._fallback = Counted(match._fallback)
    most, before = 0, 0
    for text in [*stop[:-1], "x", *stop[:-3], "c", *stop[:500]]:
        search.push(text)
        most, before = max(most, counted.num - before), counted.num
    assert not search.stopped
    assert counted.num > 1000
    assert most <= 2 * math.log(len(stop), (1 + math.sqrt(5)) / 2) + 4
