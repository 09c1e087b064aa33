"""Actor as a plain class: every method really decodes the same text, and groups do not depend on each other."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockpilot.control.acceptance import DOUBT
from blockpilot.control.controller import Controller
from blockpilot.control.cost import PRICE_FILE
from blockpilot.device import device_name
from blockpilot.drafts.dflash_checkpoint import save_draft
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import save_policy
from blockpilot.prompts.files import Message, Prompt, is_in_half, load_prompts
from blockpilot.types import DRAFTED, LOOKED_UP, Step, Tree
from helpers.evaluations import (
    CANDIDATES,
    FIXED,
    NUM_TOKENS,
    SIZES,
    Watched,
    plan_of,
    price_here,
    prompt_file,
    retrained,
    write_policy,
)
from helpers.policies import choosy_policy, step_policy, tiny_policy
from jobs.common.registry import CHAMPION, UNTRAINED
from jobs.evaluation.actor import default_block_sizes
from jobs.evaluation.inputs import (
    AR,
    CONTROL,
    LOOKUP,
    MEANS,
    NO_LOOKUP,
    ORACLE,
    POLICY,
    RANDOM,
    SWITCH,
    EvaluateConfig,
    Swept,
    group,
    known_price,
)

Start = Callable[..., Watched]
TREES = ["tree 3", "tree 5"]
FEW_METHODS: dict[str, Any] = {"block_sizes": (3,), "baselines": ("means", "untrained")}


@pytest.mark.usefixtures("price_as_given")
@pytest.mark.parametrize(("concurrency", "waves", "temperature"), [(1, 2, 0.0), (2, 2, 1.0)])
def test_all_methods_decode_the_same_text_in_an_order_that_rotates(
    start: Start,
    questions: list[Prompt],
    tiny_pair: Pair,
    tmp_path: Path,
    concurrency: int,
    waves: int,
    temperature: float,
) -> None:
    """Same text by every method in float32; the order of methods rotates. The last group is not full."""
    texts = questions[: concurrency * waves + 1]
    by_answer = tiny_policy(tiny_pair.id, tiny_pair.vocab_size, SIZES)
    by_answer.network.head.weight *= 30  # so that its input matters
    by_step = choosy_policy(tiny_pair.id, tiny_pair.vocab_size, (0.35, 0.7))
    policies = {POLICY: write_policy(tmp_path / "a", tiny_pair)}
    for name, learned in (("by-answer", by_answer), ("by-step", by_step)):
        policies[name] = tmp_path / name
        save_policy(learned, policies[name])
    share = 0.25 / concurrency  # drafting helps if a draft is right half of the time
    price = price_here(tiny_pair.id, slot_s=share, token_s=share)
    settings = {"concurrency": concurrency, "waves": waves, "temperature": temperature}
    evaluator = start(texts, policies, price, **settings, repeats=2, tree_sizes=(3, 5))
    rotating = [*FIXED, *TREES, CONTROL, RANDOM, MEANS, UNTRAINED, *policies]
    methods = [*rotating, ORACLE]
    assert list(evaluator.setting.block_sizes.items()) == [*zip(methods, [*SIZES, *[None] * 10], strict=True)]
    groups = group(texts, concurrency * waves)
    positions = [(repeat, number) for repeat in range(2) for number in range(len(groups))]
    runs = [run for position in positions for run in evaluator.measure(*position)]

    starts = [(repeat + number) % len(rotating) for repeat, number in positions]
    orders = [list(measured) for measured in evaluator.decoded]
    assert orders == [order for s in starts for order in ([*rotating[s:], *rotating[:s]], [ORACLE, AR])]
    assert [(run.repeat, run.prompt, run.method) for run in runs] == [
        (repeat, prompt, method) for repeat, number in positions for method in methods for prompt in groups[number]
    ]
    assert all(run.totals.num_equal == run.totals.num_requests == 1 for run in runs)
    assert sum(run.totals.num_requests for run in runs if run.method == AR) == 2 * len(texts)

    def sizes_of(method: str) -> list[list[list[int]]]:
        return [[timing.block_sizes for timing in measured[method]] for measured in evaluator.decoded[::2]]

    assert sizes_of(CONTROL) == sizes_of(AR)
    assert sizes_of(POLICY) == sizes_of("B=3")  # also at the end, where the limit cuts blocks short
    within_an_answer = [set(answer[:-4]) for answers in sizes_of("by-step") for answer in answers]
    assert max(map(len, within_an_answer)) > 1


@pytest.mark.usefixtures("price_as_given")
def test_mixed_traffic_is_greedy_for_half_of_the_prompts(
    start: Start, questions: list[Prompt], tiny_pair: Pair
) -> None:
    settings = {"concurrency": 3, "waves": 1, "baselines": ("untrained",), "tree_sizes": (3,), "block_sizes": (3,)}
    texts = questions[:6]

    def answers(**options: Any) -> list[list[int]]:
        evaluator = start(texts, price=price_here(tiny_pair.id), **settings, **options)
        evaluator.measure(0, 0), evaluator.measure(0, 1)
        by_method = [[timing.output for run in evaluator.decoded for timing in run[method]] for method in methods]
        assert all(outputs == by_method[0] for outputs in by_method)
        return by_method[0]

    methods = AR, "tree 3", UNTRAINED
    greedy, drawn, mixed = answers(temperature=0.0), answers(temperature=1.0), answers(temperature=1.0, mixed=True)
    chosen = [greedy if is_in_half(text) else drawn for text in texts]
    assert mixed == [answer[i] for i, answer in enumerate(chosen)]
    assert greedy != mixed != drawn


@pytest.mark.usefixtures("price_as_given")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_really_decoded(
    start: Start, tiny_pair: Pair, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of a fixed size, and trees selected by the draft's probabilities; running means select chains."""
    baselines = "means", "untrained", "lookup", "switch", "no-lookup"
    cheap = price_here(tiny_pair.id, slot_s=1e-3, token_s=1e-3)
    evaluator = start(price=cheap, tree_sizes=(3,), baselines=baselines, temperature=temperature, waves=1)
    trees: dict[str, list[Tree]] = {method: [] for method in evaluator.methods}

    def recorded(engine: Engine, method_trees: list[Tree]) -> Callable[[], list[Step]]:
        def step() -> list[Step]:
            steps = Engine.step(engine)
            method_trees.extend(step.tree for step in steps if step.block_size)
            return steps

        return step

    for method, engine in evaluator._engines.items():
        monkeypatch.setattr(engine, "step", recorded(engine, trees[method]))
    runs = evaluator.measure(0, 0)
    baseline_methods = MEANS, UNTRAINED, LOOKUP, SWITCH, NO_LOOKUP
    assert [run.method for run in runs] == [*FIXED, "tree 3", "tree 3 with lookup", *baseline_methods]
    assert all(run.totals.num_equal == 1 for run in runs)
    assert [run.totals.num_verified for run in runs] == [len(trees[run.method]) for run in runs]
    branched = {method for method, method_trees in trees.items() if not all(tree.is_chain for tree in method_trees)}
    required = {"tree 3", UNTRAINED, NO_LOOKUP}
    assert required <= branched <= required | {"tree 3 with lookup", SWITCH}
    sources = {m: {source for tree in method_trees for source in tree.sources} for m, method_trees in trees.items()}
    looked_up = {method for method, method_sources in sources.items() if method_sources - {DRAFTED}}
    assert looked_up <= {"tree 3 with lookup", UNTRAINED, LOOKUP, SWITCH}
    assert sources[LOOKUP] <= {LOOKED_UP}
    assert {len(tree.tokens) for tree in trees["tree 3"][:-1]} == {3}
    assert max(len(tree.tokens) for tree in trees[UNTRAINED]) > tiny_pair.block_size


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_rival_drafts_decode_the_same_text_on_the_same_target(
    start: Start, eagle_pair: Pair, markov_pair: Pair, temperature: float, tmp_path: Path
) -> None:
    save_eagle3(eagle_pair.draft, tmp_path / "e")  # type: ignore[arg-type]
    save_draft(markov_pair.draft, tmp_path / "m")  # type: ignore[arg-type]
    rivals, names = tuple(str(tmp_path / name) for name in ("e", "m", "e")), ("eagle3", "dspark", "eagle3-2")
    settings = {"tree_sizes": (5,), "baselines": ("untrained",), "block_sizes": (2, 4), "waves": 2}
    evaluator = start(rival_drafts=rivals, temperature=temperature, **settings)
    methods = [AR, "B=2", "B=4", "tree 5", UNTRAINED]
    methods += [f"{name} {method}" for name in names for method in methods[1:]]
    assert list(evaluator.setting.block_sizes.items()) == [*zip(methods, [1, 2, 4, *[None] * 14], strict=True)]
    assert [pair.draft for pair in evaluator.setting.rivals.values()] == [*rivals]
    engines = evaluator._engines
    assert len({id(engine.pair.target) for engine in engines.values()}) == 1
    runs = evaluator.measure(0, 0)
    assert all(run.totals.num_equal == 1 for run in runs)
    totals = {method: [run.totals for run in runs if run.method == method] for method in methods}
    for name in names:
        assert engines[f"{name} B=4"].pair.id == evaluator.setting.rivals[name]
        assert max(run_total.sum_block_sizes / run_total.num_verified for run_total in totals[f"{name} B=4"]) <= 4
        assert max(run_total.sum_block_sizes / run_total.num_verified for run_total in totals[f"{name} tree 5"]) > 4
    num_steps = {method: sum(run_total.num_verified for run_total in totals[method]) for method in methods}
    assert temperature == 0 or num_steps["eagle3 B=4"] < num_steps[AR]


