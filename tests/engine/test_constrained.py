"""Constrained requests: their texts are those of one-token-at-a-time decoding under the same mask."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from blockpilot.constraints.automaton import GrammarCompiler, GrammarError
from blockpilot.constraints.grammar import Grammar, limits, of_choices, of_schema
from blockpilot.control.controller import FixedPolicy
from blockpilot.engine.engine import Engine
from blockpilot.engine.sampling import keyed_sample
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, Layout, Request, Sampling
from helpers.controllers import Told
from helpers.drafts import offer_always
from helpers.engines import PROMPT, changed_logits, plain_text, run, text_of
from helpers.tiny import EOS_ID

NUM = 24
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog", "cow"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
GRAMMARS = (
    of_schema(SCHEMA),
    of_schema({"type": "array", "items": {"type": "string", "maxLength": 4}}),
    of_schema({}),
    Grammar("regex", r"[ab]+(cd|ef)[0-9]{2}"),
    Grammar("grammar", 'start: "(" start ")" | /[x-z]{1,3}/'),
    of_choices(["abacus", "abbey", "zebra"]),
)
SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=3),
    Sampling(0.7, top_p=0.8, seed=4),
    Sampling(1.5, top_k=5, seed=5),
    Sampling(1.0, top_p=0.5, top_k=200, seed=6),
    Sampling(1.0, seed=7, min_p=0.05, repetition_penalty=1.4, logit_bias={98: 2.0, 122: -3.0}),
    Sampling(frequency_penalty=0.9, presence_penalty=0.5),
)


@cache
def tables(pair: Pair) -> LLTokenizer:
    return from_tokenizer(pair.tokenizer, pair.vocab_size, sorted(pair.stop_token_ids))


@cache
def compiler(pair: Pair) -> GrammarCompiler:
    return GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)


def oracle(pair: Pair, grammar: Grammar, prompt: Sequence[int], sampling: Sampling) -> tuple[int, ...]:
    """One token at a time by the stock model, each mask by a matcher that has read the whole text anew."""
    tokens = list(prompt)
    for _ in range(NUM):
        matcher = LLMatcher(tables(pair), grammar.compiled_from())
        assert matcher.consume_tokens(tokens[len(prompt) :])
        if matcher.is_stopped():
            break
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: pair.vocab_size].astype(bool))
        logits = pair.target(torch.tensor([tokens])).logits[0, -1].masked_fill(~allowed, -torch.inf)
        logits = changed_logits(logits, sampling, prompt, tokens[len(prompt) :])
        tokens.append(int(keyed_sample(logits[None], [len(tokens)], [replace(sampling, min_p=0.0)])))
    return tuple(tokens[len(prompt) :])


@st.composite
def asked(draw: st.DrawFn) -> tuple[int | None, int, int | None, Layout]:
    """Number of a grammar or none, of a sampling, block size, layout."""
    grammar = draw(st.none() | st.integers(0, len(GRAMMARS) - 1))
    size = draw(st.none() | st.integers(1, 9))
    return grammar, draw(st.integers(0, len(SAMPLINGS) - 1)), size, draw(st.sampled_from(LAYOUTS))


CHOICES: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "fixed": lambda: {"policy": FixedPolicy(4)},
    "told": lambda: {"controller": Told(3, [(3, 6), (0, 0), (2, 9), (1, 1)])},
}


@pytest.mark.parametrize("name", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"])
@given(st.lists(asked(), min_size=1, max_size=5), st.sampled_from(sorted(CHOICES)), st.data())
@settings(deadline=None, max_examples=15)
@torch.inference_mode()
def test_texts_are_those_of_plain_decoding_under_the_same_mask(
    request: pytest.FixtureRequest,
    name: str,
    rows: list[tuple[int | None, int, int | None, Layout]],
    choice: str,
    data: st.DataObject,
) -> None:
    pair: Pair = request.getfixturevalue(name)
    compiled, requests, expected = compiler(pair), [], []
    for i, (number, sampling, size, layout) in enumerate(rows):
        prompt = tuple(p + i for p in PROMPT[i:])
        asked_for = Request(prompt, NUM, SAMPLINGS[sampling], size, pair.stop_token_ids, layout=layout)
        if number is None:
            free = plain_text(pair, prompt, NUM, SAMPLINGS[sampling])
            ends = [k for k, token in enumerate(free, 1) if token in pair.stop_token_ids]
            expected.append(free[: ends[0] if ends else NUM])
        else:
            asked_for = replace(asked_for, constraint=compiled.compile(GRAMMARS[number]))
            expected.append(oracle(pair, GRAMMARS[number], prompt, SAMPLINGS[sampling]))
        requests.append(asked_for)
    slots = data.draw(st.integers(1, 3))
    steps = run(Engine(pair, num_slots=slots, max_length=64, **CHOICES[choice]()), requests)
    assert [text_of(of_row) for of_row in steps] == expected


def test_forced_tokens_need_no_draft_and_several_are_emitted_at_once(tiny_pair: Pair) -> None:
    forced = compiler(tiny_pair).compile(Grammar("regex", "abcdefgh[xy]z"))
    asked_for = Request(PROMPT, NUM, stop_token_ids=tiny_pair.stop_token_ids, constraint=forced)
    first, second = run(Engine(tiny_pair, max_length=512), [replace(asked_for, block_size=4)])[0][:2]
    assert (len(first.tokens), len(second.tokens)) == (1, 4)
    steps = run(Engine(tiny_pair, max_length=512), [asked_for])[0]
    assert [len(step.tokens) for step in steps] == [1, 8, 1]
    assert steps[1].block_size == 8
    assert steps[-1].finish_reason == "stop"
    plain = run(Engine(tiny_pair, max_length=512), [replace(asked_for, block_size=1)])[0]
    assert [len(step.tokens) for step in plain] == [1] * 10


def test_constrained_drafts_teach_nothing(tiny_pair: Pair) -> None:
    """Their nodes are what the grammar leaves: the model has given other chances."""
    controller = Told(3, [(3, 6)])
    forced = compiler(tiny_pair).compile(Grammar("regex", "[a-d]{4}(xyz|yzx){2}"))
    request = Request(PROMPT, NUM, stop_token_ids=tiny_pair.stop_token_ids, constraint=forced)
    [steps] = run(Engine(tiny_pair, max_length=128, controller=controller), [request])
    assert any(step.tree.tokens for step in steps)
    assert not any(len(outcome.verified.choices) for outcome in controller.outcomes)


def test_forced_tokens_are_not_expected_of_drafts(tiny_pair: Pair) -> None:
    """Two rows whose every token is forced draft nothing; a third one drafts."""
    controller = Told(3, [(3, 7)])
    forced = compiler(tiny_pair).compile(Grammar("regex", "(abcdefgh){40}"))
    requests = [Request(PROMPT, 15), *[Request(PROMPT, 150, constraint=forced)] * 2]
    found = run(Engine(tiny_pair, max_length=256, max_block_size=8, controller=controller), requests)
    assert {len(step.tokens) for steps in found[1:] for step in steps[1:-1]} == {8}
    controller._observe()
    expected = controller.model.expected().sums[0]
    assert expected.max() <= 1
    assert (expected[1:, 0] > 0).all()


def test_a_complete_text_ends_without_a_stop_token_and_a_stop_token_only_where_it_is_complete(
    tiny_pair: Pair,
) -> None:
    for grammar, seed in [(Grammar("regex", "a{3}"), 0), *((Grammar("regex", "(ab)*"), seed) for seed in range(8))]:
        constraint = compiler(tiny_pair).compile(grammar)
        asked_for = Request(PROMPT, 400, Sampling(2.0, seed=seed), None, tiny_pair.stop_token_ids)
        steps = run(Engine(tiny_pair, max_length=512), [replace(asked_for, constraint=constraint)])[0]
        text = text_of(steps)
        ended = [token for token in text if token in tiny_pair.stop_token_ids]
        assert len(ended) <= 1
        shown = tiny_pair.tokenizer.decode([token for token in text if token not in ended])
        if steps[-1].finish_reason == "stop":
            assert shown == "aaa" if seed == 0 and "3" in grammar.source else shown == "ab" * (len(shown) // 2)


def test_a_constraint_wins_over_the_least_length(tiny_pair: Pair) -> None:
    """Nothing but a stop token may follow two letters, or the text is complete."""
    for pattern in ("ab", "a(b|)"):
        constraint = compiler(tiny_pair).compile(Grammar("regex", pattern))
        asked_for = Request(PROMPT, NUM, Sampling(), 4, tiny_pair.stop_token_ids, constraint=constraint)
        (steps,) = run(Engine(tiny_pair, max_length=512), [replace(asked_for, min_new_tokens=8)])
        assert steps[-1].finish_reason == "stop"
        assert tiny_pair.tokenizer.decode([t for t in text_of(steps) if t != EOS_ID]) == "ab"


def test_stop_strings_and_log_probabilities_are_those_of_the_text(tiny_pair: Pair) -> None:
    constraint = compiler(tiny_pair).compile(Grammar("regex", "a*bc[d-h]{9}"))
    asked_for = Request(PROMPT, 40, Sampling(1.0, seed=1), 4, tiny_pair.stop_token_ids, ("bc",), 3)
    (steps,) = run(Engine(tiny_pair, max_length=512), [replace(asked_for, constraint=constraint)])
    assert steps[-1].finish_reason == "stop"
    assert set("".join(text for step in steps for text in step.texts)) <= {"a"}
    tokens = list(text_of(steps))
    logits = tiny_pair.target(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    own = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found = [logprob.logprob for step in steps for logprob in step.logprobs]
    assert found == pytest.approx(own.tolist(), abs=1e-4)


def test_a_constraint_that_fails_ends_its_request_alone(tiny_pair: Pair) -> None:
    """The lexer of this pattern needs more states than it may have."""
    few = GrammarCompiler(tiny_pair.tokenizer, tiny_pair.vocab_size, tiny_pair.stop_token_ids, limits(20))
    failing = Request(PROMPT, 40, Sampling(), 4, constraint=few.compile(Grammar("regex", "[a-z]{30}")))
    engine, errors = Engine(tiny_pair, max_length=400), list[tuple[int, Exception]]()
    engine.on_failure = lambda request_id, error: errors.append((request_id, error))
    _, beside = run(engine, [failing, Request(PROMPT, NUM, block_size=4)])
    assert [request_id for request_id, _ in errors] == [0]
    assert isinstance(errors[0][1], GrammarError)
    assert "too many states" in str(errors[0][1])
    assert text_of(beside) == plain_text(tiny_pair, PROMPT, NUM, Sampling())


def test_a_draft_that_looks_past_a_grammars_limits_ends_nothing(tiny_pair: Pair) -> None:
    """One branch outgrows the limits at once. Drafts look into it; texts and failures are plain decoding's."""
    rules = "\n".join(f'r{i}: /[c-z]/ "{i}"' for i in range(2500))
    source = f'start: ("a" | "b" big)* "!"\nbig: {" | ".join(f"r{i}" for i in range(2500))}\n{rules}'
    constraint = compiler(tiny_pair).compile(Grammar("grammar", source))
    both = list(tiny_pair.tokenizer("ab", add_special_tokens=False)["input_ids"])

    def decode(seed: int, block_size: int, offered: Sequence[int]) -> tuple[str, list[str]]:
        engine, lost = Engine(tiny_pair, num_slots=1, max_length=64), list[str]()
        engine.on_failure = lambda request_id, error: lost.append(str(error))
        offer_always(engine, offered, [0.5, 0.4][: len(offered)])
        engine.add(Request((1, 2, seed), 30, Sampling(), block_size, layout="tree", constraint=constraint))
        steps = [step for _ in range(40) for step in engine.step()]
        return str(tiny_pair.tokenizer.decode(text_of(steps))), lost

    plain = [decode(seed, 1, both) for seed in range(12, 26)]
    assert [decode(seed, 8, both) for seed in range(12, 26)] == plain
    assert any(lost for _, lost in plain)
    assert not all(lost for _, lost in plain)


