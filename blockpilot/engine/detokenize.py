"""Tokens to text as they arrive, and stop strings, for one response.

A token may hold a part of a character and a stop string may span tokens, so text is shown only once no later token
can change it. The text is the UTF-8 of the tokens' bytes, cut before the stop string that is complete first. What is
no character is written as U+FFFD by Unicode's rule (as `bytes.decode(errors="replace")` does): one for each longest
beginning of a character, and one for any other byte. It is the same however the tokens are pushed, one by one or
block by block.
"""

import codecs
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from blockpilot.engine.stop_strings import StopSearch
from blockpilot.engine.token_bytes import Speller


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Bytes to characters as they arrive; it keeps the beginning of a character."""
    return codecs.getincrementaldecoder("utf-8")("replace")


class TextStream:
    """Incremental detokeniser of one response; special tokens have no text.

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

        Stop strings are looked for in the text from the first tokens on that `may_stop`.
        """
        # The decoder holds back the beginning of a character, the search what may be that of a stop string.
        text = self._utf8.decode(b"".join(map(self._speller.push, tokens)))
        return self._search.push(text) if may_stop else text

    def finish(self) -> str:
        """The rest of the text, at the end of the response (nothing after a stop string)."""
        rest = self._search.push(self._utf8.decode(self._speller.finish(), final=True))
        return rest + self._search.finish()
