"""Constrained requests: forced tokens, ends and failures. Random grammars are in test_fuzz.py."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from llguidance import LLParserLimits

from blockpilot.constraints.automaton import GrammarCompiler, GrammarError
from blockpilot.constraints.grammar import Grammar, limits
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.controllers import Told
from helpers.drafts import offer_always
from helpers.engines import PROMPT, plain_text, run, text_of

NUM = 24


@cache
def compiler(pair: Pair) -> GrammarCompiler:
    return GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)


def test_forced_tokens_need_no_draft_and_several_are_emitted_at_once(tiny_pair: Pair) -> None:
    forced = compiler(tiny_pair).compile(Grammar("regex", "abcdefgh[xy]z"))
    request = Request(PROMPT, NUM, stop_token_ids=tiny_pair.stop_token_ids, constraint=forced)
    first, second = run(Engine(tiny_pair, max_length=512), [replace(request, block_size=4)])[0][:2]
    assert (len(first.tokens), len(second.tokens)) == (1, 4)
    steps = run(Engine(tiny_pair, max_length=512), [request])[0]
    assert [len(step.tokens) for step in steps] == [1, 8, 1]
    assert steps[1].block_size == 8
    assert steps[-1].finish_reason == "stop"
    plain = run(Engine(tiny_pair, max_length=512), [replace(request, block_size=1)])[0]
    assert [len(step.tokens) for step in plain] == [1] * 10


def test_constrained_drafts_teach_nothing(tiny_pair: Pair) -> None:
    """No outcomes are learned: the grammar filters nodes, for which the model estimated other probabilities."""
    controller = Told(3, [(3, 6)])
    forced = compiler(tiny_pair).compile(Grammar("regex", "[a-d]{4}(xyz|yzx){2}"))
    request = Request(PROMPT, NUM, stop_token_ids=tiny_pair.stop_token_ids, constraint=forced)
    [steps] = run(Engine(tiny_pair, max_length=128, controller=controller), [request])
    assert any(step.tree.tokens for step in steps)
    assert not any(len(verified.choice_index) for verified in controller.verified)


def test_forced_tokens_are_not_expected_of_drafts(tiny_pair: Pair) -> None:
    """Expected gains without forced tokens: two rows with only forced tokens draft nothing, a third one drafts."""
    controller = Told(3, [(3, 7)])
    forced = compiler(tiny_pair).compile(Grammar("regex", "(abcdefgh){40}"))
    requests = [Request(PROMPT, 15), *[Request(PROMPT, 150, constraint=forced)] * 2]
    answers = run(Engine(tiny_pair, max_length=256, max_block_size=8, controller=controller), requests)
    assert {len(step.tokens) for steps in answers[1:] for step in steps[1:-1]} == {8}
    controller._observe()
    expected = controller.model.expected().sums[0]
    assert expected.max() <= 1
    assert (expected[1:, 0] > 0).all()


def test_what_a_grammar_allows_is_expected_of_drafts(tiny_pair: Pair) -> None:
    """Constrained rows leave the means of their kind as high as their drafts are good: others are planned by them."""
    controller = Told(3, [(3, 7)])
    letters = compiler(tiny_pair).compile(Grammar("regex", "[a-p]{60}"))
    engine = Engine(tiny_pair, max_length=128, controller=controller)
    offer_always(engine, tiny_pair.tokenizer("abcdefgh")["input_ids"], [0.9, *[0.01] * 7])
    run(engine, [Request(PROMPT, 60, constraint=letters, lookup=False)])
    controller._observe()
    assert controller.model.expected().counts[0, 1, 0] > 0.9


class Failing:
    """An automaton that fails in the draft stage: where it is asked for forced tokens, or for allowed ones."""

    error: Exception | None = None

    def __init__(self, where: str) -> None:
        self.where = where

    def start(self) -> "Failing":
        return self

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        if self.where == "forced":
            raise RuntimeError("forced")
        return []

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        if self.where == "allowed" and len(tokens) > 1:
            raise RuntimeError("allowed")
        return [True] * len(tokens)

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        return torch.ones(260, dtype=torch.bool)

    def take(self, token: int) -> None: ...

    def ends(self, path: Sequence[int] = ()) -> bool:
        return False


@pytest.mark.parametrize("where", ["forced", "allowed"])
@pytest.mark.parametrize("block_size", [None, 4])
def test_an_automaton_that_fails_while_drafting_ends_its_request_alone(
    tiny_pair: Pair, where: str, block_size: int | None
) -> None:
    engine, failed = Engine(tiny_pair, max_length=128, controller=Told(3, [(3, 7)])), dict[int, str]()
    engine.on_failure = lambda request_id, error: failed.update({request_id: str(error)})
    requests = [Request(PROMPT, 20, layout="tree", block_size=block_size) for _ in range(2)]
    requests[0] = replace(requests[0], constraint=Failing(where))
    answers = run(engine, requests)
    assert failed == {0: where}
    assert text_of(answers[1]) == plain_text(tiny_pair, PROMPT, 20, Sampling())


def test_a_text_ends_where_it_is_complete(tiny_pair: Pair) -> None:
    """End at a stop token if more text could follow, without one if none can, and at a stop string."""
    cases = [("a{3}", 0, ()), *(("(ab)*", seed, ()) for seed in range(8)), ("a*bc[d-h]{9}", 1, ("bc",))]
    for pattern, seed, stop_strings in cases:
        constraint = compiler(tiny_pair).compile(Grammar("regex", pattern))
        stops = tiny_pair.stop_token_ids
        request = Request(PROMPT, 400, Sampling(2.0, seed=seed), None, stops, stop_strings, constraint=constraint)
        [steps] = run(Engine(tiny_pair, max_length=512), [request])
        text = text_of(steps)
        ended = [token for token in text if token in stops]
        assert len(ended) <= 1
        shown = tiny_pair.tokenizer.decode([token for token in text if token not in ended])
        if stop_strings:
            assert (steps[-1].finish_reason, shown[-2:]) == ("stop", "bc")
        elif steps[-1].finish_reason == "stop":
            assert shown == ("aaa" if seed == 0 and "3" in pattern else "ab" * (len(shown) // 2))


def test_a_draft_that_looks_past_a_grammars_limits_ends_nothing(tiny_pair: Pair) -> None:
    """Texts and failures of plain decoding, although drafts enter a branch that exceeds the limits immediately."""
    rules = "\n".join(f'r{i}: /[c-z]/ "{i}"' for i in range(2500))
    source = f'start: ("a" | "b" big)* "!"\nbig: {" | ".join(f"r{i}" for i in range(2500))}\n{rules}'
    constraint = compiler(tiny_pair).compile(Grammar("grammar", source))
    letter_tokens = list(tiny_pair.tokenizer("ab", add_special_tokens=False)["input_ids"])

    def decode(seed: int, block_size: int, draft_tokens: Sequence[int]) -> tuple[str, list[str]]:
        engine, lost = Engine(tiny_pair, num_slots=1, max_length=64), list[str]()
        engine.on_failure = lambda request_id, error: lost.append(str(error))
        offer_always(engine, draft_tokens, [0.5, 0.4][: len(draft_tokens)])
        engine.add(Request((1, 2, seed), 30, Sampling(), block_size, layout="tree", constraint=constraint))
        steps = [step for _ in range(40) for step in engine.step()]
        return str(tiny_pair.tokenizer.decode(text_of(steps))), lost

    plain = [decode(seed, 1, letter_tokens) for seed in range(12, 26)]
    assert [decode(seed, 8, letter_tokens) for seed in range(12, 26)] == plain
    assert any(lost for _, lost in plain)
    assert not all(lost for _, lost in plain)


AMBIGUOUS = Grammar("grammar", 'start: e "!"\ne: e e | "a" | "b"')


@pytest.mark.parametrize(
    ("grammar", "bounds", "allowance_s", "reason"),
    [
        (AMBIGUOUS, limits(step_max_items=200), 1.0, "items"),
        (AMBIGUOUS, None, 0.0, "time"),
        (Grammar("regex", "[a-z]{30}"), limits(20), 1.0, "too many states"),
    ],
    ids=["items", "time", "states"],
)
def test_an_ambiguous_grammar_ends_its_request_alone(
    tiny_pair: Pair, grammar: Grammar, bounds: LLParserLimits | None, allowance_s: float, reason: str
) -> None:
    """Failure of one request: the items of its masks, and so its seconds, grow with the square of the text, or its
    lexer needs more states than allowed.
    """
    pair, stops = tiny_pair, tiny_pair.stop_token_ids
    constraint = GrammarCompiler(pair.tokenizer, pair.vocab_size, stops, bounds, allowance_s).compile(grammar)
    engine, errors = Engine(pair, max_length=512), list[tuple[int, Exception]]()
    engine.on_failure = lambda request_id, error: errors.append((request_id, error))
    (end,) = pair.tokenizer("!", add_special_tokens=False)["input_ids"]
    failing = Request(PROMPT, 400, Sampling(logit_bias={end: -100.0}), 8, constraint=constraint)
    steps, other_steps = run(engine, [failing, Request(PROMPT, NUM, block_size=4)])
    [(request_id, error)] = errors
    assert request_id == 0
    assert isinstance(error, GrammarError)
    assert reason in str(error)
    assert len(text_of(steps)) < 400
    assert text_of(other_steps) == plain_text(pair, PROMPT, NUM, Sampling())
