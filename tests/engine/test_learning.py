"""What an engine plans, drafts, verifies and lets its controller learn is what a slow reading of its steps says."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest
import torch

from blockpilot.control.acceptance import OF_PATH
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Planned, StepOutcome, Verified
from blockpilot.control.cost import Load, passes
from blockpilot.drafts.choices import Linked
from blockpilot.engine.engine import Engine
from blockpilot.engine.trees import Node, Slots, best_first, choices_of, paths_of, tree_of
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, Candidates, Request, Sampling, Step
from helpers.controllers import Told, Watched
from helpers.drafts import Pass, scatter, watch
from helpers.engines import NEVER, PROMPT, plain_text
from helpers.prices import price

PRICE = price(launch_s=0.1, slot_s=0.05, token_s=0.04)  # the deeper a step and the more rows, the dearer
HOT = Sampling(6.0, seed=5)  # with shared noise a random draft is often right here
DEEPEST, MAX_BLOCK_SIZE = 3, 9
CONTROLLERS: dict[str, Callable[[], Watched]] = {
    "by cost": lambda: Watched(DEEPEST, PRICE, follows=False),
    "told": lambda: Told(DEEPEST, [(3, 8), (2, 3), (0, 0), (3, 1), (1, 6)]),
}


class Known(NamedTuple):
    """Choices that were verified below what the target chose, later choices above each, and which of them it made."""

    choices: list[int]
    laters: list[int]
    right: list[bool]


class Offer:
    """Choices of one pass of the draft as lists, by numbers of rows that draft."""

    def __init__(self, of_pass: Pass, known: Sequence[bool], controller: Watched) -> None:
        found, self.depths = of_pass.found, of_pass.depths
        candidates: Candidates = found.found if isinstance(found, Linked) else found
        num, k = sum(self.depths), candidates.tokens.shape[1]
        self.num_lists = len(candidates.tokens) // num
        places = found.places if isinstance(found, Linked) else torch.zeros(num, 1, k, dtype=torch.int64)
        slots = [slot for depth in self.depths for slot in range(depth) for _ in range(self.num_lists)]
        of_rows = zip(known, self.depths, strict=True)
        is_known = [is_known for is_known, depth in of_rows for _ in range(depth * self.num_lists)]
        proposal = controller.propose(np.array(is_known), candidates, np.array(slots))
        self.k, self._tokens, self._places = k, candidates.tokens.tolist(), places.tolist()
        self._chances = proposal.chances.tolist()

    def slots(self, r: int) -> Slots:
        first, p = sum(self.depths[:r]), self.num_lists
        each = range(first, first + self.depths[r])
        tokens = [self._tokens[slot * p : slot * p + p] for slot in each]
        chances = [[at[slot * p : slot * p + p] for slot in each] for at in self._chances]
        return Slots(tokens, chances, [self._places[slot] for slot in each])

    def choice(self, r: int, path: Sequence[int]) -> tuple[int, int]:
        """Place of a path's last token among all choices, and how many later ones are above it."""
        slots, after, ranks, number = self.slots(r), 0, list[int](), -1
        for depth, token in enumerate(path):
            ranks.append(slots.tokens[depth][after].index(token))
            slot = sum(self.depths[:r]) + depth
            number = (slot * self.num_lists + after) * self.k + ranks[-1]
            after = slots.places[depth][after][ranks[-1]]
        return number, sum(rank > 0 for rank in ranks[:-1])


