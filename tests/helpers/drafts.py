"""Drafts in an engine, scripted or recorded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.engine.engine import Engine
from blockpilot.engine.growing import score_candidates
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import Slots
from blockpilot.types import Candidates, Request
from helpers.engines import run


def choices_of(tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]]) -> Candidates:
    """Candidates of a draft at temperature 0: tokens [N][k] with these probabilities [N][k]."""
    log_probs = torch.tensor(chances).log()
    return Candidates(torch.tensor(tokens), log_probs, log_probs, torch.zeros(len(tokens), dtype=torch.bool))


def offer_always(engine: Engine, tokens: Sequence[int], chances: Sequence[float]) -> None:
    """Make the engine's draft propose the same tokens at every position."""
    engine._drafter.propose = lambda rows, slots, depths, num: choices_of(  # type: ignore[method-assign]
        [tokens] * sum(depths), [chances] * sum(depths)
    )


class Pass(NamedTuple):
    """One pass of the draft: the depth of each row, and the proposed candidates."""

    depths: list[int]
    found: Candidates | ConditionalCandidates


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """A list to which every pass of the engine's draft is appended."""
    passes, propose = list[Pass](), engine._drafter.propose

    def watched(rows: Any, slots: Any, depths: Sequence[int], num: int) -> Candidates | ConditionalCandidates:
        passes.append(Pass(list(depths), propose(rows, slots, depths, num)))
        return passes[-1].found

    monkeypatch.setattr(engine._drafter, "propose", watched)
    return passes


def scatter(engine: Engine, texts: Sequence[Sequence[int]], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine's draft propose some right and many wrong tokens, with random ranks and probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def propose(rows: Sequence[Row], slots: Sequence[int], depths: Sequence[int], num: int) -> Candidates:
        tokens, chances = list[list[int]](), list[list[float]]()
        for row, depth in zip(rows, depths, strict=True):
            row_text = next(text for text in texts if list(text[: len(row.tokens)]) == row.tokens)
            for position in range(len(row.tokens), len(row.tokens) + depth):
                choices = torch.randperm(200, generator=generator)[:num].tolist()
                if position < len(row_text) and torch.rand((), generator=generator) < 0.8:
                    choices = [token for token in choices if token != row_text[position]][: num - 1]
                    choices.insert(int(torch.randint(0, min(num, 3), (), generator=generator)), row_text[position])
                tokens.append(choices)
                chances.append((torch.rand(num, generator=generator) / 2).sort(descending=True).values.tolist())
        return choices_of(tokens, chances)

    monkeypatch.setattr(engine._drafter, "propose", propose)


def slots_of(draft_pass: Pass) -> list[Slots]:
    """Slots of every row, with the draft's own probabilities."""
    adapts = [False] * len(draft_pass.depths)
    candidates = score_candidates(draft_pass.found, adapts, draft_pass.depths, Controller(AcceptanceModel(1)))
    return [candidates.row_slots(r) for r in range(len(draft_pass.depths))]


class Proposal(NamedTuple):
    """Prompt and accepted tokens of a row, the choices drafted after them, and its request."""

    tokens: tuple[int, ...]
    found: Slots
    request: Request


def proposals_of(engine: Engine, requests: Sequence[Request]) -> list[Proposal]:
    """All proposals of the draft while an engine runs these requests to their ends."""
    seen, propose = list[Proposal](), engine._drafter.propose

    def watched(rows: Any, slots: Any, depths: Sequence[int], num: int) -> Candidates | ConditionalCandidates:
        proposed = propose(rows, slots, depths, num)
        for row, depth, row_slots in zip(rows, depths, slots_of(Pass(list(depths), proposed)), strict=True):
            assert len(row_slots.tokens) == depth
            seen.append(Proposal(tuple(row.tokens), row_slots, row.request))
        return proposed

    engine._drafter.propose = watched  # type: ignore[method-assign]
    run(engine, requests)
    return seen
