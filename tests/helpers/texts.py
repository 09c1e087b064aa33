"""Slow reference searches of texts: for the longest match of their end, and for stop strings."""

from collections.abc import Sequence

from blockpilot.native.matching import LONGEST, MOST_FOLLOWERS, MOST_PLACES


def slow_match(tokens: Sequence[int], most: int) -> tuple[int, list[int], float, int]:
    """Longest match of a text's end: length, followers, share of matches with the first one, their number; or 0s."""
    match_ends = [p for p in range(1, len(tokens) - 1) if tokens[p - 1 : p + 1] == tokens[-2:]][::-1][:MOST_PLACES]
    best, start = 0, 0
    for match_end in match_ends:
        length = 2
        while length < LONGEST and length <= match_end and tokens[match_end - length] == tokens[-1 - length]:
            length += 1
        if length > best:
            best, start = length, match_end + 1
    if not best:
        return 0, [], 0.0, 0
    following = list(tokens[start:])
    while len(following) < most:
        following += following
    followers = [tokens[match_end + 1] for match_end in match_ends[:MOST_FOLLOWERS]]
    return best, following[:most], followers.count(tokens[start]) / len(followers), len(followers)


def slow_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Text before the first complete stop string; if there is none, the rest that is held back."""
    for end in range(len(text) + 1):
        complete_stops = [s for s in stops if text[:end].endswith(s)]
        if complete_stops:
            return text[: end - max(map(len, complete_stops))], ""
    held = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
    return text[: len(text) - held], text[len(text) - held :]