class Shadow:
    """An engine's rows, told by its steps and its draft's proposals alone, and what a controller makes of them."""

    def __init__(self, requests: Sequence[Request], texts: Sequence[Sequence[int]], controller: Watched) -> None:
        self.requests, self.texts, self.controller = requests, texts, controller
        self.num_emitted = [0] * len(requests)

    def room(self, i: int) -> int:
        return self.requests[i].max_new_tokens - self.num_emitted[i]

    def fixed(self, i: int) -> int:
        """Drafted tokens that a row of fixed size verifies at most."""
        block_size = self.requests[i].block_size or 0
        is_tree = self.requests[i].layout == "tree" and self.room(i) > 1
        return (block_size if is_tree else min(block_size, self.room(i))) - 1

    def check(
        self, steps: Sequence[Step], proposed: Sequence[Pass], outcome: StepOutcome, *, is_sequential: bool
    ) -> None:
        decoded = [step for step in steps if step.block_size]
        ids = [step.request_id for step in decoded]
        adapts = [self.requests[i].block_size is None for i in ids]
        deepest = [max(0, min(DEEPEST, self.room(i) - 1)) for i in ids]
        fixed = [0 if free else self.fixed(i) for i, free in zip(ids, adapts, strict=True)]
        depths = [min(size, self.room(i) - 1, DEEPEST if self.requests[i].layout == "tree" else 99)
                  for i, size in zip(ids, fixed, strict=True)]  # fmt: skip
        # 1. Depths are those that the controller plans for rows that adapt, beside the others.
        if any(adapts):
            beside = Load(len(ids) - sum(adapts), sum(depths), sum(fixed), passes(depths, is_sequential))
            rows = [(not self.requests[i].sampling.is_greedy, most)
                    for i, most, free in zip(ids, deepest, adapts, strict=True) if free]  # fmt: skip
            planned = self.controller.plan(Planned(*np.array(rows, dtype=int).T), beside).tolist()
            depths = [planned.pop(0) if free else depth for depth, free in zip(depths, adapts, strict=True)]
        drafting = [place for place, depth in enumerate(depths) if depth]
        assert [of_pass.depths for of_pass in proposed] == [[depths[place] for place in drafting]] * bool(drafting)
        # 2. Trees have the most probable prefixes, as many as it selects.
        num_passes = passes(depths, is_sequential)
        known = Known([], [], [])
        if drafting:
            offer = Offer(proposed[0], [adapts[place] for place in drafting], self.controller)
            grown = [self.grow(offer, r, ids[place], fixed[place]) for r, place in enumerate(drafting)]
            free = [r for r, place in enumerate(drafting) if adapts[place]]
            sizes = [len(nodes) for nodes in grown]
            if free:
                of_rows = [(self.requests[ids[drafting[r]]].sampling, depths[drafting[r]]) for r in free]
                trees = trees_of([grown[r] for r in free], of_rows)
                selected = self.controller.select(trees, Load(len(ids), sum(depths), sum(fixed), num_passes))
                for r, size in zip(free, selected.tolist(), strict=True):
                    sizes[r] = size
            for r, place in enumerate(drafting):
                nodes = grown[r][: sizes[r]]
                assert decoded[place].tree == tree_of(nodes)
                if adapts[place]:
                    self.note(known, offer, r, ids[place], nodes)
        # 3. The controller learns from what the texts say of them.
        load = Load(len(ids), sum(depths), sum(step.block_size - 1 for step in decoded), num_passes)
        assert outcome.load == load
        assert outcome.num_prompt_tokens == sum(
            len(self.requests[step.request_id].prompt_ids) for step in steps if step.prefill is not None
        )
        assert outcome.verified is not None
        assert [values.tolist() for values in outcome.verified[:3]] == list(known)
        of_paths = np.zeros((0, len(OF_PATH))), np.zeros(0, dtype=int), np.zeros(0, dtype=bool)
        kinds = int, int, bool
        found = Verified(*(np.array(each, dtype=kind) for each, kind in zip(known, kinds, strict=True)), *of_paths)
        self.controller.learn(StepOutcome(load, outcome.num_prompt_tokens, found), 1.0)
        for step in steps:
            self.num_emitted[step.request_id] += len(step.tokens)

    def grow(self, offer: Offer, r: int, i: int, fixed: int) -> list[Node]:
        request, slots = self.requests[i], offer.slots(r)
        adapts = request.block_size is None
        is_chain = request.layout == "chain" or (request.layout == "auto" and not adapts)
        limit = MAX_BLOCK_SIZE - 1 if adapts else fixed
        return list(islice(best_first(choices_of(slots), is_chain=is_chain), limit))

    def note(self, known: Known, offer: Offer, r: int, i: int, nodes: Sequence[Node]) -> None:
        """Nodes whose parents are in the text, in the order in which they grew."""
        text = tuple(self.texts[i][self.num_emitted[i] :])
        paths: list[tuple[int, ...]] = [()]
        for node in nodes:
            path = (*paths[node.parent], node.token)
            paths.append(path)
            if path[:-1] == text[: len(path) - 1] and len(path) <= len(text):
                choice, num_later = offer.choice(r, path)
                known.choices.append(choice)
                known.laters.append(num_later)
                known.right.append(path == text[: len(path)])
        assert sorted(paths) == sorted(paths_of(tree_of(nodes)))


def trees_of(grown: Sequence[Sequence[Node]], of_rows: Sequence[tuple[Sampling, int]]) -> Trees:
    """With the sampling of each row and how many positions it drafted."""
    num = np.array([len(nodes) for nodes in grown])
    chances = np.zeros((len(num), MAX_BLOCK_SIZE - 1))
    depths = np.zeros_like(chances, dtype=int)
    for r, nodes in enumerate(grown):
        chances[r, : num[r]], depths[r, : num[r]] = zip(*((node.chance, node.depth) for node in nodes), strict=True)
    drawn, drafted = np.array([(not sampling.is_greedy, depth) for sampling, depth in of_rows], dtype=int).T
    return Trees(drawn, drafted, num, chances, depths)


