"""Inputs of a controller before, in and after a step equal those of a slow reading of requests and texts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from blockpilot.control.choose import Trees
from blockpilot.control.controller import DepthPlan, Planned
from blockpilot.control.cost import Load, passes
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.engine.engine import Engine
from blockpilot.engine.trees import paths_of
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, Request, Sampling, Step
from helpers.controllers import Told, Watched
from helpers.drafts import Pass, scatter, watch
from helpers.engines import NEVER, PROMPT, plain_text
from helpers.prices import price

PRICE = price(launch_s=0.1, slot_s=0.05, token_s=0.04)  # deeper drafts and more rows cost more
HOT = Sampling(6.0, seed=5)  # with shared noise a random draft is often right here
DEEPEST, MAX_BLOCK_SIZE = 3, 9
CONTROLLERS: dict[str, Callable[[], Watched]] = {
    "by cost": lambda: Watched(DEEPEST, PRICE, follows=False),
    "told": lambda: Told(DEEPEST, [(3, 8), (2, 3), (0, 0), (3, 0), (99, 99), (1, 6)]),
}


class Plan(NamedTuple):
    rows: Planned
    beside: Load
    depths: list[int]


class Selection(NamedTuple):
    trees: Trees
    drafted: Load
    sizes: list[int]


def calls_of(controller: Watched) -> tuple[list[Plan], list[Selection]]:
    """Lists to which every call of a controller is appended."""
    plan, select, plans, selections = controller.plan, controller.select, list[Plan](), list[Selection]()

    def watched_plan(rows: Planned, other_load: Load) -> DepthPlan:
        depth_plan = plan(rows, other_load)
        plans.append(Plan(rows, other_load, depth_plan.depths.tolist()))
        return depth_plan

    def watched_select(trees: Trees, rates: np.ndarray, drafted: Load) -> np.ndarray:
        sizes = select(trees, rates, drafted)
        selections.append(Selection(trees, drafted, sizes.tolist()))
        return sizes

    controller.plan, controller.select = watched_plan, watched_select  # type: ignore[method-assign]
    return plans, selections


class Reader:
    """Reads an engine's steps, given only its requests and their texts."""

    def __init__(self, requests: Sequence[Request], texts: Sequence[Sequence[int]], controller: Watched) -> None:
        self.requests, self.texts, self.controller = requests, texts, controller
        self.plans, self.selections = calls_of(controller)
        self.num_emitted = [0] * len(requests)

    def room(self, i: int) -> int:
        return self.requests[i].max_new_tokens - self.num_emitted[i]

    def most_verified(self, i: int) -> int:
        """Maximum number of drafted tokens that a row of fixed size verifies."""
        block_size = self.requests[i].block_size or 1
        is_tree = self.requests[i].layout == "tree" and self.room(i) > 1
        return (block_size if is_tree else min(block_size, self.room(i))) - 1

    def read(self, steps: Sequence[Step], drafted: Sequence[Pass], *, is_sequential: bool) -> None:
        decoded, outcome = [step for step in steps if step.block_size], self.controller.outcomes[-1]
        ids = [step.request_id for step in decoded]
        adapts = [self.requests[i].block_size is None for i in ids]
        fixed = [self.most_verified(i) for i in ids]
        depths = [min(size, self.room(i) - 1, DEEPEST if self.requests[i].layout == "tree" else 99)
                  for i, size in zip(ids, fixed, strict=True)]  # fmt: skip
        # 1. Depths are planned for rows that adapt, given the load of the others.
        assert len(self.plans) == any(adapts)
        if any(adapts):
            [plan] = self.plans
            free = [i for i, is_free in zip(ids, adapts, strict=True) if is_free]
            assert plan.beside == Load(len(ids) - len(free), sum(depths), sum(fixed), passes(depths, is_sequential))
            assert plan.rows.kinds.tolist() == [not self.requests[i].sampling.is_greedy for i in free]
            assert plan.rows.max_depths.tolist() == [max(0, min(DEEPEST, self.room(i) - 1)) for i in free]
            planned = list(plan.depths)
            depths = [planned.pop(0) if is_free else depth for depth, is_free in zip(depths, adapts, strict=True)]
        # 2. One pass drafts to these depths; the selected candidates are verified.
        drafting = [index for index, depth in enumerate(depths) if depth]
        assert [draft_pass.depths for draft_pass in drafted] == [[depths[i] for i in drafting]] * bool(drafting)
        num_passes, free = passes(depths, is_sequential), [index for index, is_free in enumerate(adapts) if is_free]
        assert len(self.selections) == bool(drafting and free)
        for trees, load, sizes in self.selections:
            assert load == Load(len(ids), sum(depths), sum(fixed), num_passes, outcome.num_prompt_tokens)
            assert trees.drafted.tolist() == [depths[index] for index in free]
            assert sizes == [len(decoded[index].tree.tokens) for index in free]
        # 3. The outcome is the load, and the acceptance of the verified nodes according to the texts.
        assert outcome.load == Load(len(ids), sum(depths), sum(step.block_size - 1 for step in decoded), num_passes)
        verified = self.controller.verified[-1]
        right = [pair for index in free for pair in self.rightness(decoded[index])]
        tokens = [pair for draft_pass in drafted for pair in tokens_of(draft_pass, verified.choice_index)]
        assert sorted(zip(tokens, verified.right.tolist(), strict=True)) == sorted(right)
        for step in steps:
            self.num_emitted[step.request_id] += len(step.tokens)
        self.plans.clear()
        self.selections.clear()

    def rightness(self, step: Step) -> list[tuple[int, bool]]:
        """Nodes whose parents are in the text: their tokens, and True if they are in the text, too."""
        text = tuple(self.texts[step.request_id][self.num_emitted[step.request_id] :])
        nodes = list[tuple[int, bool]]()
        for path in paths_of(step.tree)[1:]:
            if path[:-1] == text[: len(path) - 1] and len(path) <= len(text):
                nodes.append((path[-1], path == text[: len(path)]))
        return nodes


