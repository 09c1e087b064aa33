"""Random requests with all fields: text, end and log probabilities of each in a batch are those of the request alone,
one token at a time, which are the stock model's under the same penalties, masks and limits.

The suite runs a few; `pytest -m soak tests/engine/test_fuzz.py` runs thousands.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from blockpilot.constraints.automaton import GrammarCompiler
from blockpilot.constraints.grammar import Grammar, choice_grammar, schema_grammar
from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.engine import Engine
from blockpilot.native.library import has_functions
from blockpilot.pairs.loading import Pair
from blockpilot.types import DRAFTED, LOOKED_UP, Constraint, Request, Sampling, Step
from helpers.controllers import Told
from helpers.engines import NEVER, run, text_of
from helpers.fuzz import any_request, check_answers, pair_of
from helpers.tiny import tiny_hybrid, tiny_hybrid_mixture, tiny_mixture, tiny_target

MAX_LENGTH, ORIGINAL_LENGTH = 80, 32
GRAMMARS = (
    Grammar("regex", r"[a-c]{2,9}(x|yz)*"),
    Grammar("regex", r"[ab]+(cd|ef)[0-9]{2}"),
    schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    schema_grammar({"type": "array", "items": {"type": "string", "maxLength": 4}}),
    choice_grammar(["abacus", "abbey", "zebra"]),
    Grammar("lark", 'start: e "!"\ne: e e | "a" | "b"'),
    Grammar("grammar", 'start: "(" start ")" | /[x-z]{1,3}/'),
)
TWO_TOKENS = Sampling(1.0, top_k=2, logit_bias={65: 40.0, 66: 41.0})
LONGROPE = {
    **{"short_factor": [1.0] * 6, "long_factor": [4.0 + i for i in range(6)], "factor": 4.0},
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}


def with_rope(kind: str, **scaling: Any) -> LlamaForCausalLM:
    """A target whose rotary embedding depends on the longest text."""
    rope = {"rope_theta": 1e4, "rope_scaling": {"rope_type": kind, **scaling}}
    return tiny_target(3, max_position_embeddings=MAX_LENGTH, **rope)


PAIRS: dict[str, Callable[[pytest.FixtureRequest], Pair]] = {
    "dflash": lambda request: request.getfixturevalue("tiny_pair"),
    "markov": lambda request: request.getfixturevalue("markov_pair"),
    "dflash2": lambda request: request.getfixturevalue("dflash2_pair"),
    "eagle3": lambda request: request.getfixturevalue("eagle_pair"),
    "no draft": lambda request: request.getfixturevalue("alone"),
    "experts": lambda request: pair_of(tiny_mixture(num_hidden_layers=3), torch.float32),
    "hybrid": lambda request: pair_of(tiny_hybrid(), torch.float32),
    "hybrid with experts": lambda request: pair_of(tiny_hybrid_mixture(), torch.float32),
    "heads of 12": lambda request: pair_of(tiny_target(head_dim=12, num_hidden_layers=3), torch.float32),
    "dynamic rope": lambda request: pair_of(with_rope("dynamic", factor=2.0), torch.float32),
    "longrope": lambda request: pair_of(with_rope("longrope", **LONGROPE), torch.float32),
}


def shown(steps: Sequence[Step]) -> tuple[object, ...]:
    """All results of a request that a client gets."""
    answer_logprobs = [token_logprobs for step in steps for token_logprobs in step.logprobs]
    return text_of(steps), steps[-1].finish_reason, answer_logprobs, steps[0].prompt_logprobs


def random_requests(
    pair: Pair, constraints: Sequence[Constraint], rng: np.random.Generator, num_prompt_tokens: int
) -> list[Request]:
    """Sixteen requests with prompts of this length; some texts consist of two tokens and use prompt lookup."""
    requests = list[Request]()
    for _ in range(16):
        request = any_request(rng, num_prompt_tokens)
        if rng.random() < 0.2:
            prompt = tuple(rng.choice([65, 66], num_prompt_tokens).tolist())
            sampling = replace(TWO_TOKENS, seed=request.sampling.seed)
            request = replace(request, prompt_ids=prompt, sampling=sampling, lookup=True)
        constraint = constraints[int(rng.integers(len(constraints)))] if rng.random() < 0.4 else None
        num = int(rng.integers(0, 4)) if rng.random() < 0.3 else None
        size = request.block_size if pair.has_draft or request.lookup or request.block_size == 1 else None
        stops = request.stop_token_ids | (pair.stop_token_ids if rng.random() < 0.5 else NEVER)
        request = replace(request, constraint=constraint, block_size=size, stop_token_ids=stops)
        requests.append(replace(request, num_logprobs=num, num_prompt_logprobs=num))
    return requests


def check_random_requests(pair: Pair, num: int, seed: int, least_prompt: int = 3) -> Counter[int]:
    """Check `num` random requests; returns counts of the sources of accepted tokens."""
    rng, sources = np.random.default_rng(seed), Counter[int]()
    compiler = GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)
    constraints = [compiler.compile(grammar) for grammar in GRAMMARS]
    alone = Engine(pair, num_slots=1, max_length=MAX_LENGTH)
    policies: list[dict[str, Any]] = [{}, {"policy": FixedPolicy(4 if pair.has_draft else 1)}]
    for _ in range(0, num, 16):
        requests = random_requests(pair, constraints, rng, int(rng.integers(least_prompt, 40)))
        plain = [run(alone, [replace(request, block_size=1)])[0] for request in requests]
        check_answers(pair, requests, plain)
        controller = Told(pair.block_size - 1, [(3, 6), (0, 0), (2, 9), (1, 1)])
        sizes = {"num_slots": int(rng.integers(1, 9)), "max_prefill_tokens": int(rng.choice([5, 100]))}
        options = [*policies, {"controller": controller}][int(rng.integers(3))]
        crowd = Engine(pair, max_length=MAX_LENGTH, prefix_tokens=256, **sizes, **options)
        for _ in range(2):  # the second time from the prefix cache
            for request, steps, plain_steps in zip(requests, run(crowd, requests), plain, strict=True):
                assert shown(steps) == shown(plain_steps), request
                sources.update(source for step in steps for source in step.accepted_sources)
    return sources


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("num", [80, pytest.param(2000, marks=pytest.mark.soak)])
def test_random_requests_are_in_a_crowd_what_they_are_alone(
    request: pytest.FixtureRequest, name: str, num: int
) -> None:
    pair = PAIRS[name](request)
    # transformers uses other factors for shorter texts.
    least_prompt = ORIGINAL_LENGTH + 1 if name == "longrope" else 3
    sources = check_random_requests(pair, num, seed=num, least_prompt=least_prompt)
    assert sources[DRAFTED] + sources[DRAFTED | LOOKED_UP] > 10 or not pair.has_draft
    assert sources[LOOKED_UP] + sources[DRAFTED | LOOKED_UP] > 0 or not has_functions()