@pytest.mark.usefixtures("price_as_given")
@pytest.mark.parametrize(
    ("concurrency", "costs"), [(1, (0.21, 0.12, 0.09)), (3, (0.21, 0.12, 0.09)), (3, (0.0, 0.0, 0.0))]
)
def test_the_oracle_takes_the_size_of_each_request_with_most_tokens_per_cost_just_measured(
    start: Start, questions: list[Prompt], tiny_pair: Pair, concurrency: int, costs: tuple[float, float, float]
) -> None:
    """Block size of the oracle. At a high temperature the shared noise makes even a random draft often right."""
    launch_s, slot_s, token_s = costs
    price = price_here(tiny_pair.id, launch_s=launch_s, slot_s=slot_s / concurrency, token_s=token_s / concurrency)
    settings = {"temperature": 5.0, "max_new_tokens": 24, "waves": 1, "baselines": ("oracle",)}
    evaluator = start(price=price, concurrency=concurrency, **settings)
    step_costs = [1.0, *(1 + launch_s + (size - 1) * (slot_s + token_s) for size in CANDIDATES)]
    chosen = []
    for number, indices in enumerate(group(questions, concurrency)):
        evaluator.decoded.clear()
        runs = {(run.method, run.prompt): run.totals for run in evaluator.measure(0, number)}
        measured, hindsight = evaluator.decoded
        group_choices = []
        for i, index in enumerate(indices):
            speeds = [runs[method, index].num_emitted / len(measured[method][i].block_sizes) for method in FIXED]
            best = int(np.argmax(np.divide(speeds, step_costs)))
            group_choices.append(best)
            assert hindsight[ORACLE][i].block_sizes == measured[FIXED[best]][i].block_sizes
            assert runs[ORACLE, index].num_verified == runs[FIXED[best], index].num_verified
        chosen.append(group_choices)
    assert len({best for group_choices in chosen for best in group_choices}) > 1, chosen
    assert concurrency == 1 or any(len(set(group_choices)) > 1 for group_choices in chosen), chosen