@pytest.mark.parametrize(
    ("bounds", "allowance_s", "reason"), [(limits(step_max_items=200), 1.0, "items"), (None, 0.0, "time")]
)
def test_an_ambiguous_grammar_ends_its_request_alone(
    tiny_pair: Pair, bounds: LLParserLimits | None, allowance_s: float, reason: str
) -> None:
    """The items of its masks grow with the square of the text, and the seconds of the machine with them."""
    pair, stops = tiny_pair, tiny_pair.stop_token_ids
    bounded = GrammarCompiler(pair.tokenizer, pair.vocab_size, stops, bounds, allowance_s)
    constraint = bounded.compile(Grammar("grammar", 'start: e "!"\ne: e e | "a" | "b"'))
    engine, lost = Engine(pair, max_length=512), list[str]()
    engine.on_failure = lambda request_id, error: lost.append(str(error))
    (end,) = pair.tokenizer("!", add_special_tokens=False)["input_ids"]
    failing = Request(PROMPT, 400, Sampling(logit_bias={end: -100.0}), 8, constraint=constraint)
    steps, beside = run(engine, [failing, Request(PROMPT, NUM, block_size=4)])
    assert len(lost) == 1
    assert reason in lost[0]
    assert len(text_of(steps)) < 400
    assert text_of(beside) == plain_text(pair, PROMPT, NUM, Sampling())


@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_json_of_the_embedded_pair_validates_and_equals_plain_decoding(embedded_pair: Pair, layout: Layout) -> None:
    constraint = compiler(embedded_pair).compile(of_schema(SCHEMA))
    prompt = tuple(embedded_pair.tokenizer("Describe a pet as JSON.")["input_ids"])
    engine, requests = Engine(embedded_pair, max_length=128), []
    for sampling in (Sampling(), Sampling(1.0, seed=1)):
        asked_for = Request(prompt, 60, sampling, None, embedded_pair.stop_token_ids, constraint=constraint)
        requests += [replace(asked_for, block_size=1), replace(asked_for, block_size=8, layout=layout)]
    texts = [text_of(steps) for steps in run(engine, requests)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    for text in texts:
        found = json.loads(embedded_pair.tokenizer.decode(text, skip_special_tokens=True))
        assert found["kind"] in ("cat", "dog", "cow")
        assert 0 <= found["age"] <= 99
