"""Texts of any requests in any order equal those of one-token-at-a-time decoding.

Tested with every kind of draft, with and without a prefix cache, and with chunked prefill. A step is one pass of the
target, and one of a block draft if it drafts.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.engine.engine import Engine
from blockpilot.native.library import has_functions
from blockpilot.pairs.loading import Pair
from blockpilot.types import DRAFTED, LAYOUTS, LOOKED_UP, FinishReason, Request, Sampling, Step
from helpers.controllers import Told, Watched
from helpers.engines import NEVER
from helpers.passes import Passes, counting
from helpers.policies import step_policy
from helpers.prices import price
from helpers.worlds import MAX_LENGTH, MAX_NEW_TOKENS, Chat, World

PRICE = price(launch_s=0.1, slot_s=0.06, token_s=0.04)  # deeper drafts and more rows cost more
MAX_BLOCK_SIZE = 12
SAMPLINGS = (
    Sampling(),
    Sampling(6.0, seed=6),  # with shared noise a random draft is often right here
    Sampling(1.0, seed=2, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.4, logit_bias={65: 1.5}),
    Sampling(1.0, top_k=2, seed=3, logit_bias={65: 40.0, 66: 41.0}),  # two tokens, so that texts repeat themselves
)


class WithPrior(Watched):
    """Controller with a step cost and a random prior."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair.block_size - 1, PRICE)
        self.model = AcceptanceModel(pair.block_size - 1, step_policy(pair.id, pair.vocab_size, scale=2.0))


CONTROLLERS: dict[str, Callable[[Pair], Watched]] = {
    "nominal": lambda pair: Watched(pair.block_size - 1),
    "by cost": lambda pair: Watched(pair.block_size - 1, PRICE),
    "by cost, which stays": lambda pair: Watched(pair.block_size - 1, PRICE, follows=False),
    "prior": WithPrior,
    "told": lambda pair: Told(pair.block_size - 1, [(3, 8), (0, 0), (1, 8), (2, 0)]),
    "plain": lambda pair: Told(pair.block_size - 1, [(0, 0)]),
}


@dataclass
class Running:
    """A request in the engine, and its expected results."""

    request: Request
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    emitted: list[int] = field(default_factory=list)
    shown: str = ""

    @property
    def may_be_tree(self) -> bool:
        """True for layout `tree`, and for layout `auto` without a fixed block size."""
        return self.request.layout == "tree" or (self.request.layout == "auto" and self.request.block_size is None)

    def take(self, step: Step) -> None:
        """Check one of its steps."""
        request, num, begins = self.request, len(step.tokens), not self.emitted
        assert num > 0
        assert (step.block_size == 0) == (step.prefill is not None) == begins
        if begins:
            assert (num, step.num_accepted) == (1, 0)
        else:
            assert num <= step.block_size <= MAX_BLOCK_SIZE
            if request.block_size is not None:
                room = min(request.max_new_tokens, MAX_LENGTH - len(request.prompt_ids)) - len(self.emitted)
                may_be_shorter = request.lookup or (request.layout == "tree" and room > 1)
                assert step.block_size == min(request.block_size, room) or may_be_shorter
                assert step.block_size <= request.block_size
            assert len(step.tree.tokens) == step.block_size - 1
            assert step.tree.is_chain or self.may_be_tree
            bonus = num - step.num_accepted
            assert bonus == 1 or (bonus == 0 and step.finish_reason is not None)
        self.emitted += step.tokens
        self.shown += "".join(step.texts)
        assert tuple(self.emitted) == self.tokens[: len(self.emitted)]
        is_over = len(self.emitted) == len(self.tokens)
        assert step.finish_reason == (self.reason if is_over else None)
        assert not is_over or not request.stop_strings or self.shown == self.text


