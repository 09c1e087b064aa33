"""Whatever is asked of an engine, in whatever order, its texts are those of one-token-at-a-time decoding."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import ANY

from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, FinishReason, Layout, Request, Sampling, Step
from helpers.controllers import Told, Watched
from helpers.engines import NEVER
from helpers.passes import Passes, counting
from helpers.policies import step_policy
from helpers.prices import price
from helpers.worlds import MAX_LENGTH, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, World, prompt

# --- adapter: what changes how an engine drafts while it runs ---
#
# The tests reach the adaptive parts of an engine through these functions only. One replaces the controller, which
# chooses for requests without a block size; one makes such requests decode plainly, as a price does under load. They
# do not touch what a request asks for: its text.

PRICE = price(launch_s=0.1, slot_s=0.06, token_s=0.04)  # the deeper a step and the more rows, the dearer
MAX_BLOCK_SIZE = 12
PLAIN = [(0, 0)]


class Prior(Watched):
    """By the cost of a step, with a random prior."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair.block_size - 1, PRICE)
        self.model = AcceptanceModel(pair.block_size - 1, step_policy(pair.id, pair.vocab_size, scale=2.0))


CONTROLLERS: dict[str, Callable[[Pair], Watched]] = {
    "nominal": lambda pair: Watched(pair.block_size - 1),
    "by cost": lambda pair: Watched(pair.block_size - 1, PRICE),
    "by cost, which stays": lambda pair: Watched(pair.block_size - 1, PRICE, follows=False),
    "prior": Prior,
    "told": lambda pair: Told(pair.block_size - 1, [(3, 5), (0, 0), (1, 8), (2, 0)]),
}


def controller_of(engine: Engine) -> Watched:
    assert isinstance(engine.controller, Watched)
    return engine.controller


def use_controller(engine: Engine, kind: str) -> None:
    engine.controller = CONTROLLERS[kind](engine.pair)


def num_drafted(engine: Engine) -> int:
    """Positions that the draft proposed tokens for in the last step; they may be worth nothing."""
    return controller_of(engine).outcomes[-1].load.num_drafted


def stop_drafting(engine: Engine) -> None:
    engine.controller = Told(engine.pair.block_size - 1, PLAIN)


# --- requests and engines under test ---

SAMPLINGS = (
    Sampling(),
    Sampling(1.0, seed=1),
    Sampling(1.0, seed=2, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.4, logit_bias={65: 1.5}),
)


@dataclass
class Running:
    """A request in the engine, and what its steps must be."""

    request: Request
    text: tuple[int, ...]
    reason: FinishReason
    block_size: int | None
    """What a step verifies, unless it is the controller's business."""
    tokens: list[int] = field(default_factory=list)

    @property
    def may_be_tree(self) -> bool:
        """That of a row that adapts is one unless chains are asked for, that of a fixed size if trees are."""
        return self.request.layout == "tree" or (self.request.layout == "auto" and self.block_size is None)

    def take(self, step: Step) -> None:
        """Check a step of it."""
        num, begins = len(step.tokens), not self.tokens
        assert num > 0
        assert (step.block_size == 0) == (step.prefill is not None) == begins
        if begins:
            assert (num, step.num_accepted) == (1, 0)
        else:
            assert num <= step.block_size <= MAX_BLOCK_SIZE
            if self.block_size is not None:
                room = min(self.request.max_new_tokens, MAX_LENGTH - len(self.request.prompt_ids)) - len(self.tokens)
                assert step.block_size == min(self.block_size, room) or (self.request.layout == "tree" and room > 1)
                assert step.block_size <= self.block_size
            assert len(step.tree.tokens) == step.block_size - 1
            assert step.tree.is_chain or self.may_be_tree
            bonus = num - step.num_accepted
            assert bonus == 1 or (bonus == 0 and step.finish_reason is not None)
        self.tokens += step.tokens
        assert tuple(self.tokens) == self.text[: len(self.tokens)]
        ended = len(self.tokens) == len(self.text)
        assert step.finish_reason == (self.reason if ended else None)


