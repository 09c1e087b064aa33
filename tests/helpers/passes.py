"""Counts of forward passes of a pair's models."""

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
    """Count the passes of both models; yields a function that returns those since its last call.

    A pass of the target is one of its transformer body, with or without the LM head; a pass of the draft is one of
    its network (not counted for EAGLE-3). Adding context to the draft's cache is not a pass.
    """
    counts, embedding = [0, 0], pair.target.get_input_embeddings()

    def count(index: int) -> None:
        counts[index] += 1

    def since_last() -> Passes:
        passes, counts[:] = Passes(*counts), [0, 0]
        return passes

    # A pass of a stock model ends in its norm; a pass of a prepared model is a call of its decoder.
    bodies = [(i, body) for i, body in enumerate((pair.target.model, pair.draft)) if hasattr(body, "norm")]
    hooks = [body.norm.register_forward_hook(lambda *_, i=i: count(i)) for i, body in bodies]
    with pytest.MonkeyPatch.context() as patch:
        _before(patch, Decoder, "__call__", lambda decoder: decoder.embed is embedding and count(0))
        _before(patch, CachedDFlash, "propose", lambda decoder: decoder.draft is pair.draft and count(1))
        try:
            yield since_last
        finally:
            for hook in hooks:
                hook.remove()


def _before(patch: pytest.MonkeyPatch, kind: type, name: str, call: Callable[[Any], object]) -> None:
    """Patch a method so that every call is preceded by `call` with its object."""
    method = getattr(kind, name)

    def wrapped(self: object, *args: Any, **options: Any) -> Any:
        call(self)
        return method(self, *args, **options)

    patch.setattr(kind, name, wrapped)