class Trial:
    """An engine that runs a series of operations, with checks after each."""

    def __init__(
        self, world: World, pair: Pair, passes: Callable[[], Passes], seen: Counter[str], **sizes: Any
    ) -> None:
        self.world, self.pair, self._passes, self.seen = world, pair, passes, seen
        limits = {"max_length": MAX_LENGTH, "max_block_size": MAX_BLOCK_SIZE, **sizes}
        self.engine = Engine(pair, controller=CONTROLLERS["nominal"](pair), **limits)
        self.sizes = sizes
        self.running: dict[int, Running] = {}
        self.num_added = 0

    @property
    def decoding(self) -> list[int]:
        return [i for i, running in self.running.items() if running.emitted]

    def step(self) -> None:
        decoding = self.decoding
        self._passes()
        steps = self.engine.step()
        num_drafted = 0
        if self.running:
            assert isinstance(self.engine.controller, Watched)
            outcome = self.engine.controller.outcomes[-1]
            num_drafted = outcome.load.num_drafted
            assert outcome.num_prompt_tokens <= self.sizes["max_prefill_tokens"]
        passes_run = self._passes()
        assert passes_run.target == bool(self.running)
        assert passes_run.draft == (num_drafted > 0) or self.pair.draft.is_sequential
        assert num_drafted or not any(source & DRAFTED for step in steps for source in step.tree.sources)
        assert sorted(step.request_id for step in steps if step.block_size) == sorted(decoding)
        assert len({step.request_id for step in steps}) == len(steps)
        for step in steps:
            self.running[step.request_id].take(step)
            self.note(step)
            if step.finish_reason is not None:
                del self.running[step.request_id]
        self.check()

    def note(self, step: Step) -> None:
        """Count the events of a step."""
        self.seen["accepted"] += step.num_accepted
        self.seen["looked up"] += sum(source & LOOKED_UP > 0 for source in step.accepted_sources)
        self.seen["moved"] += step.path != list(range(1, 1 + step.num_accepted))
        self.seen["reused"] += step.num_reused

    def check(self) -> None:
        engine = self.engine
        assert engine.num_active <= engine.num_slots
        assert engine.num_active + engine.num_waiting == len(self.running)
        assert engine.num_decoding == len(self.decoding)
        assert engine.idle == (not self.running)
        assert engine.num_kept_tokens <= self.sizes["prefix_tokens"]

    def drain(self) -> None:
        for _ in range(1000):
            if not self.running:
                break
            self.step()
        self.check()
        self._passes()
        assert self.engine.step() == []
        assert not any(self._passes())


# --- operations ---


@dataclass(frozen=True)
class Add:
    chat: Chat
    options: dict[str, Any]
    """Fields of the request."""
    stop: tuple[str, int] | None
    """Kind of stop, `token` or `string`, and its index in the expected text."""

    def do(self, trial: Trial) -> None:
        sampling, options = self.options["sampling"], dict(self.options)
        if not (trial.pair.has_draft or options["lookup"]):
            options["block_size"] = None if options["block_size"] != 1 else 1
        prompt = trial.world.prompt(self.chat, sampling)
        tokens = trial.world.text(prompt, sampling)
        kind, start = self.stop or ("none", 0)
        request = Request(
            prompt,
            stop_token_ids=frozenset(tokens[start : start + 1]) if kind == "token" else NEVER,
            stop_strings=(readable(trial.world.decode(tokens[start:])),) if kind == "string" else (),
            **options,
        )
        trial.running[trial.engine.add(request)] = Running(request, *trial.world.ended(request))
        trial.num_added += 1


def readable(text: str) -> str:
    """The first one or two consecutive ASCII characters; a letter if there are none."""
    for i, char in enumerate(text):
        if char.isascii():
            return text[i : i + 2] if text[i : i + 2].isascii() else char
    return "e"


@dataclass(frozen=True)
class Cancel:
    which: int

    def do(self, trial: Trial) -> None:
        request_id = self.which % (trial.num_added + 1)  # some have ended, one does not exist
        trial.engine.cancel(request_id)
        trial.running.pop(request_id, None)


