"""One prompt decoded by an engine of its own."""

from collections.abc import Iterator, Sequence

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Policy, Request, Sampling, Step


def generate(
    pair: Pair,
    prompt_ids: Sequence[int],
    *,
    block_size: int | None = None,
    layout: Layout = "auto",
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_token_ids: frozenset[int] | None = None,
    stop_strings: tuple[str, ...] = (),
) -> Iterator[Step]:
    """Decode one prompt, yielding every step. Without a block size or policy, the draft's trained block size.

    layout: "tree" lays a step's tokens out as a draft tree, "chain" one after the other.
    """
    request = Request(
        tuple(prompt_ids),
        max_new_tokens,
        Sampling(temperature, top_p, top_k, seed),
        block_size,
        pair.stop_token_ids if stop_token_ids is None else stop_token_ids,
        stop_strings,
        layout=layout,
    )
    max_length = max(2, min(len(request.prompt_ids) + max_new_tokens, pair.max_length))
    engine = Engine(pair, num_slots=1, max_length=max_length, policy=policy)
    engine.add(request)
    while not engine.idle:
        yield from engine.step()