def tokens_of(draft_pass: Pass, choices: np.ndarray) -> list[int]:
    """Tokens of choices, given as flat indices in the proposal."""
    candidates = (
        draft_pass.found.candidates if isinstance(draft_pass.found, ConditionalCandidates) else draft_pass.found
    )
    tokens: list[int] = candidates.tokens.reshape(-1)[torch.from_numpy(choices)].tolist()
    return tokens


LENGTHS = (50, 16, 24, 60, 18, 33, 9, 57, 21, 55)


@pytest.fixture(scope="module")
def texts(tiny_pair: Pair) -> dict[Sampling, list[tuple[int, ...]]]:
    """Reference texts of all pairs, which share the target."""
    with torch.inference_mode():
        return {
            sampling: [plain_text(tiny_pair, PROMPT[i:], num, sampling) for i, num in enumerate(LENGTHS)]
            for sampling in (Sampling(), HOT)
        }


@pytest.mark.parametrize("kind", CONTROLLERS)
@pytest.mark.parametrize("pair", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"], indirect=True)
@pytest.mark.parametrize("num_slots", [1, 6])
def test_a_controller_is_told_what_a_slow_reading_of_all_steps_says(
    pair: Pair,
    tiny_pair: Pair,
    kind: str,
    num_slots: int,
    texts: dict[Sampling, list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows join, leave and stop; some have fixed sizes, some sample; one draft is scripted; prefill is chunked."""
    requests, expected = list[Request](), list[tuple[int, ...]]()
    for i, num in enumerate(LENGTHS):
        sampling = HOT if i % 3 and pair is not tiny_pair else Sampling()
        size, layout = (None, None, 3, None, 1, 6)[i % 6], LAYOUTS[i % 3 if i % 6 < 5 else 2]
        stops = frozenset(range(i, 260, 41)) if size is None and i else NEVER  # many stop inside a block
        text = texts[sampling][i]
        ends = (n for n, token in enumerate(text, 1) if token in stops)
        requests.append(Request(PROMPT[i:], num, sampling, size, stops, layout=layout, lookup=False))
        expected.append(text[: next(ends, num)])
    controller = CONTROLLERS[kind]()
    sizes = {"num_slots": num_slots, "max_length": 128, "max_block_size": MAX_BLOCK_SIZE, "max_prefill_tokens": 12}
    engine = Engine(pair, controller=controller, **sizes)  # type: ignore[arg-type]
    if pair is tiny_pair:
        whole = [(*request.prompt_ids, *text) for request, text in zip(requests, texts[Sampling()], strict=True)]
        scatter(engine, whole, 2, monkeypatch)
    drafted, reader = watch(engine, monkeypatch), Reader(requests, expected, controller)
    for request in requests:
        engine.add(request)
    before, emitted = controller.model.weights.copy(), [list[int]() for _ in requests]
    while not engine.idle:
        drafted.clear()
        steps = engine.step()
        reader.read(steps, drafted, is_sequential=pair.draft.is_sequential)
        for step in steps:
            emitted[step.request_id] += step.tokens
    assert list(map(tuple, emitted)) == expected
    prompts = [outcome.num_prompt_tokens for outcome in controller.outcomes]
    assert sum(prompts) == sum(len(request.prompt_ids) for request in requests)
    assert max(prompts) <= 12
    right = np.concatenate([verified.right for verified in controller.verified])
    assert 2 < right.sum() < len(right) / 2
    assert (controller.model.weights != before).any() or num_slots > 1  # few steps


def test_a_row_that_failed_tells_nothing(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes of the other row only, in a third step in which the first row's scores are NaN."""
    controller = Told(DEEPEST, [(2, 2)])
    engine, failed = Engine(tiny_pair, num_slots=2, max_length=64, controller=controller), list[int]()
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    for i in range(2):
        engine.add(Request(PROMPT[i:], 20, stop_token_ids=NEVER, layout="chain", lookup=False))
    engine.step(), engine.step()
    assert {choice // 16 for choice in controller.verified[-1].choice_index.tolist()} == {0, 1}  # 2 slots of 8
    logits = engine._target.logits
    with monkeypatch.context() as patch:
        patch.setattr(
            engine._target, "logits", lambda hidden: logits(hidden).index_fill(0, torch.arange(3), torch.nan)
        )
        engine.step()
    assert failed == [0]
    assert {choice // 16 for choice in controller.verified[-1].choice_index.tolist()} == {1}
