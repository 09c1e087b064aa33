"""Counts of the forward passes that a pair's models make."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from blockpilot.pairs.loading import Pair


class Passes(NamedTuple):
    target: int
    draft: int


@contextmanager
def counting(pair: Pair) -> Iterator[Callable[[], Passes]]:
    """Count the passes of both models; the function that it gives returns those since its last call.

    A pass of the target is one of its transformer body, with or without the LM head. A pass of the draft is one of
    its network, by `propose` or not. Putting context into the draft's cache is none.
    """
    num_target = num_draft = num_proposed = 0

    def count_target(*_: object) -> None:
        nonlocal num_target
        num_target += 1

    def count_draft(*_: object) -> None:
        nonlocal num_draft
        num_draft += 1

    propose = pair.draft.propose

    def counted(*args: object, **named: object) -> Tensor:
        nonlocal num_proposed
        num_proposed += 1
        return propose(*args, **named)  # type: ignore[arg-type]

    def since_last() -> Passes:
        nonlocal num_target, num_draft, num_proposed
        assert num_proposed == num_draft, "a pass of the draft is one proposal"
        passes = Passes(num_target, num_draft)
        num_target = num_draft = num_proposed = 0
        return passes

    # Every pass of the target ends in its norm, in whatever form.
    norm = pair.target.model.norm
    hooks = [norm.register_forward_hook(count_target), pair.draft.register_forward_hook(count_draft)]
    pair.draft.propose = counted  # type: ignore[method-assign]
    try:
        yield since_last
    finally:
        del pair.draft.propose
        for hook in hooks:
            hook.remove()
