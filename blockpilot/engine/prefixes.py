"""Prefix cache: keys and values of earlier texts, of target and draft, for requests that begin alike.

What is final in a row's slot is copied out when its prompt is through and when it ends, and into the slot of a new
request with the same tokens, which takes far less than computing them. Texts are kept by pages of PAGE tokens, in a
tree whose branches share what they begin with, as in RadixAttention (arXiv 2312.07104). A draft's entry may be made
of the token after its own (EAGLE-3), so a page is found by its tokens and the next one. The last token of a prompt is
always computed: with it come the logits and the context vector that a policy reads.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blockpilot.engine.rows import Row
from blockpilot.models.cache import Pages, SlotCache
from blockpilot.types import Step

PAGE = 16
WORTH_WAITING = 64  # tokens: a request is not computed beside another one that it shares so many with


class Page(NamedTuple):
    """Columns of both caches."""

    place: int
    has_context: bool
    """The draft's columns are there, too: a row that decodes plainly does not fill them."""


Key = tuple[int | str, tuple[int, ...]]
"""Place of the page before, or the salt of a first one; tokens [PAGE + 1]."""


class Prefixes:
    """Pages of `num_tokens` tokens at most; the least recently used go first. None are kept for 0.

    Requests share pages only with those of the same `cache_salt`.
    """

    def __init__(self, target: SlotCache, draft: SlotCache, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"prefix_tokens {num_tokens}: must be at least 0")
        self._num_pages = num_tokens // PAGE
        self._target, self._draft = (Pages(cache, self._num_pages, PAGE) for cache in (target, draft))
        self._free = list(range(self._num_pages))
        self._pages: OrderedDict[Key, Page] = OrderedDict()
        """By their last use; a page is used after those that follow it, so the first one has none."""

    @property
    def num_bytes(self) -> int:
        return self._target.num_bytes + self._draft.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept now."""
        return len(self._pages) * PAGE

    def reuse(self, row: Row, slot: int) -> None:
        """Fill a new row's slot with what is kept of its prompt; of a row that drafts, with its context.

        A row that wants log probabilities of its prompt computes all of it.
        """
        keys = self._found(row) if row.request.num_prompt_logprobs is None else []
        for i, key in enumerate(keys):
            self._target.load(self._pages[key].place, slot, i * PAGE)
            if row.can_draft:
                self._draft.load(self._pages[key].place, slot, i * PAGE)
        self._touch(keys)
        row.num_reused = row.num_cached = row.num_drafted_from = len(keys) * PAGE

    def keep(self, rows: Sequence[Row], steps: Sequence[Step]) -> None:
        """Keep the texts of rows, in slots 0 .. R - 1, whose prompt or answer is through by one of the steps."""
        through = {step.request_id for step in steps if step.prefill is not None or step.finish_reason is not None}
        for slot, row in enumerate(rows):
            if row.request_id in through:
                self._keep(row, slot)

    def worth_waiting(self, row: Row, beside: Sequence[Row]) -> bool:
        """True if one of the rows whose prompts are taken in now will leave much more of this one's prompt."""
        if not self._num_pages or not beside or row.request.num_prompt_logprobs is not None:
            return False
        num = len(self._found(row)) * PAGE + WORTH_WAITING
        start = row.tokens[:num]
        return len(start) == num and any(_may_use(row, other) and other.tokens[:num] == start for other in beside)

    def _keep(self, row: Row, slot: int) -> None:
        """Keep all tokens but the anchor, which the caches do not hold."""
        keys = self._found(row)
        self._touch(keys)
        before: int | str = self._pages[keys[-1]].place if keys else row.request.cache_salt
        texts = list(_pages_of(row.tokens))[: self._num_pages]
        for i in range(len(keys), len(texts)):
            # A page is found by the page before it: branches share what they begin with.
            key = before, texts[i]
            known = self._pages.pop(key, None)  # of a row that decoded plainly
            before = self._place() if known is None else known.place
            self._pages[key] = Page(before, row.can_draft)
            self._target.store(before, slot, i * PAGE)
            if row.can_draft:
                self._draft.store(before, slot, i * PAGE)
            keys.append(key)
        self._touch(keys)

    def _found(self, row: Row) -> list[Key]:
        """The longest prefix of a row's tokens that is kept, as it needs it."""
        keys = list[Key]()
        before: int | str = row.request.cache_salt
        for tokens in _pages_of(row.tokens):
            page = self._pages.get((before, tokens))
            if page is None or (row.can_draft and not page.has_context):
                break
            keys.append((before, tokens))
            before = page.place
        return keys

    def _place(self) -> int:
        """A free one, if need be that of the page used least recently: none of those just touched."""
        return self._free.pop() if self._free else self._pages.popitem(last=False)[1].place

    def _touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._pages.move_to_end(key)


def _pages_of(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Tokens [PAGE + 1] of every page that ends before the last token."""
    return (tuple(tokens[first : first + PAGE + 1]) for first in range(0, len(tokens) - PAGE, PAGE))


def _may_use(row: Row, other: Row) -> bool:
    """True if a row may use what the other one leaves."""
    return row.request.cache_salt == other.request.cache_salt and (other.can_draft or not row.can_draft)
