"""A search through all of a text, where its index is to find the same."""

from collections.abc import Sequence

from blockpilot.native.matching import LONGEST, MOST_FOLLOWERS, MOST_PLACES


def slow_match(tokens: Sequence[int], most: int) -> tuple[int, list[int], float, int]:
    """Length, what followed, and the share of places, of how many, that it followed: zeros for none."""
    places = [p for p in range(1, len(tokens) - 1) if tokens[p - 1 : p + 1] == tokens[-2:]][::-1][:MOST_PLACES]
    best, start = 0, 0
    for place in places:
        length = 2
        while length < LONGEST and length <= place and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if length > best:
            best, start = length, place + 1
    if not best:
        return 0, [], 0.0, 0
    following = list(tokens[start:])
    while len(following) < most:
        following += following
    followers = [tokens[place + 1] for place in places[:MOST_FOLLOWERS]]
    return best, following[:most], followers.count(tokens[start]) / len(followers), len(followers)
