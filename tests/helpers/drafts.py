"""Drafts in an engine: made to offer what a test wants, or watched."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import Slots, drawn_apart
from blockpilot.types import Request
from helpers.engines import run


def scatter(
    engine: Engine, texts: Sequence[Sequence[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[Slots]]:
    """Let the engine's draft offer, at random ranks with random chances, some right tokens and many wrong ones.

    Returns a list that every pass of the draft adds its rows' slots to.
    """
    generator, passes = torch.Generator().manual_seed(seed), list[list[Slots]]()

    def propose(rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int) -> list[Slots]:
        found = []
        for row, depth in zip(rows, depths, strict=True):
            known = next(text for text in texts if list(text[: len(row.tokens)]) == row.tokens)
            tokens, chances = [], []
            for i in range(depth):
                place = len(row.tokens) + i
                offered = torch.randperm(200, generator=generator)[:num].tolist()
                if place < len(known) and torch.rand((), generator=generator) < 0.8:
                    offered = [token for token in offered if token != known[place]][: num - 1]
                    offered.insert(int(torch.randint(0, min(num, 3), (), generator=generator)), known[place])
                tokens.append(offered)
                chances.append((torch.rand(num, generator=generator) / 2).sort(descending=True).values.tolist())
            found.append(drawn_apart(tokens, [chances]))
        passes.append(found)
        return found

    monkeypatch.setattr(engine._drafter, "propose", propose)
    return passes


class Proposal(NamedTuple):
    """Final tokens of a row, what was drafted after them, and its sampling."""

    tokens: tuple[int, ...]
    found: Slots
    request: Request


def proposals_of(engine: Engine, requests: Sequence[Request]) -> list[Proposal]:
    """All that the draft proposes while an engine runs its requests to their ends."""
    seen, propose = list[Proposal](), engine._drafter.propose

    def watched(rows: Any, slots: Any, depths: Sequence[int], num: int) -> list[Slots]:
        found = propose(rows, slots, depths, num)
        for row, depth, of_row in zip(rows, depths, found, strict=True):
            assert len(of_row.tokens) == depth
            seen.append(Proposal(tuple(row.tokens), of_row, row.request))
        return found

    engine._drafter.propose = watched  # type: ignore[method-assign]
    run(engine, requests)
    return seen