def test_a_group_does_not_depend_on_those_before_it(
    start: Start, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal block sizes of a group alone, as after a kill, and after another group, with steps of one second."""
    learn = Controller.learn
    monkeypatch.setattr(Controller, "learn", lambda self, outcome, seconds: learn(self, outcome, 1.0))
    save_policy(choosy_policy(tiny_pair.id, tiny_pair.vocab_size, (0.35, -0.2)), tmp_path / "policy")
    price = price_here(tiny_pair.id, slot_s=0.15, token_s=0.15)
    settings = {"temperature": 5.0, "max_new_tokens": 40, "concurrency": 2, "waves": 2, "warm_up": 2}
    settings |= {"block_sizes": (3,), "baselines": ("means", "untrained", "oracle")}

    def decoded(*numbers: int) -> dict[str, list[list[int]]]:
        evaluator = start(policies={POLICY: tmp_path / "policy"}, price=price, **settings)
        for number in numbers:
            evaluator.decoded.clear()
            evaluator.measure(0, number)
        first, second = evaluator.decoded
        return {method: [timing.block_sizes for timing in timings] for method, timings in (first | second).items()}

    alone = decoded(1)
    assert decoded(0, 1) == alone
    varied = {method: {size for sizes in alone[method] for size in sizes} for method in (POLICY, MEANS, UNTRAINED)}
    assert min(map(len, varied.values())) > 1, varied


def test_random_sizes_depend_on_seed_and_prompt_only(
    start: Start, questions: list[Prompt], policy_dir: Path, tiny_pair: Pair
) -> None:
    texts = [Prompt("texts", (Message("user", f"text {i}"),)) for i in range(300)]
    price = price_here(tiny_pair.id)

    def drawn(prompts: list[Prompt] = questions, repeat: int = 0, **settings: object) -> list[int | None]:
        evaluator = start(prompts, {POLICY: policy_dir}, price, warm_up=0, **settings)
        evaluator._plan = evaluator._plan._replace(prompts=tuple(texts))
        return [evaluator._size(RANDOM, index, repeat) for index in range(len(texts))]

    sizes = drawn()
    assert set(sizes) == set(CANDIDATES)  # the policy's candidates, so without AR
    assert min(Counter(sizes).values()) > 70
    assert drawn(questions[::-1][:4], concurrency=3, temperature=1.0, max_new_tokens=5) == sizes
    assert drawn(seed=2) == drawn(repeat=1) != sizes


def test_answers_decoded_together_do_not_end_together(start: Start, tiny_pair: Pair) -> None:
    """Different length limits for answers decoded together, the full one for single answers (none stops early)."""
    lengths = {}
    for concurrency in (1, 3):
        runs = start(price=price_here(tiny_pair.id), concurrency=concurrency).measure(0, 0)
        lengths[concurrency] = {(run.prompt, run.totals.num_tokens) for run in runs}
        assert len(lengths[concurrency]) == len({run.prompt for run in runs})  # the same for every method
    assert {num for _, num in lengths[1]} == {NUM_TOKENS}
    drawn = {num for _, num in lengths[3]}
    assert len(drawn) > 1
    assert drawn <= set(range(NUM_TOKENS // 2, NUM_TOKENS + 1))


def test_repeats_draw_new_texts_only_when_sampling(start: Start, tiny_pair: Pair) -> None:
    for temperature in (0.0, 1.0):
        evaluator = start(price=price_here(tiny_pair.id), temperature=temperature, baselines=())
        first, second = (evaluator._decode(["B=2"], (0,), repeat)["B=2"][0].output for repeat in range(2))
        assert (first == second) == (temperature == 0)


@pytest.mark.usefixtures("price_as_given")
def test_a_price_that_was_given_is_used_where_it_holds(
    start: Start, config: EvaluateConfig, questions: list[Prompt], tiny_pair: Pair, tmp_path: Path
) -> None:
    texts, given_price = questions[:4], price_here(tiny_pair.id, slot_s=0.1)
    setting = start(texts, price=given_price, baselines=()).setting
    assert (setting.price, setting.device) == (given_price, device_name(tiny_pair.target.device))
    tmp_path.joinpath("policy").mkdir()
    tmp_path.joinpath("policy", PRICE_FILE).write_text(given_price.to_json())
    assert known_price(config, plan_of(config, texts, {POLICY: tmp_path / "policy"})) == given_price
    assert known_price(config, plan_of(config, texts)) is None
    retrained_price = dataclasses.replace(given_price, pair=retrained(tiny_pair).id)
    for other_price in (retrained_price, dataclasses.replace(given_price, device="cpu, 2 threads"), None):
        evaluator = start(texts, price=other_price, concurrency=3, baselines=())
        measured = evaluator.setting.price
        assert measured != other_price
        assert measured.made_for(given_price.pair, given_price.dtype, given_price.device)
        assert (measured.context, measured.rows) == (evaluator.setting.context, 3)
        assert {engine.controller.price for engine in evaluator._engines.values()} == {measured}


@pytest.mark.usefixtures("price_as_given")
def test_a_prompt_longer_than_the_context_is_set_aside(start: Start, tiny_pair: Pair, tmp_path: Path) -> None:
    """Other prompts are measured as if the long one did not exist."""
    short, price = ["short?", "shorter", "brief"], price_here(tiny_pair.id)
    short_evaluator, full_evaluator = (
        start(load_prompts(str(prompt_file(tmp_path / "texts.jsonl", texts))), price=price, waves=2)
        for texts in (short, [*short, "long " * 300])
    )
    (reason,) = full_evaluator.setting.set_aside.values()
    limit = r"at most 1023 leave room for an answer \(the model's limit is 1024 tokens\)"
    assert re.fullmatch(rf"prompt of 15\d\d tokens: {limit}", reason)
    assert not short_evaluator.setting.set_aside
    assert full_evaluator._plan == short_evaluator._plan
    for measured in zip(full_evaluator.measure(0, 1), short_evaluator.measure(0, 1), strict=True):
        assert len({(run.method, run.prompt, run.totals.num_tokens) for run in measured}) == 1
    long = Prompt("texts", (Message("user", "long " * 300),))
    with pytest.raises(ValueError, match=r"at least two prompts; set aside: 'long long .*' of texts: prompt of 15"):
        start([long, short_evaluator._plan.prompts[0]])


def test_a_policy_or_sweep_of_other_weights_is_refused_and_a_rival_left_out(
    start: Start, config: EvaluateConfig, questions: list[Prompt], policy_dir: Path, tiny_pair: Pair, tmp_path: Path
) -> None:
    old = write_policy(tmp_path / "old", retrained(tiny_pair), 2)
    with pytest.raises(ValueError, match=r"policy made for .*@other .*; this pair is"):
        start(policies={POLICY: old})
    with pytest.raises(ValueError, match=r"made for .*draft_revision='other'.*; this pair is"):
        Watched(config, plan_of(config, questions, sweep=Swept(retrained(tiny_pair).id, CANDIDATES, {})))
    rival = write_policy(tmp_path / "rival", tiny_pair, 4)
    evaluator = start(policies={POLICY: policy_dir, CHAMPION: old, "rival": rival}, price=price_here(tiny_pair.id))
    ((name, reason),) = evaluator.setting.left_out.items()
    assert name == CHAMPION
    assert reason.startswith(f"policy made for target {tiny_pair.id.target}@")
    assert "@other" in reason
    assert tiny_pair.id.draft_revision in reason
    methods = [*FIXED, CONTROL, RANDOM, MEANS, UNTRAINED, POLICY, "rival", ORACLE]
    assert list(evaluator.setting.block_sizes) == methods
    assert list(dict.fromkeys(run.method for run in evaluator.measure(0, 0))) == methods


def test_fixed_block_sizes_are_those_asked_for_or_the_policys_or_around_the_trained_one(
    start: Start, tiny_pair: Pair, tmp_path: Path
) -> None:
    def fixed(policies: Mapping[str, Path], **changes: object) -> list[int]:
        settings = {"price": price_here(tiny_pair.id), "baselines": (), **changes}
        sizes = start(policies=policies, **settings).setting.block_sizes.values()
        return [size for size in sizes if size is not None]

    save_policy(tiny_policy(tiny_pair.id, tiny_pair.vocab_size, (1, 5)), tmp_path / "policy")
    save_policy(step_policy(tiny_pair.id, tiny_pair.vocab_size), tmp_path / "step")  # which has no candidates
    assert fixed({POLICY: tmp_path / "policy"}) == [1, 5]
    assert fixed({POLICY: tmp_path / "policy"}, block_sizes=(2, 6)) == [1, 2, 6]
    assert fixed({POLICY: tmp_path / "step", "rival": tmp_path / "policy"}) == [1, 2, 3, 4]
    assert [default_block_sizes(trained) for trained in (4, 8, 16)] == [(2, 3, 4), (2, 4, 6, 8), (4, 8, 12, 16)]


def test_a_step_policy_is_the_prior_of_its_engine_in_every_group(
    start: Start, tiny_pair: Pair, policy_dir: Path, tmp_path: Path
) -> None:
    """Step policy reset to its weights before every group; the untrained choice starts from zero weights."""
    policy = step_policy(tiny_pair.id, tiny_pair.vocab_size)
    save_policy(policy, tmp_path / "step")
    policies, price = {POLICY: tmp_path / "step", "fixed": policy_dir}, price_here(tiny_pair.id, slot_s=0.1)
    evaluator = start(policies=policies, price=price, max_new_tokens=40, waves=1, warm_up=2, **FEW_METHODS)
    engines = evaluator._engines
    assert {name for name, engine in engines.items() if engine.policy is not None} == {"fixed"}
    for number in range(2):
        evaluator._reset()
        for method, engine in engines.items():
            expected = policy.weights if method == POLICY else np.zeros_like(policy.weights)
            assert np.array_equal(engine.controller.model.weights, expected), method
            assert engine.controller.price == evaluator.setting.price
        evaluator.measure(0, number)
        assert not np.array_equal(engines[POLICY].controller.model.weights, policy.weights)


def test_what_adapts_starts_every_group_as_it_was_after_prompts_of_others(
    start: Start, questions: list[Prompt], tiny_pair: Pair
) -> None:
    """Warm-up of a group on prompts of every second group, never its own; a single group starts without warm-up."""
    settings = {"price": price_here(tiny_pair.id), "warm_up": 2, "max_new_tokens": 40, **FEW_METHODS}
    evaluator = start(questions[:5], waves=1, **settings)
    calls = list[list[int]]()
    decode = evaluator._decode
    evaluator._decode = lambda methods, indices, *args: calls.append(list(indices)) or decode(methods, indices, *args)  # type: ignore[method-assign]
    assert set(evaluator._warmed_up(0)) == set(evaluator._warmed_up(1)) == {MEANS, UNTRAINED}
    assert calls == [[1, 3], [0, 2]]
    for number in (0, 1, 2):
        evaluator._reset(number)
        controller = evaluator._engines[UNTRAINED].controller
        assert controller is not evaluator._adapted[number % 2][UNTRAINED]
        assert controller.model._drafts.max() > DOUBT
        evaluator.measure(0, number)
    assert not np.array_equal(*(evaluator._adapted[half][UNTRAINED].model._nodes for half in range(2)))
    alone = start(questions[:2], **settings)  # one group
    alone._reset(0)
    assert alone._engines[UNTRAINED].controller.model._drafts.max() == DOUBT
