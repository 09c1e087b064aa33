"""Limits of an engine, and the requests that they allow."""

from typing import NamedTuple

from blockpilot.types import LAYOUTS, Request


class EngineLimits(NamedTuple):
    """Tokens of prompt and answer together, tokens of a block, and the target's vocabulary."""

    max_length: int
    max_block_size: int
    vocab_size: int

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that such an engine cannot serve."""
        num_prompt_tokens, vocab_size = len(request.prompt_ids), self.vocab_size
        if num_prompt_tokens == 0:
            raise ValueError("prompt is empty: at least 1 token is needed")
        if num_prompt_tokens >= self.max_length:
            most = self.max_length - 1
            raise ValueError(f"prompt of {num_prompt_tokens} tokens: at most {most} leave room for an answer")
        if outside := [t for t in request.prompt_ids if not 0 <= t < vocab_size]:
            raise ValueError(f"prompt token {outside[0]}: must be 0 to {vocab_size - 1}, the target embeds no other")
        at_least_one(max_new_tokens=request.max_new_tokens)
        if request.num_logprobs is not None and not 0 <= request.num_logprobs <= vocab_size:
            raise ValueError(f"num_logprobs {request.num_logprobs}: must be 0 to {vocab_size}")
        if request.block_size is not None:
            self.check_block_size(request.block_size)
        if request.layout not in LAYOUTS:
            raise ValueError(f"layout {request.layout!r}: must be one of {', '.join(LAYOUTS)}")

    def check_block_size(self, block_size: int, name: str = "block_size") -> None:
        """Raise ValueError for one out of range."""
        if not 1 <= block_size <= self.max_block_size:
            raise ValueError(f"{name} {block_size}: must be 1 to {self.max_block_size}")


def at_least_one(**values: int) -> None:
    """Raise ValueError, naming the first that is below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
