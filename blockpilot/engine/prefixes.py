"""Prefix cache: keys and values of earlier texts, of target and draft, for requests that share a prefix.

The entries of a row's accepted tokens are copied from its slot to pages after its prefill and when it ends, and from
pages to the slot of a new request with the same tokens, which takes far less time than computing them. Pages of PAGE
tokens form a tree whose branches share their prefix, as in RadixAttention (arXiv 2312.07104). A draft's entry may
depend on the next token (EAGLE-3), so the key of a page includes the token after the page. The last token of a prompt
is always computed: its logits and context vector are inputs of a policy.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blockpilot.engine.rows import Row
from blockpilot.models.cache import Pages, SlotCache
from blockpilot.types import Step

PAGE = 16
MIN_WAIT_TOKENS = 64  # a request waits for another one's prefill if it can then reuse at least this many more tokens


class Page(NamedTuple):
    """A cached page: its number in the memory of both caches."""

    number: int
    has_context: bool
    """True if the draft's columns are cached, too: a row that never drafts does not fill them."""


Key = tuple[int | str, tuple[int, ...]]
"""Number of the previous page, or the cache salt for a first page; tokens [PAGE + 1]."""


class Prefixes:
    """Prefix cache of at most `num_tokens` tokens in pages, evicted least recently used first; 0 disables it.

    Requests share pages only with requests of the same `cache_salt`.
    """

    def __init__(self, target: SlotCache, draft: SlotCache, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"prefix_tokens {num_tokens}: must be at least 0")
        self._num_pages = num_tokens // PAGE
        self._target, self._draft = (Pages(cache, self._num_pages, PAGE) for cache in (target, draft))
        self._free = list(range(self._num_pages))
        self._pages: OrderedDict[Key, Page] = OrderedDict()
        """Least recently used first. A page is touched after the pages that follow it, so the first one is a leaf."""

    @property
    def num_bytes(self) -> int:
        return self._target.num_bytes + self._draft.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache."""
        return len(self._pages) * PAGE

    def reuse(self, row: Row, slot: int) -> None:
        """Copy the cached prefix of a new row's prompt to its slot, and the draft's context if the row may draft.

        A request for log probabilities of its prompt reuses nothing.
        """
        keys = self._cached_prefix(row) if row.request.num_prompt_logprobs is None else []
        for i, key in enumerate(keys):
            self._target.load(self._pages[key].number, slot, i * PAGE)
            if row.can_draft:
                self._draft.load(self._pages[key].number, slot, i * PAGE)
        self._touch(keys)
        row.num_reused = row.num_cached = row.num_draft_cached = len(keys) * PAGE

    def keep(self, rows: Sequence[Row], steps: Sequence[Step]) -> None:
        """Cache the texts of rows, in slots 0 .. R - 1, whose prompt or answer is complete after these steps."""
        complete = {step.request_id for step in steps if step.prefill is not None or step.finish_reason is not None}
        for slot, row in enumerate(rows):
            if row.request_id in complete:
                self._keep(row, slot)

    def worth_waiting(self, row: Row, in_prefill: Sequence[Row]) -> bool:
        """True if a row in prefill now will cache at least MIN_WAIT_TOKENS more tokens of this row's prompt."""
        if not self._num_pages or not in_prefill or row.request.num_prompt_logprobs is not None:
            return False
        num = len(self._cached_prefix(row)) * PAGE + MIN_WAIT_TOKENS
        start = row.tokens[:num]
        return len(start) == num and any(_may_use(row, other) and other.tokens[:num] == start for other in in_prefill)

    def _keep(self, row: Row, slot: int) -> None:
        """Cache the full pages of a row's text before the anchor, whose keys and values are not computed yet."""
        keys = self._cached_prefix(row)
        self._touch(keys)
        previous: int | str = self._pages[keys[-1]].number if keys else row.request.cache_salt
        texts = list(_pages_of(row.tokens))[: self._num_pages]
        for i in range(len(keys), len(texts)):
            # The key of a page includes the previous page: branches share their prefix.
            key = previous, texts[i]
            page = self._pages.pop(key, None)  # cached without the draft's context
            previous = number = self._free_page() if page is None else page.number
            self._pages[key] = Page(number, row.can_draft)
            self._target.store(number, slot, i * PAGE)
            if row.can_draft:
                self._draft.store(number, slot, i * PAGE)
            keys.append(key)
        self._touch(keys)

    def _cached_prefix(self, row: Row) -> list[Key]:
        """Keys of the longest cached prefix of a row's tokens, with the draft's context if the row may draft."""
        keys = list[Key]()
        previous: int | str = row.request.cache_salt
        for tokens in _pages_of(row.tokens):
            page = self._pages.get((previous, tokens))
            if page is None or (row.can_draft and not page.has_context):
                break
            keys.append((previous, tokens))
            previous = page.number
        return keys

    def _free_page(self) -> int:
        """Number of a free page; if there is none, evicts the least recently used page, never one just touched."""
        return self._free.pop() if self._free else self._pages.popitem(last=False)[1].number

    def _touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._pages.move_to_end(key)


def _pages_of(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Tokens [PAGE + 1] of every page that ends before the last token."""
    return (tuple(tokens[first : first + PAGE + 1]) for first in range(0, len(tokens) - PAGE, PAGE))


def _may_use(row: Row, other: Row) -> bool:
    """True if a row may use the pages that the other one caches."""
    return row.request.cache_salt == other.request.cache_salt and (other.can_draft or not row.can_draft)
