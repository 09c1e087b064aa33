"""Plain steps give the draft their features together, later: nothing that is drafted or emitted may notice."""

from collections.abc import Sequence

import pytest

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import CandidateSet, Prefill, Request, Sampling, Step

CANDIDATES = CandidateSet((1, 2, 4))
PROMPTS = [tuple(range(10 + i, 20 + 2 * i)) for i in range(6)]


class Scripted:
    """Drafts in some steps only: those whose number is in `drafting`."""

    reader = None
    candidates = CANDIDATES

    def __init__(self, drafting: Sequence[int]) -> None:
        self._drafting, self._step = frozenset(drafting), 0

    @property
    def taus(self) -> tuple[float, ...]:
        return (1.0, 1.5, 2.0) if self._step in self._drafting else (1.0, 0.5, 0.5)

    def observe(self, block_size: int, num_accepted: int) -> None:
        self._step += 1


def run(pair: Pair, drafting: Sequence[int], num_slots: int) -> list[Step]:
    """All steps of requests of different lengths; with fewer slots than requests some are admitted on the way."""
    engine = Engine(pair, num_slots=num_slots, max_length=128, policy=lambda prefill: Scripted(drafting))
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(prompt, 20 + 5 * i, Sampling(temperature=0.8, seed=i)))
    steps: list[Step] = []
    while not engine.idle:
        steps += engine.step()
    return steps


@pytest.mark.parametrize("num_slots", [1, 4, 6])
@pytest.mark.parametrize("drafting", [(3, 4, 17), range(0, 40, 5), (), range(40)])
def test_steps_are_those_of_an_engine_that_never_waits(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, drafting: Sequence[int], num_slots: int
) -> None:
    def told(steps: list[Step]) -> list[tuple[object, ...]]:
        return [(s.request_id, s.tokens, s.block_size, s.num_accepted, s.finish_reason) for s in steps]

    waiting = run(tiny_pair, drafting, num_slots)
    monkeypatch.setattr("blockpilot.engine.engine.MAX_PENDING", 1)
    assert told(waiting) == told(run(tiny_pair, drafting, num_slots))
    assert {s.block_size for s in waiting} >= ({1, 4} if drafting else {1})


def test_plain_steps_of_many_rows_reach_the_draft_together(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens: list[int] = []
    extend = tiny_pair.draft.extend

    def counted(context, positions, cache):  # type: ignore[no-untyped-def]
        num_tokens.append(positions.shape[1])
        return extend(context, positions, cache)

    monkeypatch.setattr(tiny_pair.draft, "extend", counted)
    engine = Engine(tiny_pair, num_slots=6, max_length=128, policy=lambda prefill: Scripted(()))
    for prompt in PROMPTS:
        engine.add(Request(prompt, 50))
    engine.step()
    num_tokens.clear()
    for _ in range(24):
        engine.step()
    assert sum(num_tokens) == 24 * 6
    assert set(num_tokens) == {6 * 6}  # those of as many steps as there are rows, at most 8


def test_a_policy_sees_the_prefill(tiny_pair: Pair) -> None:
    """Temperature and anchor are there for it, and the anchor is the first token's embedding."""
    seen: list[Prefill] = []

    def policy(prefill: Prefill) -> int:
        seen.append(prefill)
        return 2

    engine = Engine(tiny_pair, num_slots=1, max_length=64, policy=policy)
    engine.add(Request(PROMPTS[0], 8, Sampling(temperature=0.7, seed=3)))
    first = engine.step()[0]
    assert seen[0].temperature == 0.7
    embedding = tiny_pair.target.get_input_embeddings().weight[first.tokens[0]]
    assert seen[0].anchor is not None
    assert seen[0].anchor.equal(embedding)
