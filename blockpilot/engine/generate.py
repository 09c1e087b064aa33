"""Decode one prompt with a new engine."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from blockpilot.control.acceptance import Prior
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Policy, Request, Sampling, Step


def generate(
    pair: Pair,
    prompt_ids: Any,
    *,
    block_size: int | None = None,
    layout: Layout = "auto",
    lookup: bool | None = None,
    policy: Policy | Prior | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    min_new_tokens: int = 0,
    stop_token_ids: Collection[int] | None = None,
    stop_strings: str | Sequence[str] = (),
) -> Iterator[Step]:
    """Decode one prompt; yields every step with its new `tokens`: `pair.tokenizer.decode(step.tokens)`.

    prompt_ids: token ids, as a list, tuple, tensor or array [n] or [1, n], or the output of `pair.tokenizer(text)` or
    `pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True)`.
    block_size: tokens that a step verifies, including the anchor; 1 never drafts. By default it adapts at every step,
    or a `policy` that is a function fixes it for the whole text. layout: "tree" verifies a draft tree, "chain" one
    sequence. lookup: prompt lookup, which also verifies tokens that followed earlier occurrences of the text's end;
    by default on if the block size adapts. The text is the same for all of these.
    max_new_tokens: maximum; fewer if the target's context is full. Nothing stops the text before min_new_tokens.
    temperature 0 is greedy; the other sampling parameters are off by default (`Sampling`). The seed determines
    the text. stop_token_ids end the text and are its last token; by default the pair's. stop_strings end the text
    before them: `step.texts` is then the text to show.

    Raises ValueError, naming the argument, for an invalid value, immediately rather than at the first step.
    """
    sampling = Sampling(
        temperature,
        top_p,
        top_k,
        seed,
        min_p,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        tuple((logit_bias or {}).items()),
    )
    stops: Any = pair.stop_token_ids if stop_token_ids is None else stop_token_ids
    strings: Any = stop_strings  # Request accepts all forms of both arguments
    request = Request(
        prompt_ids,
        max_new_tokens,
        sampling,
        block_size,
        stops,
        strings,
        layout=layout,
        min_new_tokens=min_new_tokens,
        lookup=lookup,
    )
    # The shortest length that fits the text: it determines the memory of the KV caches.
    max_length = max(2, min(len(request.prompt_ids) + max_new_tokens, pair.max_length))
    engine = Engine(pair, num_slots=1, max_length=max_length, policy=policy)
    engine.add(request)
    return _steps(engine)


def _steps(engine: Engine) -> Iterator[Step]:
    while not engine.idle:
        yield from engine.step()