@dataclass(frozen=True)
class Advance:
    num_steps: int

    def do(self, trial: Trial) -> None:
        for _ in range(self.num_steps):
            trial.step()


@dataclass(frozen=True)
class Use:
    controller: str

    def do(self, trial: Trial) -> None:
        trial.engine.controller = CONTROLLERS[self.controller](trial.pair)


CHATS = st.builds(Chat, st.sampled_from([0, 33, 70]), st.integers(0, 1), st.sampled_from([0, 0, 9, MAX_NEW_TOKENS]))
OPTIONS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, MAX_NEW_TOKENS),
        "sampling": st.sampled_from(SAMPLINGS),
        "block_size": st.none() | st.integers(1, MAX_BLOCK_SIZE),
        "layout": st.sampled_from(LAYOUTS),
        "lookup": st.sampled_from([None, None, True, False] if has_functions() else [None, False]),
        "cache_salt": st.sampled_from(["", "", "", "other"]),
    }
)
STOPS = st.none() | st.tuples(st.sampled_from(["token", "string"]), st.integers(0, MAX_NEW_TOKENS - 1))
ADD, ADVANCE = st.builds(Add, CHATS, OPTIONS, STOPS), st.builds(Advance, st.integers(1, 5))
OPERATIONS = st.one_of(
    *(ADD, ADVANCE, ADD, ADVANCE, ADD, ADVANCE),
    st.builds(Cancel, st.integers(0, 50)),
    st.builds(Use, st.sampled_from(sorted(CONTROLLERS))),
)
SIZES = st.fixed_dictionaries(
    {
        "num_slots": st.integers(1, 4),
        "max_prefill_tokens": st.sampled_from([7, 30, 1000]),
        "prefix_tokens": st.sampled_from([0, 80, 4000]),
    }
)


@pytest.fixture(scope="module")
def world(tiny_pair: Pair) -> World:
    """World of all pairs with the tiny target."""
    return World(tiny_pair)


@pytest.fixture(scope="module")
def sliding_world(gemma_pair: Pair) -> World:
    """World of a target with sliding windows that are shorter than any prompt."""
    return World(gemma_pair)


@pytest.mark.parametrize(
    "name",
    [
        *("knowing", "markov_pair", "dflash2_pair", "eagle_pair", "alone", "sliding", "sliding and knowing"),
        *("hybrid_pair", "hybrid_mixture_pair", "gpt_oss_pair", "gemma4_pair"),
    ],
)
def test_texts_are_plain_whatever_is_asked_in_whatever_order(request: pytest.FixtureRequest, name: str) -> None:
    """Requests arrive, end, stop and are cancelled; chats continue; controllers and block sizes change meanwhile."""
    has_states = name.startswith("hybrid")
    has_own_target = has_states or name in ("gpt_oss_pair", "gemma4_pair")
    is_knowing = has_own_target or name.endswith("knowing")
    if has_own_target:
        world = World(request.getfixturevalue(name))
    else:
        world = request.getfixturevalue("sliding_world" if "sliding" in name else "world")
    pair = world.knowing_pair if is_knowing else request.getfixturevalue({"sliding": "gemma_pair"}.get(name, name))
    seen = Counter[str]()

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.lists(OPERATIONS, min_size=12, max_size=40), SIZES)
    def check(operations: list[Any], sizes: dict[str, int]) -> None:
        trial = Trial(world, pair, passes, seen, **sizes)
        for operation in operations:
            operation.do(trial)
            trial.check()
        trial.drain()

    with counting(pair) as passes:
        check()
    assert seen["reused"] > 500 or has_states
    assert seen["reused"] == 0 or not has_states
    assert seen["accepted"] > 30
    assert seen["moved"] > 0 or not pair.has_draft
    assert seen["looked up"] > 0 or not has_functions()
