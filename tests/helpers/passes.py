"""Counts of the forward passes that a pair's models make."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from blockpilot.drafts.dflash_prepared import CachedDFlash
from blockpilot.models.decoder import Decoder
from blockpilot.pairs.loading import Pair


class Passes(NamedTuple):
    target: int
    draft: int


@contextmanager
def counting(pair: Pair) -> Iterator[Callable[[], Passes]]:
    """Count the passes of both models; the function that it gives returns those since its last call.

    A pass of the target is one of its transformer body, with or without the LM head, a pass of the draft one of its
    network (not counted of EAGLE-3). Putting context into the draft's cache is none.
    """
    num_target = num_draft = 0

    def count_target(*_: object) -> None:
        nonlocal num_target
        num_target += 1

    def count_draft(*_: object) -> None:
        nonlocal num_draft
        num_draft += 1

    def since_last() -> Passes:
        nonlocal num_target, num_draft
        passes = Passes(num_target, num_draft)
        num_target = num_draft = 0
        return passes

    # The models' own passes end in their norm; the prepared ones are calls of their decoder.
    bodies = (pair.target.model, count_target), (pair.draft, count_draft)
    hooks = [body.norm.register_forward_hook(count) for body, count in bodies if hasattr(body, "norm")]
    with pytest.MonkeyPatch.context() as patch:
        embedding = pair.target.get_input_embeddings()
        _before(patch, Decoder, "__call__", lambda decoder: decoder.embed is embedding, count_target)
        _before(patch, CachedDFlash, "propose", lambda decoder: decoder.draft is pair.draft, count_draft)
        try:
            yield since_last
        finally:
            for hook in hooks:
                hook.remove()


def _before(
    patch: pytest.MonkeyPatch, kind: type, name: str, is_ours: Callable[[Any], bool], count: Callable[[], None]
) -> None:
    """Have calls of a method counted, of those objects that are ours."""
    method = getattr(kind, name)

    def counted(self: object, *args: Any, **options: Any) -> Any:
        if is_ours(self):
            count()
        return method(self, *args, **options)

    patch.setattr(kind, name, counted)