class Trial:
    """An engine that is asked for one thing after the other, and checked after each."""

    def __init__(self, world: World, passes: Callable[[], Passes], num_slots: int, max_prefill_tokens: int) -> None:
        self.world, self._passes = world, passes
        self.engine = Engine(
            world.pair,
            num_slots=num_slots,
            max_length=MAX_LENGTH,
            max_prefill_tokens=max_prefill_tokens,
            max_block_size=MAX_BLOCK_SIZE,
            controller=CONTROLLERS["nominal"](world.pair),
        )
        self.running: dict[int, Running] = {}
        self.num_added = 0

    @property
    def decoding(self) -> list[int]:
        return [i for i, running in self.running.items() if running.tokens]

    def step(self) -> None:
        decoding = self.decoding
        self._passes()
        steps = self.engine.step()
        drafted = bool(self.running) and num_drafted(self.engine) > 0
        assert self._passes() == (bool(self.running), drafted)
        assert drafted >= any(step.block_size > 1 for step in steps)
        assert sorted(step.request_id for step in steps if step.block_size) == sorted(decoding)
        assert len({step.request_id for step in steps}) == len(steps)
        for step in steps:
            self.running[step.request_id].take(step)
            self.world.num_accepted += step.num_accepted
            if step.finish_reason is not None:
                del self.running[step.request_id]
        self.check()

    def check(self) -> None:
        engine = self.engine
        assert engine.num_active <= engine.num_slots
        assert engine.num_active + engine.num_waiting == len(self.running)
        assert engine.num_decoding == len(self.decoding)
        assert engine.idle == (not self.running)

    def drain(self) -> None:
        for _ in range(1000):
            if not self.running:
                break
            self.step()
        self.check()
        assert self.engine.step() == []


# --- what may be asked ---


@dataclass(frozen=True)
class Add:
    num_prompt_tokens: int
    max_new_tokens: int
    sampling: Sampling
    block_size: int | None
    layout: Layout
    stop: tuple[str, int] | None
    """The token, or a string of the text, from this place of the text on."""

    def do(self, trial: Trial) -> None:
        text = trial.world.text(self.num_prompt_tokens, self.sampling)
        kind, place = self.stop or ("none", 0)
        request = Request(
            prompt(self.num_prompt_tokens),
            self.max_new_tokens,
            self.sampling,
            self.block_size,
            frozenset(text[place : place + 1]) if kind == "token" else NEVER,
            (readable(trial.world.decode(text[place:])),) if kind == "string" else (),
            layout=self.layout,
        )
        trial.running[trial.engine.add(request)] = Running(request, *trial.world.ended(request), self.block_size)
        trial.num_added += 1


def readable(text: str) -> str:
    """The first one or two characters in sequence that are ASCII; a letter if there are none."""
    for i, char in enumerate(text):
        if char.isascii():
            return text[i : i + 2] if text[i : i + 2].isascii() else char
    return "e"


@dataclass(frozen=True)
class Cancel:
    which: int

    def do(self, trial: Trial) -> None:
        request_id = self.which % (trial.num_added + 1)  # some have ended, one never was
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
    kind: str

    def do(self, trial: Trial) -> None:
        use_controller(trial.engine, self.kind)


@dataclass(frozen=True)
class StopDrafting:
    def do(self, trial: Trial) -> None:
        stop_drafting(trial.engine)


BLOCK_SIZES = st.integers(1, 12)
ADD = st.builds(
    Add,
    st.integers(1, MAX_PROMPT_TOKENS),
    st.integers(1, MAX_NEW_TOKENS),
    st.sampled_from(SAMPLINGS),
    st.none() | BLOCK_SIZES,
    st.sampled_from(LAYOUTS),
    st.none() | st.tuples(st.sampled_from(["token", "string"]), st.integers(0, MAX_NEW_TOKENS - 1)),
)
ADVANCE = st.builds(Advance, st.integers(1, 4))
OPERATIONS = st.one_of(
    ADD,
    ADVANCE,
    st.builds(Cancel, st.integers(0, 50)),
    ADVANCE,
    ADD,
    st.builds(Use, st.sampled_from(list(CONTROLLERS))),
    ADVANCE,
    st.just(StopDrafting()),
)


def test_texts_are_plain_whatever_is_asked_in_whatever_order(tiny_pair: Pair) -> None:
    """Requests come, end, stop and are cancelled; controllers and block sizes change under them."""
    world = World(tiny_pair).with_knowing_draft()

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(st.lists(OPERATIONS, min_size=12, max_size=34), st.integers(2, 3), st.sampled_from([8, 3, 100]))
    def check(operations: list[Any], num_slots: int, max_prefill_tokens: int) -> None:
        trial = Trial(world, passes, num_slots, max_prefill_tokens)
        for operation in operations:
            operation.do(trial)
            trial.check()
        trial.drain()

    with counting(world.pair) as passes:
        check()
    assert world.num_accepted > 80


def test_texts_of_an_eagle_draft_are_plain_whatever_is_asked(eagle_pair: Pair) -> None:
    """Its noise is hot: with shared dice a random draft is often right."""
    world = World(eagle_pair)

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(st.lists(OPERATIONS, min_size=12, max_size=34), st.integers(2, 3), st.sampled_from([8, 3, 100]))
    def check(operations: list[Any], num_slots: int, max_prefill_tokens: int) -> None:
        trial = Trial(world, lambda: ANY, num_slots, max_prefill_tokens)
        for operation in operations:
            if isinstance(operation, Add) and operation.sampling.seed:
                operation = replace(operation, sampling=replace(operation.sampling, temperature=6.0))
            operation.do(trial)
            trial.check()
        trial.drain()

    check()
    assert world.num_accepted > 30
