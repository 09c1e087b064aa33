"""Incremental search for stop strings (Knuth, Morris and Pratt).

Every character of the text takes a bounded number of steps, regardless of the length of strings and partial matches;
tables grow with the longest match, not with the strings.
"""

from collections.abc import Sequence


class StopSearch:
    """Holds back possible prefixes of stop strings; the text ends before the stop string that is complete first.

    If several are complete at the same position, the longest counts. Raises ValueError for an empty string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise ValueError("stop strings: '' is empty; each must have at least one character")
        self.stopped = False
        self._matches = [_Match(string) for string in strings]
        self._held = ("", 0)  # a stop string, and the number of its characters that are held back

    def push(self, text: str) -> str:
        """Text that cannot be part of a stop string; empty when stopped."""
        if not self._matches or self.stopped:
            return "" if self.stopped else text
        string, num_held = self._held
        ends = [(end, -len(m.string)) for m in self._matches if (end := m.advance(text)) is not None]
        if ends:  # the earliest end; of equal ends the longest string
            self.stopped, self._held = True, ("", 0)
            end, negative = min(ends)
            num_shown = num_held + end + negative
        else:
            # Nothing is complete: hold back the longest partial match.
            longest = max(self._matches, key=lambda match: match.length)
            self._held = longest.string, longest.length
            num_shown = num_held + len(text) - longest.length
        return string[: min(num_held, num_shown)] + text[: max(0, num_shown - num_held)]

    def finish(self) -> str:
        """The text held back, at the end of the response."""
        (string, num_held), self._held = self._held, ("", 0)
        return string[:num_held]


class _Match:
    """Partial match: the longest prefix of `string` that the text ends with has `length` characters."""

    def __init__(self, string: str) -> None:
        self.string, self.length = string, 0
        # After string[:k] and a character other than string[k], the match continues with fallback[k] characters: the
        # longest suffix of string[:k] that is also a prefix and has another next character. -1: none.
        self._fallback = [-1]
        self._border = 0  # longest proper suffix of string[:len(fallback)] that is also its prefix

    def advance(self, text: str) -> int | None:
        """Continue with `text`; returns the end of the first complete match in it, if any."""
        string, fallback, length, i = self.string, self._fallback, self.length, 0
        while i < len(text):
            if length == 0 and (i := text.find(string[0], i)) < 0:
                break
            while length >= 0 and string[length] != text[i]:
                length = fallback[length]
            length, i = length + 1, i + 1
            if length == len(string):
                return i
            if length == len(fallback):
                self._extend()
        self.length = length
        return None

    def _extend(self) -> None:
        string, fallback, border = self.string, self._fallback, self._border
        last = string[len(fallback)]
        fallback.append(fallback[border] if string[border] == last else border)
        while border >= 0 and string[border] != last:
            border = fallback[border]
        self._border = border + 1
