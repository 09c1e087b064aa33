"""Compare: this engine against the decoding loop of the published package `dflash` 0.1.0, on the same weights.

Both decode the same prompts greedily, one at a time, in one process and in turns. The package is no dependency:
    pip install --no-deps dflash==0.1.0
"""

import importlib.util
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from blockpilot.drafts.checkpoint import save_draft
from blockpilot.engine.engine import generate
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import load_prompts
from jobs.common.config import Config, PairConfig, main


class PublishedLoopConfig(Config):
    """What both loops decode."""

    pair: PairConfig = PairConfig()
    prompts: str = "demo"
    """A prompt set by name, or a file."""
    num_prompts: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=64, ge=2)
    block_sizes: tuple[int, ...] = Field(default=(1, 4, 8), min_length=1)
    num_threads: int = Field(default=1, ge=1)
    """Torch threads of the process."""
    workdir: Path = Path("runs/compare_dflash")
    """The draft is written here once, as the package reads it."""


class Decoded(NamedTuple):
    """One loop's answer to one prompt."""

    tokens: tuple[int, ...]
    seconds: float


def run(config: PublishedLoopConfig) -> dict[int, float]:
    """Print both loops' tokens/s; returns block size -> ratio (ours over theirs)."""
    if importlib.util.find_spec("dflash") is None:
        raise ValueError("package dflash is not installed: pip install --no-deps dflash==0.1.0")
    prompts = load_prompts(config.prompts, config.num_prompts)
    torch.set_num_threads(config.num_threads)
    pair = config.pair.load()
    theirs = _their_draft(pair, config.workdir)
    prompt_ids = [prompt.encode(pair.tokenizer) for prompt in prompts]
    ratios = {}
    table = Table("B", "ours tokens/s", "dflash tokens/s", "ratio", "equal texts", title=f"{pair.id.draft}, batch 1")
    for block_size in config.block_sizes:
        ours, published = _decode_in_turns(config, pair, theirs, prompt_ids, block_size)
        ratios[block_size] = _speed(ours) / _speed(published)
        equal = sum(a.tokens == b.tokens for a, b in zip(ours, published, strict=True))
        cells = (f"{_speed(ours):.1f}", f"{_speed(published):.1f}", f"{ratios[block_size]:.2f}")
        table.add_row(str(block_size), *cells, f"{equal}/{len(prompts)}")
    Console().print(table)
    return ratios


def _speed(answers: list[Decoded]) -> float:
    return sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)


def _their_draft(pair: Pair, directory: Path) -> Any:
    from dflash.model import DFlashDraftModel

    save_draft(pair.draft, directory, dtype=pair.draft.dtype)
    draft = DFlashDraftModel.from_pretrained(directory, dtype=pair.draft.dtype, attn_implementation="sdpa")
    return draft.to(pair.target.device).eval()


def _decode_in_turns(
    config: PublishedLoopConfig, pair: Pair, theirs: Any, prompt_ids: list[tuple[int, ...]], block_size: int
) -> tuple[list[Decoded], list[Decoded]]:
    from dflash.model import dflash_generate

    def published(ids: tuple[int, ...]) -> tuple[int, ...]:
        output = dflash_generate(
            theirs,
            pair.target,
            torch.tensor([ids], device=pair.target.device),
            config.max_new_tokens,
            sorted(pair.stop_token_ids),
            block_size=block_size,
        )
        return tuple(output[0, len(ids) :].tolist())

    def ours(ids: tuple[int, ...]) -> tuple[int, ...]:
        steps = generate(pair, ids, block_size=block_size, max_new_tokens=config.max_new_tokens)
        return tuple(token for step in steps for token in step.tokens)

    answers: dict[Any, list[Decoded]] = {ours: [], published: []}
    for loop in answers:
        loop(prompt_ids[0])  # warm-up
    for number, ids in enumerate(prompt_ids):
        for loop in (ours, published) if number % 2 else (published, ours):
            started = time.perf_counter()
            answers[loop].append(Decoded(loop(ids), time.perf_counter() - started))
    return answers[ours], answers[published]


if __name__ == "__main__":
    main(PublishedLoopConfig, run)