LENGTHS = (50, 16, 24, 60, 18, 33, 9, 57, 21, 55)


@pytest.fixture(scope="module")
def texts(tiny_pair: Pair) -> dict[Sampling, list[tuple[int, ...]]]:
    """Those of all pairs, which have one target."""
    with torch.inference_mode():
        return {
            sampling: [plain_text(tiny_pair, PROMPT[i:], num, sampling) for i, num in enumerate(LENGTHS)]
            for sampling in (Sampling(), HOT)
        }


@pytest.mark.parametrize("kind", CONTROLLERS)
@pytest.mark.parametrize("name", ["tiny_pair", "markov_pair", "dflash2_pair", "eagle_pair"])
@pytest.mark.parametrize("num_slots", [1, 6])
def test_a_slow_reading_of_all_steps_plans_selects_and_learns_the_same(
    request: pytest.FixtureRequest,
    name: str,
    kind: str,
    num_slots: int,
    texts: dict[Sampling, list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows join, leave and stop; some have fixed sizes, some draw their tokens; the draft of one pair is made up."""
    pair: Pair = request.getfixturevalue(name)
    requests, expected = list[Request](), list[tuple[int, ...]]()
    for i, num in enumerate(LENGTHS):
        sampling = HOT if i % 3 and name != "tiny_pair" else Sampling()
        size, layout = (None, None, 3, None, 1, 6)[i % 6], LAYOUTS[i % 3 if i % 6 < 5 else 2]
        stops = frozenset(range(i, 260, 41)) if size is None and i else NEVER  # many stop amid a block
        text = texts[sampling][i]
        ends = (n for n, token in enumerate(text, 1) if token in stops)
        requests.append(Request(PROMPT[i:], num, sampling, size, stops, layout=layout, lookup=False))
        expected.append(text[: next(ends, num)])
    controller = CONTROLLERS[kind]()
    engine = Engine(pair, num_slots=num_slots, max_length=128, controller=controller, max_block_size=MAX_BLOCK_SIZE)
    if name == "tiny_pair":
        whole = [(*of.prompt_ids, *text) for of, text in zip(requests, texts[Sampling()], strict=True)]
        scatter(engine, whole, 2, monkeypatch)
    proposed, shadow = watch(engine, monkeypatch), Shadow(requests, expected, CONTROLLERS[kind]())
    for of_one in requests:
        engine.add(of_one)
    found = [list[int]() for _ in requests]
    while not engine.idle:
        proposed.clear()
        steps = engine.step()
        shadow.check(steps, proposed, controller.outcomes[-1], is_sequential=pair.draft.is_sequential)
        for step in steps:
            found[step.request_id] += step.tokens
    assert list(map(tuple, found)) == expected
    ours, theirs = controller.model, shadow.controller.model
    for name_of in ("weights", "_nodes", "_drafts"):
        assert np.array_equal(getattr(ours, name_of), getattr(theirs, name_of))
    right = np.concatenate([outcome.verified.right for outcome in controller.outcomes])
    assert 2 < right.sum() < len(right) / 2
    assert (ours.weights != 0).any() or num_slots > 1  # few steps
    assert (name, kind) != ("tiny_pair", "told") or any(
        outcome.verified.laters.any() for outcome in controller.outcomes
    )


def test_a_row_that_failed_tells_nothing(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's scores of its third step are no numbers; its neighbour's are."""
    controller = Told(DEEPEST, [(2, 2)])
    engine, failed = Engine(tiny_pair, num_slots=2, max_length=64, controller=controller), list[int]()
    engine.on_failure = lambda request_id, error: failed.append(request_id)
    for i in range(2):
        engine.add(Request(PROMPT[i:], 20, stop_token_ids=NEVER, layout="chain", lookup=False))
    engine.step(), engine.step()
    assert {choice // 16 for choice in controller.outcomes[-1].verified.choices.tolist()} == {0, 1}  # 2 slots of 8
    logits = engine._target.logits
    with monkeypatch.context() as patch:
        patch.setattr(
            engine._target, "logits", lambda hidden: logits(hidden).index_fill(0, torch.arange(3), torch.nan)
        )
        engine.step()
    assert failed == [0]
    assert {choice // 16 for choice in controller.outcomes[-1].verified.choices.tolist()} == {1}
