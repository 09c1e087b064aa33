"""Tokens to text as they arrive, and stop strings, for one response.

A byte-level token may hold half a character and a stop string may span tokens, so text is shown only once
no later token can change it. However the tokens are pushed, one by one or block by block, the text is the
same: `decode(all tokens)`, cut before the stop string that is complete first (of those complete at one
place, the longest).
"""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

# A decoder writes U+FFFD for bytes that make no character (yet): one for all the bytes of a character that
# waits for more, or one for each of a whole run of bytes. At most three bytes can be waiting.
_UNDECODED = "\ufffd"
_MAX_WAITING = 3
# But tokens that make no text must not pile up: after twice this many only the last ones can still matter.
_MAX_PENDING_TOKENS = 16


class TextStream:
    """Incremental detokeniser of one response; special tokens have no text.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        if "" in stop_strings:
            raise ValueError("stop strings: '' is empty; each must have at least one character")
        self.stopped = False  # a stop string has occurred; the text ends before it
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._window: list[int] = []  # decoded together: context already shown, then pending tokens
        self._num_context = 0  # tokens of the window whose text has been taken entirely
        self._num_taken = 0  # characters of the window's text taken already
        self._held = ""  # taken, but perhaps the beginning of a stop string

    def push(self, tokens: Iterable[int]) -> str:
        """New text that no later token can change; empty when stopped."""
        if self.stopped:
            return ""
        self._window.extend(tokens)
        return self._release(self._take_whole_characters())

    def finish(self) -> str:
        """The rest of the text, at the end of the response (nothing after a stop string)."""
        if self.stopped:
            return ""
        rest = self._decode()[self._num_taken :]
        self._num_taken += len(rest)
        shown = self._release(rest)
        held, self._held = self._held, ""
        return shown + held

    def _decode(self) -> str:
        # Cleaning up spaces would alter the text after the fact.
        text = self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _take_whole_characters(self) -> str:
        text = self._decode()
        num_pending = len(self._window) - self._num_context
        crowded = num_pending > 2 * _MAX_PENDING_TOKENS
        num_whole = _num_whole(text, crowded)
        new = text[self._num_taken : num_whole]
        self._num_taken = max(self._num_taken, num_whole)
        if new and num_whole == len(text):
            self._keep(num_pending, num_context=num_pending)  # shown now, context of what follows
        elif crowded:
            self._keep(_MAX_PENDING_TOKENS, num_context=0)
        return new

    def _keep(self, num_tokens: int, num_context: int) -> None:
        self._window = self._window[len(self._window) - num_tokens :]
        self._num_context = num_context
        self._num_taken = _num_whole(self._decode(), crowded=True)

    def _release(self, new: str) -> str:
        """Add `new` to the text held back; return what cannot belong to a stop string any more."""
        text = self._held + new
        ends = [(start + len(s), start) for s in self._stop_strings if (start := text.find(s)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        num_held = max((_overlap(text, s) for s in self._stop_strings), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _num_whole(text: str, crowded: bool) -> int:
    """Characters of `text` that stay as they are whatever follows."""
    whole = len(text.rstrip(_UNDECODED))
    return max(whole, len(text) - _MAX_WAITING) if crowded else whole


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
