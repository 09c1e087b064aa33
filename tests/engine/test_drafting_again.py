"""A row that decoded plainly for a while drafts on as if it always had: its draft's cache is complete again."""

import pytest
import torch
from torch import Tensor

from blockpilot.drafts.choices import Linked
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling, Step
from helpers.controllers import Told
from helpers.drafts import Pass, watch
from helpers.engines import NEVER, resize

SAMPLING, BLOCK_SIZE, NUM = Sampling(6.0, seed=4), 4, 60  # at this temperature a random draft is right now and then


def prompt(num_tokens: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    return tuple(torch.randint(0, 256, (num_tokens,), generator=generator).tolist())


def scores_of(of_pass: Pass) -> Tensor:
    """[N, k], which depend on all of the context."""
    found = of_pass.found.found if isinstance(of_pass.found, Linked) else of_pass.found
    return found.scores


@pytest.mark.parametrize("name", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"])
@pytest.mark.parametrize("num_plain_steps", [1, 5, 13])
def test_a_row_that_decoded_plainly_drafts_as_if_it_always_had(
    request: pytest.FixtureRequest, name: str, num_plain_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside neighbours, one of which ends meanwhile: from the same anchor, the same proposals are as often right."""
    pair: Pair = request.getfixturevalue(name)
    requests = [Request(prompt(n), NUM, SAMPLING, BLOCK_SIZE, NEVER) for n in (7, 12, 20)]
    fresh: list[dict[int, tuple[int, Tensor]]] = []
    for of_one in requests:
        engine, at = Engine(pair, num_slots=1, max_length=128), dict[int, tuple[int, Tensor]]()
        passes = watch(engine, monkeypatch)
        engine.add(of_one)
        [first] = engine.step()
        emitted = len(first.tokens)
        while not engine.idle:
            [step] = engine.step()
            if step.tree.tokens:
                at[emitted] = step.num_accepted, scores_of(passes[-1])
            emitted += len(step.tokens)
        fresh.append(at)

    engine = Engine(pair, num_slots=4, max_length=128)
    passes = watch(engine, monkeypatch)
    leaves = engine.add(Request(prompt(9), 4, SAMPLING, BLOCK_SIZE, NEVER))
    ids = [engine.add(of_one) for of_one in requests]
    emitted_by = dict.fromkeys([leaves, *ids], 0)

    def advance() -> list[Step]:
        steps = engine.step()
        for step in steps:
            emitted_by[step.request_id] += len(step.tokens)
        return steps

    advance()
    for request_id in emitted_by:
        resize(engine, request_id, 1)
    for _ in range(num_plain_steps):
        assert {step.block_size for step in advance()} == {1}
    assert not passes
    compared = accepted = 0
    for request_id, at in zip(ids, fresh, strict=True):  # each drafts on alone, from where both had an anchor
        while emitted_by[request_id] not in at:
            advance()
        resize(engine, request_id, BLOCK_SIZE)
        for _ in range(6):
            num_accepted, scores = at[emitted_by[request_id]]
            [step] = [step for step in advance() if step.request_id == request_id]
            assert step.num_accepted == num_accepted
            torch.testing.assert_close(scores_of(passes[-1]), scores, rtol=1e-3, atol=1e-3)
            compared, accepted = compared + 1, accepted + step.num_accepted
        resize(engine, request_id, 1)
    assert compared == 18
    assert accepted > 0


def test_plain_steps_between_those_that_draft_leave_the_proposals(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row that adapts, whose controller drafts in some steps only."""

    def proposals(turns: list[tuple[int, int]]) -> dict[int, Tensor]:
        """Scores of what was drafted, by the tokens emitted before."""
        engine = Engine(tiny_pair, num_slots=1, max_length=128, controller=Told(3, turns))
        passes, found, emitted = watch(engine, monkeypatch), dict[int, Tensor](), 0
        engine.add(Request(prompt(9), NUM, SAMPLING, None, NEVER))
        while not engine.idle:
            passes.clear()
            [step] = engine.step()
            if passes:
                found[emitted] = scores_of(passes[0])
            emitted += len(step.tokens)
        return found

    always, seldom = proposals([(3, 0)]), proposals([(0, 0), (0, 0), (3, 3), (0, 0), (0, 0), (0, 0), (3, 0)])
    assert len(always) == NUM - 2
    assert len(seldom) > 10
    for place, scores in seldom.items():
        torch.testing.assert_close(scores, always[place], rtol=1e-3, atol=1e-3)


def test_the_real_draft_accepts_as_much_after_plain_decoding(embedded_pair: Pair) -> None:
    """The numbers of accepted drafts, from the switch on, are those of an engine that drafted all along."""
    ids = embedded_pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count from one to ten in words."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    request = Request(tuple(ids), 40, block_size=6, stop_token_ids=NEVER)

    def run(plain_until: int) -> tuple[list[int], list[int]]:
        """Tokens emitted before, and drafts accepted in, every step; plain until so many tokens are there."""
        engine, before, accepted, emitted = Engine(embedded_pair, num_slots=1, max_length=128), [], [], 0
        request_id = engine.add(request)
        while not engine.idle:
            [step] = engine.step()
            before.append(emitted)
            accepted.append(step.num_accepted)
            emitted += len(step.tokens)
            if step.finish_reason is None:
                resize(engine, request_id, 1 if emitted < plain_until else 6)
        return before, accepted

    before, accepted = run(0)
    switch = before[len(before) // 3]
    plain_before, plain_accepted = run(switch)
    at = plain_before.index(switch)
    assert at == switch > 2
    assert plain_accepted[at:] == accepted[len(before) // 3 :]
    assert sum(plain_accepted[:at]) == 0 < sum(plain_accepted[at:])
