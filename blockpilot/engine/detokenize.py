"""Incremental detokenizer of one response, with stop strings.

A token may hold a part of a character and a stop string may span tokens, so text is shown only once no later token
can change it. The text is the UTF-8 of the tokens' bytes, cut before the stop string that is complete first. Invalid
bytes become U+FFFD by Unicode's rule (as `bytes.decode(errors="replace")` does): one for each longest prefix of a
character, and one for any other byte. The text does not depend on whether tokens are pushed one by one or in blocks.
"""

import codecs
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from blockpilot.engine.stop_strings import StopSearch
from blockpilot.engine.token_bytes import Speller


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Incremental UTF-8 decoder; it holds back an incomplete character."""
    return codecs.getincrementaldecoder("utf-8")("replace")


class TextStream:
    """Incremental detokenizer of one response; special tokens have no text.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        self._speller, self._utf8, self._search = Speller(tokenizer), utf8_decoder(), StopSearch(stop_strings)

    @property
    def stopped(self) -> bool:
        """True once a stop string has occurred; the text ends before it."""
        return self._search.stopped

    def push(self, tokens: Iterable[int], *, may_stop: bool = True) -> str:
        """New text that no later token can change; empty when stopped.

        Stop strings are searched in it only if `may_stop`.
        """
        # The decoder holds back an incomplete character, the search a possible prefix of a stop string.
        text = self._utf8.decode(b"".join(map(self._speller.push, tokens)))
        return self._search.push(text) if may_stop else text

    def finish(self) -> str:
        """The remaining text at the end of the response; empty after a stop string."""
        rest = self._search.push(self._utf8.decode(self._speller.finish(), final=True))
        return rest + self._search.finish()
