"""Limits of an engine, and the check of requests against them."""

from typing import NamedTuple

from blockpilot.types import LAYOUTS, Request


class EngineLimits(NamedTuple):
    """Maximum tokens of prompt and answer together, in the engine (max_length) and in the target (model_length);
    maximum tokens of a block; vocabulary size; and whether there is a draft.
    """

    max_length: int
    model_length: int
    max_block_size: int
    vocab_size: int
    has_draft: bool = True

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that the engine cannot serve."""
        num_prompt_tokens, vocab_size = len(request.prompt_ids), self.vocab_size
        at_least_one(max_new_tokens=request.max_new_tokens)
        if num_prompt_tokens == 0:
            raise ValueError("prompt is empty: at least 1 token is needed")
        if num_prompt_tokens >= self.max_length:
            engine_limit = f"max_length is {self.max_length}, " if self.max_length < self.model_length else ""
            raise ValueError(
                f"prompt of {num_prompt_tokens} tokens: at most {self.max_length - 1} leave room for an answer"
                f" ({engine_limit}the model's limit is {self.model_length} tokens)"
            )
        if outside := [t for t in request.prompt_ids if not 0 <= t < vocab_size]:
            raise ValueError(f"prompt token {outside[0]}: must be 0 to {vocab_size - 1}, the target embeds no other")
        if outside := [t for t in request.stop_token_ids if not 0 <= t < vocab_size]:
            raise ValueError(f"stop_token_ids: token {outside[0]}: must be 0 to {vocab_size - 1}")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if (num := getattr(request, name)) is not None and not 0 <= num <= vocab_size:
                raise ValueError(f"{name} {num}: must be 0 to {vocab_size}")
        if not 0 <= request.min_new_tokens <= request.max_new_tokens:
            bound = f"{request.max_new_tokens}, the most new tokens"
            raise ValueError(f"min_new_tokens {request.min_new_tokens}: must be 0 to {bound}")
        biased = [t for t, _ in request.sampling.logit_bias if t >= vocab_size]
        if biased:
            raise ValueError(f"logit_bias: token {biased[0]}: must be 0 to {vocab_size - 1}")
        if request.block_size is not None:
            self.check_block_size(request.block_size, lookup=request.lookup)
        if request.layout not in LAYOUTS:
            raise ValueError(f"layout {request.layout!r}: must be one of {', '.join(LAYOUTS)}")
        if request.lookup not in (None, False, True):
            raise ValueError(f"lookup {request.lookup!r}: must be True, False or None")

    def check_block_size(self, block_size: int, name: str = "block_size", *, lookup: bool | None = None) -> None:
        """Raise ValueError for a size out of range, or above 1 if there is neither a draft nor `lookup`."""
        if not 1 <= block_size <= self.max_block_size:
            raise ValueError(f"{name} {block_size}: must be 1 to {self.max_block_size}")
        if block_size > 1 and not (self.has_draft or lookup):
            raise ValueError(
                f"{name} {block_size}: the pair has no draft; allowed: 1, none, or lookup=True beside it"
            )


def at_least_one(**values: int) -> None:
    """Raise ValueError, naming the first value below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
