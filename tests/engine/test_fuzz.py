"""Thousands of random requests of all fields: in a crowd each has the text, the end and the log probabilities that it
has alone, one token at a time. Asked for by `pytest -m soak tests/engine/test_fuzz.py`; the suite runs a few.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from blockpilot.constraints.automaton import GrammarCompiler
from blockpilot.constraints.grammar import Grammar
from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import DRAFTED, LOOKED_UP, Constraint, Request, Step
from helpers.engines import run, text_of
from helpers.fuzz import any_request, pair_of
from helpers.tiny import tiny_mixture, tiny_target

GRAMMARS = (
    Grammar("regex", r"[a-c]{2,9}(x|yz)*"),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    Grammar("lark", 'start: e "!"\ne: e e | "a" | "b"'),
)
PAIRS: dict[str, Callable[[pytest.FixtureRequest], Pair]] = {
    "dflash": lambda request: request.getfixturevalue("tiny_pair"),
    "markov": lambda request: request.getfixturevalue("markov_pair"),
    "dflash2": lambda request: request.getfixturevalue("dflash2_pair"),
    "eagle3": lambda request: request.getfixturevalue("eagle_pair"),
    "experts": lambda request: pair_of(tiny_mixture(num_hidden_layers=3), torch.float32),
    "heads of 12": lambda request: pair_of(tiny_target(head_dim=12, num_hidden_layers=3), torch.float32),
}


def told(steps: Sequence[Step]) -> tuple[object, ...]:
    """All that a client sees of a request."""
    of_prompt = steps[0].prompt_logprobs
    return text_of(steps), steps[-1].finish_reason, [each for step in steps for each in step.logprobs], of_prompt


class Counted(NamedTuple):
    """Random requests that differ, and tokens that were accepted of the draft's and of those looked up."""

    different: int
    drafted: int
    looked_up: int


def num_that_differ(pair: Pair, num: int, seed: int) -> Counted:
    """Of so many random requests."""
    rng, num_different, sources = np.random.default_rng(seed), 0, list[int]()
    compiler = GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)
    constraints: list[Constraint | None] = [compiler.compile(grammar) for grammar in GRAMMARS]
    alone = Engine(pair, num_slots=1, max_length=80)
    for start in range(0, num, 16):
        requests = []
        for _ in range(min(16, num - start)):
            asked = any_request(rng, int(rng.integers(3, 40)))
            if rng.random() < 0.3:  # what the target goes on with, which soon goes in circles
                (steps,) = run(alone, [Request(asked.prompt_ids[:3], 40, block_size=1)])
                asked = replace(asked, prompt_ids=(*asked.prompt_ids[:3], *text_of(steps)))
            constraint = constraints[int(rng.integers(len(GRAMMARS)))] if rng.random() < 0.4 else None
            num_logprobs = int(rng.integers(0, 4)) if rng.random() < 0.3 else None
            asked = replace(asked, constraint=constraint, num_logprobs=num_logprobs, num_prompt_logprobs=num_logprobs)
            requests.append(asked)
        policy = None if rng.random() < 0.5 else FixedPolicy(4)
        sizes = {"num_slots": int(rng.integers(1, 9)), "max_prefill_tokens": int(rng.choice([5, 100]))}
        crowd = run(Engine(pair, max_length=80, policy=policy, **sizes), requests)
        for steps, asked in zip(crowd, requests, strict=True):
            (expected,) = run(alone, [replace(asked, block_size=1)])
            num_different += told(steps) != told(expected)
            sources += [step.tree.sources[node - 1] for step in steps for node in step.path]
    return Counted(num_different, *(sum(source & of > 0 for source in sources) for of in (DRAFTED, LOOKED_UP)))


@pytest.mark.parametrize("name", PAIRS)
@torch.inference_mode()
def test_random_requests_are_in_a_crowd_what_they_are_alone(request: pytest.FixtureRequest, name: str) -> None:
    found = num_that_differ(PAIRS[name](request), 32, seed=1)
    assert found.different == 0
    assert found.drafted > 5
    assert found.looked_up > 0


@pytest.mark.soak
@pytest.mark.parametrize("name", PAIRS)
@torch.inference_mode()
def test_2000_random_requests_are_in_a_crowd_what_they_are_alone(request: pytest.FixtureRequest, name: str) -> None:
    assert num_that_differ(PAIRS[name](request), 2000, seed=2).different == 0
