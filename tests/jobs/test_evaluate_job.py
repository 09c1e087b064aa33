"""Evaluation: what is timed, that every method really decodes, what is refused, and the job as a user runs it."""

import dataclasses
import functools
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import scipy.stats
import torch

from blockpilot.control.acceptance import DOUBT
from blockpilot.control.controller import Controller
from blockpilot.control.cost import PRICE_FILE, StepPrice
from blockpilot.device import device_name
from blockpilot.drafts.dflash_checkpoint import save_draft
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.evaluation import measurement
from blockpilot.evaluation.measurement import Flow, RequestTiming, in_turns
from blockpilot.evaluation.statistics import Comparison, MethodRun, Totals
from blockpilot.pairs.loading import Pair
from blockpilot.policy.dataset import prompt_key
from blockpilot.policy.store import save_policy
from blockpilot.prompts.files import Message, Prompt, answer_limit, load_prompts
from blockpilot.sweep.rows import Metadata, SweepRow, prompt_ids, write_rows
from blockpilot.sweep.summary import Summary
from blockpilot.sweep.sweep import sweep_prompts
from blockpilot.types import DRAFTED, LOOKED_UP, PairId, Prefill, Request, Sampling, Step, Tree
from helpers.leases import take_over
from helpers.policies import choosy_policy, step_policy, tiny_policy
from helpers.prices import price
from helpers.processes import Job
from jobs import evaluate
from jobs.common.config import PairConfig, main
from jobs.common.learned_from import LearnedFrom
from jobs.common.lease import Lease
from jobs.common.registry import CHAMPION, UNTRAINED, Registry, Version, model_name
from jobs.evaluation import inputs as evaluate_inputs
from jobs.evaluation import result as evaluate_result
from jobs.evaluation.actor import Evaluator, Setting, default_block_sizes
from jobs.evaluation.inputs import (
    AR,
    CONTROL,
    LOOKUP,
    MEANS,
    NO_LOOKUP,
    ORACLE,
    POLICY,
    RANDOM,
    STATIC,
    SWITCH,
    EvaluateConfig,
    Plan,
    Swept,
    find_policies,
    group,
    known_price,
    read_inputs,
)

ROOT = Path(__file__).parents[2]
QUESTIONS = [f"question {i}?" for i in range(8)]
SWEPT = [f"swept {i}?" for i in range(4)]
CANDIDATES = (2, 3, 4)
SIZES = (1, *CANDIDATES)
NUM_TOKENS = 12
FIXED = [AR, "B=2", "B=3", "B=4"]
TREES = ["tree 3", "tree 5"]


def prompt_file(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Prompt]]:
    path = prompt_file(tmp_path_factory.mktemp("prompts") / "questions.jsonl", QUESTIONS)
    return path, load_prompts(str(path))


@pytest.fixture(scope="module")
def swept_rows(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[SweepRow]:
    path = prompt_file(tmp_path_factory.mktemp("prompts") / "swept.jsonl", SWEPT)
    return sweep_prompts(
        tiny_pair, load_prompts(str(path)), CANDIDATES, method="decode", max_new_tokens=NUM_TOKENS
    ).rows


@pytest.fixture
def metadata(tiny_pair: Pair) -> Metadata:
    config = {"seed": 0}
    return Metadata(config, tiny_pair.id, "float32", tiny_pair.vocab_size, 4, list(CANDIDATES), {}, "unknown")


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path], prompts: tuple[Path, list[Prompt]], tmp_path: Path) -> EvaluateConfig:
    target, draft = tiny_pair_dirs
    return EvaluateConfig(
        pair=PairConfig(target=str(target), draft=str(draft), dtype="float32"),
        prompts=(str(prompts[0]),),
        policy="none",
        max_new_tokens=NUM_TOKENS,
        output=tmp_path / "out",
    )


def changed(config: EvaluateConfig, **changes: object) -> EvaluateConfig:
    return config.model_copy(update=changes)


def write_policy(directory: Path, pair: Pair, block_size: int = 3) -> Path:
    """A policy that always takes one block size; without a policy the engine would take the trained size, 4."""
    outputs = [float(size == block_size) for size in CANDIDATES]
    save_policy(tiny_policy(pair.id, pair.vocab_size, CANDIDATES, outputs=outputs), directory)
    return directory


def retrained(pair: Pair) -> Pair:
    return dataclasses.replace(pair, id=pair.id._replace(draft_revision="other"))


@pytest.fixture
def policy_dir(tiny_pair: Pair, tmp_path: Path) -> Path:
    return write_policy(tmp_path / "some" / "policy", tiny_pair)


def price_here(pair: PairId, **coefficients: float) -> StepPrice:
    """Of a pair on this device."""
    return price(pair=pair, device=device_name(torch.device("cpu")), **coefficients)


# Timing


def requests(pair: Pair, texts: list[Prompt], block_size: int | None, temperature: float = 0.0) -> list[Request]:
    stops = pair.stop_token_ids
    sampling = Sampling(temperature=temperature, seed=5)
    return [Request(p.encode(pair.tokenizer), NUM_TOKENS, sampling, block_size, stops) for p in texts]


def flown(engine: Engine, wanted: list[Request]) -> list[RequestTiming]:
    flow = Flow(engine, wanted)
    in_turns([flow], 3)
    return flow.results


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize(("num_requests", "num_slots"), [(1, 1), (3, 3), (4, 2), (3, 1)])
def test_sums_are_those_of_single_runs(
    tiny_pair: Pair, prompts: tuple[Path, list[Prompt]], block_size: int, num_requests: int, num_slots: int
) -> None:
    texts = prompts[1][:num_requests]
    engine = Engine(tiny_pair, num_slots=num_slots, max_length=256)
    started = time.perf_counter()
    measured = flown(engine, requests(tiny_pair, texts, block_size, temperature=1.0))
    took = time.perf_counter() - started
    settings = {"block_size": block_size, "max_new_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 5}
    alone = [list(generate(tiny_pair, prompt.encode(tiny_pair.tokenizer), **settings)) for prompt in texts]  # type: ignore[arg-type]
    for found, steps in zip(measured, alone, strict=True):
        verified = [step for step in steps if step.block_size]
        totals = found.totals(reference=found.output)
        assert found.output == [t for step in steps for t in step.tokens]
        assert totals.num_verified == len(verified)
        assert totals.num_emitted == sum(len(step.tokens) for step in verified)
        assert totals.num_tokens == totals.num_emitted + 1
        assert totals.sum_block_sizes == sum(step.block_size for step in verified)
        assert totals.num_later_tokens < totals.num_tokens
        assert 0 < totals.later_s < totals.total_s
    assert 0.2 * took < sum(each.total_s for each in measured) <= took
    assert engine.idle


def tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes one second, as it is measured; the engine has a clock of its own."""
    clock = iter(range(10_000))
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def test_shares_are_those_of_full_batches(
    tiny_pair: Pair, prompts: tuple[Path, list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots, three plain requests, a second a step: the third never has the engine to itself."""
    tick(monkeypatch)
    engine = Engine(tiny_pair, num_slots=2, max_length=256)
    wanted = requests(tiny_pair, prompts[1][:3], 1)
    stay = [dataclasses.replace(request, stop_token_ids=frozenset()) for request in wanted]
    measured = flown(engine, stay)
    assert [len(each.output) for each in measured] == [NUM_TOKENS] * 3
    for each in measured:
        assert each.total_s == NUM_TOKENS / 2
        assert each.num_later_steps == each.later_s == (NUM_TOKENS - 1) / 2
        assert each.num_later_tokens == NUM_TOKENS - 1
    assert engine.idle


def test_prefill_and_policy_are_inside_the_time_end_to_end(
    tiny_pair: Pair, prompts: tuple[Path, list[Prompt]]
) -> None:
    def slow(prefill: Prefill) -> int:
        time.sleep(0.2)
        return 3

    engine = Engine(tiny_pair, num_slots=2, max_length=256, policy=slow)
    measured = flown(engine, requests(tiny_pair, prompts[1][:2], None))
    assert all(0.2 <= each.total_s - each.later_s < each.total_s for each in measured)
    assert [each.block_sizes[0] for each in measured] == [3, 3]


def test_a_prompt_that_takes_several_steps_pays_for_them(
    tiny_pair: Pair, prompts: tuple[Path, list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=600, max_prefill_tokens=20)
    tick(monkeypatch)
    (measured,) = flown(engine, [Request(tuple(range(1, 101)), 2, block_size=1)])
    assert (measured.total_s, measured.later_s) == (6, 1)  # five parts, of which the last emits a token, and a step


def test_flows_take_turns_and_end_together(tiny_pair: Pair, prompts: tuple[Path, list[Prompt]]) -> None:
    """One emits two tokens a step, the other one: they take turns of six."""
    turns: list[str] = []

    class Told(Flow):
        def step(self) -> None:
            before = self.num_tokens
            super().step()
            turns.append(name[id(self)] * (self.num_tokens - before))

    stay = [dataclasses.replace(r, stop_token_ids=frozenset()) for r in requests(tiny_pair, prompts[1][:2], 1)]
    plain, both = (Told(Engine(tiny_pair, num_slots=n, max_length=256), stay) for n in (1, 2))
    name = {id(plain): "a", id(both): "b"}
    in_turns([plain, both], 6)
    assert turns[:10] == [*"aaaaaa", "bb", "bb", "bb", "a"]
    assert {flow.done for flow in (plain, both)} == {True}
    assert "".join(turns).rindex("b") > len("".join(turns)) // 2


def test_a_slower_machine_takes_its_time_from_all_parts() -> None:
    measured = RequestTiming([1, 2, 3], [2], total_s=4.0, num_later_tokens=2, num_later_steps=1.5, later_s=3.0)
    assert measured.at_pace(0.5) == RequestTiming([1, 2, 3], [2], 2.0, 2, 1.5, 1.5)


def test_equal_texts_are_counted_whole() -> None:
    measured = RequestTiming([1, 2], [2])
    assert [measured.totals(other).num_equal for other in ([1, 2], [1], [1, 2, 3], [2, 1])] == [1, 0, 0, 0]


# The actor, as the plain class it is


def plan_of(
    config: EvaluateConfig,
    texts: Sequence[Prompt],
    policies: Mapping[str, Path] | None = None,
    sweep: Swept | None = None,
    version: Version | None = None,
    champion: int | None = None,
) -> Plan:
    groups = group(texts, config.concurrency * config.waves)
    return Plan(tuple(texts), groups, sweep, dict(policies or {}), version, champion)


class Watched(Evaluator):
    """The actor, with what it decoded: by method, in the order of their turns."""

    def __init__(self, config: EvaluateConfig, plan: Plan, given: StepPrice | None = None) -> None:
        super().__init__(config, plan._replace(price=given))
        self.decoded: list[dict[str, list[RequestTiming]]] = []
        self.setting = self.load()
        self.decoded.clear()

    def _decode(self, *arguments: object) -> dict[str, list[RequestTiming]]:
        measured = super()._decode(*arguments)  # type: ignore[arg-type]
        self.decoded.append(measured)
        return measured

    def call(self, method: str, *arguments: int) -> list[MethodRun]:
        """As `jobs.evaluation.actor.evaluator` gives it to the job."""
        found: list[MethodRun] = getattr(self, method)(*arguments)
        return found


@pytest.mark.usefixtures("price_as_given")
@pytest.mark.parametrize(("concurrency", "waves", "temperature"), [(1, 2, 0.0), (3, 1, 1.0), (2, 2, 0.0)])
def test_all_methods_decode_the_same_text_in_an_order_that_rotates(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    tiny_pair: Pair,
    tmp_path: Path,
    concurrency: int,
    waves: int,
    temperature: float,
) -> None:
    """In float32 the block size changes the speed only. The last group is not full."""
    texts = prompts[1][: concurrency * waves + 1]
    config = changed(config, concurrency=concurrency, waves=waves, temperature=temperature, repeats=2)
    config = changed(config, tree_sizes=(3, 5))
    policies = {POLICY: write_policy(tmp_path / "a", tiny_pair)}
    by_answer = tiny_policy(tiny_pair.id, tiny_pair.vocab_size, SIZES)
    by_answer.network.head.weight *= 30  # so that what it reads matters
    by_step = choosy_policy(tiny_pair.id, tiny_pair.vocab_size, (0.35, 0.7))
    for name, learned in (("by-answer", by_answer), ("by-step", by_step)):
        policies[name] = tmp_path / name
        save_policy(learned, policies[name])
    share = 0.25 / concurrency  # a draft pays if it is right half of the time
    even = price_here(tiny_pair.id, slot_s=share, token_s=share)
    evaluator = Watched(config, plan_of(config, texts, policies), even)
    rotating = [*FIXED, *TREES, CONTROL, RANDOM, MEANS, UNTRAINED, *policies]
    methods = [*rotating, ORACLE]
    assert list(evaluator.setting.block_sizes.items()) == [*zip(methods, [*SIZES, *[None] * 10], strict=True)]
    num_groups = -(-len(texts) // (concurrency * waves))
    places = [(repeat, number) for repeat in range(2) for number in range(num_groups)]
    runs = [run for place in places for run in evaluator.measure(*place)]

    starts = [(repeat + number) % len(rotating) for repeat, number in places]
    orders = [list(measured) for measured in evaluator.decoded]
    assert orders == [order for s in starts for order in ([*rotating[s:], *rotating[:s]], [ORACLE, AR])]
    groups = group(texts, concurrency * waves)
    assert [(run.repeat, run.prompt, run.method) for run in runs] == [
        (repeat, place, method) for repeat, number in places for method in methods for place in groups[number]
    ]
    assert all(run.totals.num_equal == run.totals.num_requests == 1 for run in runs)
    assert sum(run.totals.num_requests for run in runs if run.method == AR) == 2 * len(texts)

    def sizes_of(method: str) -> list[list[list[int]]]:
        return [[each.block_sizes for each in found[method]] for found in evaluator.decoded[::2]]

    assert sizes_of(CONTROL) == sizes_of(AR)
    assert sizes_of(POLICY) == sizes_of("B=3")  # with the ends that the limit cuts short
    within_an_answer = [set(answer[:-4]) for answers in sizes_of("by-step") for answer in answers]
    assert max(map(len, within_an_answer)) > 1


@pytest.fixture
def price_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price that is made up for a test does not follow what steps really take."""
    monkeypatch.setattr(Controller, "__init__", functools.partialmethod(Controller.__init__, follows=False))


@pytest.mark.usefixtures("price_as_given")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_really_decoded(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    tiny_pair: Pair,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a fixed size, and those that the draft's own probabilities buy; running means buy chains."""
    baselines = "means", "untrained", "lookup", "switch", "no-lookup"
    config = changed(config, tree_sizes=(3,), baselines=baselines, temperature=temperature, waves=1)
    cheap = price_here(tiny_pair.id, slot_s=1e-3, token_s=1e-3)
    evaluator = Watched(config, plan_of(config, prompts[1]), cheap)
    trees: dict[str, list[Tree]] = {method: [] for method in evaluator.methods}

    def recorded(engine: Engine, found: list[Tree]) -> Callable[[], list[Step]]:
        def step() -> list[Step]:
            steps = Engine.step(engine)
            found.extend(each.tree for each in steps if each.block_size)
            return steps

        return step

    for method, engine in evaluator._engines.items():
        monkeypatch.setattr(engine, "step", recorded(engine, trees[method]))
    runs = evaluator.measure(0, 0)
    others = MEANS, UNTRAINED, LOOKUP, SWITCH, NO_LOOKUP
    assert [run.method for run in runs] == [*FIXED, "tree 3", "tree 3 with lookup", *others]
    assert all(run.totals.num_equal == 1 for run in runs)
    assert [run.totals.num_verified for run in runs] == [len(trees[run.method]) for run in runs]
    branched = {method for method, found in trees.items() if not all(tree.is_chain for tree in found)}
    assert (
        {"tree 3", UNTRAINED, NO_LOOKUP} <= branched <= {"tree 3", "tree 3 with lookup", UNTRAINED, SWITCH, NO_LOOKUP}
    )
    of_trees = {method: {source for tree in found for source in tree.sources} for method, found in trees.items()}
    looked_up = {method for method, sources in of_trees.items() if sources - {DRAFTED}}
    assert looked_up <= {"tree 3 with lookup", UNTRAINED, LOOKUP, SWITCH}
    assert of_trees[LOOKUP] <= {LOOKED_UP}
    assert {len(tree.tokens) for tree in trees["tree 3"][:-1]} == {3}
    assert max(len(tree.tokens) for tree in trees[UNTRAINED]) > tiny_pair.block_size


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_rival_drafts_decode_the_same_text_on_the_same_target(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    eagle_pair: Pair,
    markov_pair: Pair,
    temperature: float,
    tmp_path: Path,
) -> None:
    save_eagle3(eagle_pair.draft, tmp_path / "e")  # type: ignore[arg-type]
    save_draft(markov_pair.draft, tmp_path / "m")  # type: ignore[arg-type]
    rivals = tuple(str(tmp_path / name) for name in ("e", "m", "e"))
    config = changed(config, rival_drafts=rivals, tree_sizes=(5,), baselines=("untrained",), block_sizes=(2, 4))
    evaluator = Watched(changed(config, temperature=temperature), plan_of(config, prompts[1]))
    own = [AR, "B=2", "B=4", "tree 5", UNTRAINED]
    names = ("eagle3", "dspark", "eagle3-2")
    theirs = [f"{name} {method}" for name in names for method in ("B=2", "B=4", "tree 5", UNTRAINED)]
    assert list(evaluator.setting.block_sizes.items()) == [*zip(own + theirs, [1, 2, 4, *[None] * 14], strict=True)]
    assert [(name, pair.draft) for name, pair in evaluator.setting.rivals.items()] == [
        *zip(names, rivals, strict=True)
    ]
    engines = evaluator._engines
    assert len({id(engine.pair.target) for engine in engines.values()}) == 1
    runs = evaluator.measure(0, 0)
    assert all(run.totals.num_equal == 1 for run in runs)
    by_method = {method: [run.totals for run in runs if run.method == method] for method in own + theirs}
    for name in names:
        assert engines[f"{name} B=4"].pair.id == evaluator.setting.rivals[name]
        assert max(each.sum_block_sizes / each.num_verified for each in by_method[f"{name} B=4"]) <= 4
        assert max(each.sum_block_sizes / each.num_verified for each in by_method[f"{name} tree 5"]) > 4
    num_steps = {method: sum(each.num_verified for each in of_method) for method, of_method in by_method.items()}
    assert temperature == 0 or num_steps["eagle3 B=4"] < num_steps[AR]


@pytest.mark.usefixtures("price_as_given")
@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_oracle_takes_the_size_with_most_tokens_per_cost_of_what_was_just_measured(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair, concurrency: int
) -> None:
    """At a high temperature shared noise decides, and even a random draft is often right."""
    config = changed(config, temperature=5.0, max_new_tokens=24, waves=1, concurrency=concurrency)
    given = price_here(tiny_pair.id, launch_s=0.21, slot_s=0.12 / concurrency, token_s=0.09 / concurrency)
    evaluator = Watched(config, plan_of(config, prompts[1]), given)
    seconds = (1.0, 1.42, 1.63, 1.84)  # no two rates are alike
    chosen = []
    for number, places in enumerate(group(prompts[1], concurrency)):
        runs = {(run.method, run.prompt): run.totals for run in evaluator.measure(0, number)}
        for place in places:
            speed = {}
            for method, cost in zip(FIXED, seconds, strict=True):
                speed[method] = runs[method, place].num_emitted / runs[method, place].num_verified / cost
            chosen.append(max(speed, key=speed.__getitem__))
            assert runs[ORACLE, place].num_verified == runs[chosen[-1], place].num_verified
            assert runs[ORACLE, place].sum_block_sizes == runs[chosen[-1], place].sum_block_sizes
    assert len(set(chosen)) > 1, chosen


@pytest.mark.usefixtures("price_as_given")
def test_the_oracle_chooses_for_each_request_of_a_group(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair
) -> None:
    """Where wide steps cost nothing, each takes its own best, in whatever order requests are admitted."""
    config = changed(config, temperature=5.0, max_new_tokens=24, concurrency=3, waves=1)
    evaluator = Watched(config, plan_of(config, prompts[1]), price_here(tiny_pair.id))
    mixed = []
    for number in range(3):
        evaluator.decoded.clear()
        evaluator.measure(0, number)
        measured = evaluator.decoded[0] | evaluator.decoded[1]
        for i, (place, found) in enumerate(zip(evaluator._plan.groups[number], measured[ORACLE], strict=True)):
            num_steps = {method: len(measured[method][i].block_sizes) for method in FIXED}
            best = min(num_steps, key=num_steps.__getitem__)
            assert found.block_sizes == measured[best][i].block_sizes
            assert evaluator._request(place, ORACLE, 0).block_size == SIZES[FIXED.index(best)]
        mixed.append(len({found.block_sizes[0] for found in measured[ORACLE]}) > 1)
    assert any(mixed)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_group_does_not_depend_on_those_before_it(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    tiny_pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
) -> None:
    """On a machine of which every step takes a second, a group that is measured after a kill is what it would be."""
    learn = Controller.learn
    monkeypatch.setattr(Controller, "learn", lambda self, outcome, seconds: learn(self, outcome, 1.0))
    config = changed(config, temperature=5.0, max_new_tokens=40, concurrency=concurrency, waves=2)
    save_policy(choosy_policy(tiny_pair.id, tiny_pair.vocab_size, (0.35, -0.2)), tmp_path / "policy")
    given = price_here(tiny_pair.id, slot_s=0.15, token_s=0.15)

    def decoded(*numbers: int) -> dict[str, list[list[int]]]:
        evaluator = Watched(config, plan_of(config, prompts[1], {POLICY: tmp_path / "policy"}), given)
        for number in numbers:
            evaluator.decoded.clear()
            evaluator.measure(0, number)
        first, then = evaluator.decoded
        return {method: [each.block_sizes for each in found] for method, found in (first | then).items()}

    alone = decoded(1)
    assert decoded(0, 1) == alone
    varied = {method: {size for of_one in alone[method] for size in of_one} for method in (POLICY, MEANS, UNTRAINED)}
    assert min(map(len, varied.values())) > 1, varied


def test_random_sizes_depend_on_seed_and_prompt_only(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], policy_dir: Path
) -> None:
    some = [Prompt("some", (Message("user", f"text {i}"),)) for i in range(300)]

    def drawn(config: EvaluateConfig, texts: Sequence[Prompt], repeat: int = 0) -> list[int | None]:
        evaluator = Watched(config, plan_of(config, texts, {POLICY: policy_dir}))
        evaluator._plan = evaluator._plan._replace(prompts=tuple(some))
        return [evaluator._size(RANDOM, place, repeat) for place in range(len(some))]

    sizes = drawn(config, prompts[1])
    assert set(sizes) == set(CANDIDATES)  # those of the policy, so AR is none of them
    assert min(Counter(sizes).values()) > 70
    in_other_groups = changed(config, concurrency=3, temperature=1.0, max_new_tokens=5)
    assert drawn(in_other_groups, prompts[1][::-1][:4]) == sizes
    assert drawn(changed(config, seed=config.seed + 1), prompts[1]) == drawn(config, prompts[1], repeat=1) != sizes


def test_answers_decoded_together_do_not_end_together(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]]
) -> None:
    """One at a time they are as long as is allowed; none of these ends by itself."""
    lengths = {}
    for concurrency in (1, 3):
        varied = changed(config, concurrency=concurrency, max_new_tokens=NUM_TOKENS)
        evaluator = Watched(varied, plan_of(varied, prompts[1]))
        runs = evaluator.measure(0, 0)
        lengths[concurrency] = {(run.prompt, run.totals.num_tokens) for run in runs}
        assert len(lengths[concurrency]) == len({run.prompt for run in runs})  # by every method as long
    assert {num for _, num in lengths[1]} == {NUM_TOKENS}
    drawn = {num for _, num in lengths[3]}
    assert len(drawn) > 1
    assert drawn <= set(range(NUM_TOKENS // 2, NUM_TOKENS + 1))


def test_repeats_draw_new_texts_only_when_sampling(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]]
) -> None:
    for temperature in (0.0, 1.0):
        varied = changed(config, temperature=temperature)
        evaluator = Watched(varied, plan_of(varied, prompts[1]))
        found = (evaluator._decode(["B=2"], (0,), repeat, NUM_TOKENS)["B=2"] for repeat in range(2))
        (first,), (second,) = ([each.output for each in measured] for measured in found)
        assert (first == second) == (temperature == 0)


@pytest.mark.usefixtures("price_as_given")
def test_a_price_that_was_given_is_used_where_it_holds(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair, tmp_path: Path
) -> None:
    config = changed(config, concurrency=3)
    plan = plan_of(config, prompts[1][:4])
    given = price_here(tiny_pair.id, slot_s=0.1)
    assert given.device == device_name(tiny_pair.target.device)
    setting = Watched(config, plan, given).setting
    assert (setting.price, setting.device) == (given, device_name(tiny_pair.target.device))
    (directory := tmp_path / "policy").mkdir()
    (directory / PRICE_FILE).write_text(given.to_json())
    assert known_price(config, plan._replace(policies={POLICY: directory})) == given
    assert known_price(config, plan) is None
    others = [
        dataclasses.replace(given, pair=retrained(tiny_pair).id),
        dataclasses.replace(given, dtype="bfloat16"),
        dataclasses.replace(given, device="cpu, 2 threads"),
    ]
    for other in (*others, None):
        evaluator = Watched(config, plan, other)
        measured = evaluator.setting.price
        assert measured != other
        assert measured.made_for(given.pair, given.dtype, given.device)
        assert (measured.context, measured.rows) == (evaluator.setting.context, 3)
        assert {engine.controller.price for engine in evaluator._engines.values()} == {measured}


@pytest.mark.usefixtures("price_as_given")
def test_a_prompt_longer_than_the_context_is_set_aside(
    config: EvaluateConfig, tiny_pair: Pair, tmp_path: Path
) -> None:
    """The others are measured as if it were not there."""
    short, config = ["short?", "shorter", "brief"], changed(config, waves=2)
    plans = [
        plan_of(config, load_prompts(str(prompt_file(tmp_path / "some.jsonl", texts))))
        for texts in (short, [*short, "long " * 300])
    ]
    without, plan = (Watched(config, of, price_here(tiny_pair.id)) for of in plans)
    ((place, reason),) = plan.setting.set_aside.items()
    limit = r"at most 1023 leave room for an answer \(the model's limit is 1024 tokens\)"
    assert re.fullmatch(rf"prompt of 15\d\d tokens: {limit}", reason)
    assert plans[1].prompts[place].text == "long " * 300
    assert plans[1].without(plan.setting.set_aside, config.group_size) == plans[0]
    assert plans[0].without(without.setting.set_aside, config.group_size) is plans[0]
    for measured in zip(plan.measure(0, 1), without.measure(0, 1), strict=True):
        assert len({(run.method, run.prompt, run.totals.num_tokens) for run in measured}) == 1
    with pytest.raises(ValueError, match=r"at least two prompts; set aside: 'long long .*' of some: prompt of 15"):
        Watched(config, plans[1]._replace(prompts=(plans[1].prompts[place],), groups=((0,),)))


def test_a_policy_or_sweep_of_other_weights_is_refused(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair, tmp_path: Path
) -> None:
    old = retrained(tiny_pair)
    with pytest.raises(ValueError, match=r"policy made for .*@other .*; this pair is"):
        Watched(config, plan_of(config, prompts[1], {POLICY: write_policy(tmp_path / "old", old)}))
    with pytest.raises(ValueError, match=r"made for .*draft_revision='other'.*; this pair is"):
        Watched(config, plan_of(config, prompts[1], sweep=Swept(old.id, CANDIDATES, {})))


def test_a_rival_made_for_a_draft_that_was_retrained_is_left_out(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], policy_dir: Path, tiny_pair: Pair, tmp_path: Path
) -> None:
    rivals = {
        CHAMPION: write_policy(tmp_path / "champion", retrained(tiny_pair), 2),
        "rival": write_policy(tmp_path / "rival", tiny_pair, 4),
    }
    evaluator = Watched(config, plan_of(config, prompts[1], {POLICY: policy_dir, **rivals}))
    ((name, reason),) = evaluator.setting.left_out.items()
    assert name == CHAMPION
    assert reason.startswith(f"policy made for target {tiny_pair.id.target}@")
    assert "@other" in reason
    assert tiny_pair.id.draft_revision in reason
    assert list(evaluator.setting.block_sizes) == [*FIXED, CONTROL, RANDOM, MEANS, UNTRAINED, POLICY, "rival", ORACLE]
    ran = dict.fromkeys(run.method for run in evaluator.measure(0, 0))
    assert list(ran) == list(evaluator.setting.block_sizes)


def test_default_block_sizes() -> None:
    assert default_block_sizes(8) == (2, 4, 6, 8)
    assert default_block_sizes(16) == (4, 8, 12, 16)
    assert default_block_sizes(4) == (2, 3, 4)


def test_fixed_block_sizes_are_those_asked_for_or_the_policys_or_around_the_trained_one(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair, tmp_path: Path
) -> None:
    def fixed(config: EvaluateConfig, policies: Mapping[str, Path]) -> list[int]:
        found = Watched(config, plan_of(config, prompts[1], policies)).setting.block_sizes.values()
        return [size for size in found if size is not None]

    save_policy(tiny_policy(tiny_pair.id, tiny_pair.vocab_size, (1, 5)), tmp_path / "policy")
    assert fixed(config, {}) == [1, 2, 3, 4]
    assert fixed(config, {POLICY: tmp_path / "policy"}) == [1, 5]
    assert fixed(changed(config, block_sizes=(2, 6)), {POLICY: tmp_path / "policy"}) == [1, 2, 6]
    save_policy(step_policy(tiny_pair.id, tiny_pair.vocab_size), tmp_path / "step")  # which has no candidates
    assert fixed(config, {POLICY: tmp_path / "step", "rival": tmp_path / "policy"}) == [1, 2, 3, 4]


def test_a_step_policy_is_the_prior_of_its_engine_in_every_group(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair, policy_dir: Path, tmp_path: Path
) -> None:
    """What it learned in one group is forgotten in the next; beside it the untrained choice starts from nothing."""
    policy = step_policy(tiny_pair.id, tiny_pair.vocab_size)
    save_policy(policy, tmp_path / "step")
    plan = plan_of(config, prompts[1], {POLICY: tmp_path / "step", "fixed": policy_dir})
    evaluator = Watched(changed(config, max_new_tokens=40), plan)
    engines = evaluator._engines
    assert {name for name, engine in engines.items() if engine.policy is not None} == {"fixed"}
    for group_ in range(2):
        evaluator._reset()
        for method, engine in engines.items():
            expected = policy.weights if method == POLICY else np.zeros_like(policy.weights)
            assert np.array_equal(engine.controller.model.weights, expected), method
            assert engine.controller.price == evaluator.setting.price
        evaluator.measure(0, group_)
        assert not np.array_equal(engines[POLICY].controller.model.weights, policy.weights)


def test_what_adapts_starts_every_group_as_it_was_after_prompts_of_others(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]]
) -> None:
    """Prompts of every second group, so that no group has met its own; without any it starts from nothing."""
    plan = plan_of(changed(config, waves=1), prompts[1][:5])
    evaluator = Watched(changed(config, warm_up=2, max_new_tokens=40), plan)
    asked = list[list[int]]()
    decode = evaluator._decode
    evaluator._decode = lambda methods, places, *rest: asked.append(list(places)) or decode(methods, places, *rest)  # type: ignore[method-assign]
    assert set(evaluator._warmed_up(0)) == set(evaluator._warmed_up(1)) == {MEANS, UNTRAINED}
    assert asked == [[1, 3], [0, 2]]
    for group_ in (0, 1, 2):
        evaluator._reset(group_)
        own = evaluator._engines[UNTRAINED].controller
        assert own is not evaluator._adapted[group_ % 2][UNTRAINED]
        assert own.model._drafts.max() > DOUBT
        evaluator.measure(0, group_)
    weights = [evaluator._adapted[half][UNTRAINED].model._nodes for half in range(2)]
    assert not np.array_equal(*weights)
    alone = Watched(changed(config, warm_up=2), plan_of(config, prompts[1][:2]))  # one group
    alone._reset(0)
    assert alone._engines[UNTRAINED].controller.model._drafts.max() == DOUBT


# Groups


@pytest.mark.parametrize("concurrency", [1, 2, 3, 7])
def test_groups_never_mix_sets(concurrency: int) -> None:
    sets = "aabacbbacbaab"
    texts = [Prompt(name, (Message("user", str(i)),)) for i, name in enumerate(sets)]
    groups = group(texts, concurrency)
    assert sorted(place for places in groups for place in places) == list(range(len(sets)))
    for name in "abc":
        of_set = [places for places in groups if sets[places[0]] == name]
        assert [place for places in of_set for place in places] == [i for i, s in enumerate(sets) if s == name]
        assert all(len(places) == concurrency for places in of_set[:-1])
    assert all(len({sets[place] for place in places}) == 1 for places in groups)


# Runs that are kept


class KilledError(Exception):
    pass


def killed_after(evaluator: Watched, num_groups: int) -> Callable[..., list[MethodRun]]:
    """`evaluator.call`, which stops the process so to speak after some groups."""
    left = iter(range(num_groups))

    def call(method: str, *place: int) -> list[MethodRun]:
        if next(left, None) is None:
            raise KilledError
        return evaluator.call(method, *place)

    return call


def measure_all(
    evaluator: Watched, call: Callable[..., list[MethodRun]], config: EvaluateConfig, plan: Plan
) -> Iterator[MethodRun]:
    with Lease(config.output) as lease:
        yield from evaluate._measure_all(call, config, plan, runs_file(evaluator, config, plan), lease)


def identity_of(config: EvaluateConfig, plan: Plan, pair: Pair, dtype: str = "float32", device: str = "cpu") -> str:
    setting = setting_of(pair.id)._replace(dtype=dtype, device=device)
    return evaluate._identity(config, plan, setting)


def runs_file(evaluator: Watched, config: EvaluateConfig, plan: Plan) -> Path:
    return evaluate._runs_file(config, plan, evaluator.setting)


def test_what_was_measured_is_kept_and_a_torn_line_is_not(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(config, baselines=(), repeats=2, concurrency=2, waves=1)
    plan = plan_of(config, prompts[1])
    evaluator = Watched(config, plan)
    path = runs_file(evaluator, config, plan)
    found: list[MethodRun] = []
    with pytest.raises(KilledError):
        found.extend(measure_all(evaluator, killed_after(evaluator, 5), config, plan))
    kept = path.read_text().splitlines()
    assert len(kept) == 5
    with path.open("a") as file:
        file.write(kept[-1].replace('"place": [1, 0]', '"place": [1, 1]')[:-30])

    decoded: list[tuple[int, ...]] = []

    def call(method: str, *place: int) -> list[MethodRun]:
        decoded.append(place)
        return evaluator.call(method, *place)

    capsys.readouterr()
    runs = list(measure_all(evaluator, call, config, plan))
    assert "evaluate: going on after 5 of 8 groups" in capsys.readouterr().out
    assert decoded == [(1, 1), (1, 2), (1, 3)]
    assert path.read_text().splitlines()[:5] == kept
    groups = group(prompts[1], 2)
    every = [(repeat, place, m) for repeat in range(2) for places in groups for m in FIXED for place in places]
    assert [(run.repeat, run.prompt, run.method) for run in runs] == every
    assert runs[: 5 * 4 * 2] == found  # to the last digit of their seconds
    # Killed before the result was written, it measures nothing again.
    assert list(measure_all(evaluator, pytest.fail, config, plan)) == runs


def test_a_driver_that_lost_its_lease_keeps_no_group(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]]
) -> None:
    config = changed(config, baselines=(), concurrency=2, waves=1)
    plan = plan_of(config, prompts[1])
    evaluator = Watched(config, plan)
    groups = iter(range(10))

    def call(method: str, *place: int) -> list[MethodRun]:
        if next(groups) == 1:
            take_over(config.output)
        return evaluator.call(method, *place)

    with pytest.raises(ValueError, match="process id 7 on elsewhere has taken over; this driver stops"):
        list(measure_all(evaluator, call, config, plan))
    assert len(runs_file(evaluator, config, plan).read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 3},
        {"temperature": 1.0},
        {"max_new_tokens": 5},
        {"concurrency": 2},
        {"waves": 2},
        {"baselines": ("random",)},
    ],
)
def test_another_configuration_starts_anew_and_leaves_what_was_done(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], change: dict[str, object]
) -> None:
    config = changed(config, baselines=(), waves=1)
    plan = plan_of(config, prompts[1][:4])
    evaluator = Watched(config, plan)
    with pytest.raises(KilledError):
        list(measure_all(evaluator, killed_after(evaluator, 2), config, plan))
    first = runs_file(evaluator, config, plan)
    other = changed(config, **change)
    plan = plan_of(other, prompts[1][:4])
    evaluator = Watched(other, plan)
    with pytest.raises(KilledError):
        list(measure_all(evaluator, killed_after(evaluator, 1), other, plan))
    assert len(runs_file(evaluator, other, plan).read_text().splitlines()) == 1
    assert len(first.read_text().splitlines()) == 2


def test_other_prompts_or_policies_start_anew(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], policy_dir: Path, tiny_pair: Pair, tmp_path: Path
) -> None:
    def identity(texts: Sequence[Prompt], policies: Mapping[str, Path]) -> str:
        return identity_of(config, plan_of(config, texts, policies), tiny_pair)

    first = identity(prompts[1], {POLICY: policy_dir})
    assert identity(prompts[1], {POLICY: policy_dir}) == first
    save_policy(tiny_policy(tiny_pair.id, tiny_pair.vocab_size, (2, 4)), tmp_path / "other")
    differing = [
        identity(prompts[1][:7], {POLICY: policy_dir}),
        identity(prompts[1][::-1], {POLICY: policy_dir}),
        identity(prompts[1], {POLICY: tmp_path / "other"}),
        identity(prompts[1], {POLICY: policy_dir, "rival": policy_dir}),
    ]
    assert len({first, *differing}) == 5
    elsewhere = changed(config, output=tmp_path / "elsewhere", accelerator_type="H100")
    plan = plan_of(elsewhere, prompts[1], {POLICY: policy_dir})
    assert identity_of(elsewhere, plan, tiny_pair) == first
    plan = plan_of(config, prompts[1], {POLICY: policy_dir})
    assert identity_of(config, plan, retrained(tiny_pair)) != first
    assert identity_of(config, plan, tiny_pair, dtype="bfloat16") != first
    assert identity_of(config, plan, tiny_pair, device="cuda") != first


def test_other_weights_start_anew(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair, tmp_path: Path
) -> None:
    found = []
    for block_size in (2, 4):
        plan = plan_of(config, prompts[1], {POLICY: write_policy(tmp_path / "policy", tiny_pair, block_size)})
        found.append(identity_of(config, plan, tiny_pair))
    for seed in (0, 1):
        save_policy(step_policy(tiny_pair.id, tiny_pair.vocab_size, seed=seed), tmp_path / "policy")
        found.append(identity_of(config, plan, tiny_pair))
    assert len(set(found)) == 4


# The best fixed block size


def comparison_of(step_s: dict[str, float], tokens_per_s: dict[str, float]) -> Comparison:
    """Methods with these figures, the same on two groups."""
    methods = [(method, number) for number in range(2) for method in step_s]
    return Comparison([one(method, number, tokens_per_s[method], step_s[method]) for method, number in methods])


def one(method: str, number: int, tokens_per_s: float, step_s: float = 1.0) -> MethodRun:
    """A prompt of 100 tokens at these speeds."""
    later = {"num_later_tokens": 8, "num_later_steps": 10, "later_s": 10 * step_s}
    counts = {"num_verified": 10, "num_emitted": 20, "sum_block_sizes": 20, "num_equal": 1}
    total_s = 100 / tokens_per_s
    return MethodRun(method, number, 0, Totals(num_requests=1, num_tokens=100, total_s=total_s, **later, **counts))  # type: ignore[arg-type]


def setting_of(pair: PairId, *methods: str) -> Setting:
    sizes = {m: 1 if m == AR else int(m[2:]) if m.startswith("B=") else None for m in methods}
    return Setting(pair, "float32", "cpu", sizes, price_here(pair), 30, {}, {}, {})


def test_best_fixed_is_chosen_before_the_held_out_prompts_are_seen(tiny_pair: Pair) -> None:
    setting = setting_of(tiny_pair.id, AR, "B=2", "B=4", POLICY)
    speed = {AR: 10.0, "B=2": 30.0, "B=4": 20.0, POLICY: 40.0}
    measured = comparison_of({AR: 1.0, "B=2": 1.2, "B=4": 1.5, POLICY: 0.1}, speed)

    def chosen(taus: dict[int, float]) -> int:
        return evaluate_result.best_fixed_of(measured, setting, taus, "others")[0]

    assert chosen({2: 1.5, 4: 2.0}) == 4  # 1.25 and 1.33 against 1
    assert chosen({2: 1.5, 4: 1.7}) == 2
    assert chosen({2: 1.1, 4: 1.2, 8: 9.0}) == 1  # 8 was not measured
    assert evaluate_result.best_fixed_of(measured, setting, {2: 1.5}, "others")[1] == "others"
    assert evaluate_result.best_fixed_of(measured, setting, {}, "others") == (2, "these prompts")


def test_taus_known_beforehand_are_the_sweep_s_or_those_that_the_policy_keeps(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], policy_dir: Path, tiny_pair: Pair
) -> None:
    LearnedFrom(frozenset({"key"}), {0.0: {2: 1.5, 4: 2.0}, 1.0: {2: 1.1}}).write(policy_dir)
    plan = plan_of(config, prompts[1], {POLICY: policy_dir})
    assert evaluate_result.known_taus(plan, 0.0) == ({2: 1.5, 4: 2.0}, "the policy's training prompts")
    assert evaluate_result.known_taus(plan, 1.0)[0] == {2: 1.1}
    assert evaluate_result.known_taus(plan, 0.5)[0] == {}
    swept = plan._replace(sweep=Swept(tiny_pair.id, (2, 4), {2: 1.9}))
    assert evaluate_result.known_taus(swept, 0.0) == ({2: 1.9}, "the sweep's prompts")
    assert evaluate_result.known_taus(plan_of(config, prompts[1]), 0.0)[0] == {}


def test_taus_of_the_sweep_are_those_of_the_same_temperature(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    tiny_pair: Pair,
    swept_rows: list[SweepRow],
    metadata: Metadata,
    tmp_path: Path,
) -> None:
    texts = load_prompts(str(prompt_file(tmp_path / "hot.jsonl", [f"hot {i}?" for i in range(4)])))
    hot = sweep_prompts(
        tiny_pair, texts, CANDIDATES, method="decode", max_new_tokens=NUM_TOKENS, temperature=5.0
    ).rows
    assert Summary().add(hot).tau_curve[4] > Summary().add(swept_rows).tau_curve[4]
    write_rows(tmp_path / "cold" / "part.parquet", swept_rows, metadata)
    write_rows(tmp_path / "hot" / "part.parquet", hot, metadata)
    config = changed(config, sweep=(str(tmp_path / "cold"), str(tmp_path / "hot")))
    for temperature, rows in ((0.0, swept_rows), (5.0, hot), (1.0, [*swept_rows, *hot])):
        swept = evaluate_inputs._read_sweeps(changed(config, temperature=temperature), prompts[1])
        assert swept == Swept(tiny_pair.id, CANDIDATES, Summary().add(rows).tau_curve)


# The report


def saved(
    config: EvaluateConfig, speeds: Mapping[str, Sequence[float]], pair: PairId, sets: str, **plan: object
) -> str:
    """The table of methods with these speeds on the groups, which are of the `sets`, one letter each."""
    texts = [Prompt(name, (Message("user", f"{name} {i}"),)) for i, name in enumerate(sets)]
    runs = [one(method, i, by_group[i]) for i in range(len(sets)) for method, by_group in speeds.items()]
    setting = setting_of(pair, *speeds)
    evaluate_result.save(config, plan_of(config, texts, **plan), setting, runs)  # type: ignore[arg-type]
    return (config.output / "table.md").read_text()


def test_the_table_says_what_the_policy_is_worth(config: EvaluateConfig, tiny_pair: Pair) -> None:
    speeds = {AR: 10, "B=2": 20, RANDOM: 15, POLICY: 24, CHAMPION: 22, ORACLE: 30}
    table = saved(config, {m: [s] * 3 for m, s in speeds.items()}, tiny_pair.id, "aaa", champion=4)
    caption, conclusions = table.splitlines()[0], table.splitlines()[-5:]
    assert caption == (
        f"{tiny_pair.id.target} with {tiny_pair.id.draft}, float32 on cpu: 3 prompts, one at a time, once; "
        "12 tokens at most, temperature 0. In brackets: 95% intervals over prompts."
    )
    assert conclusions == [
        "Best fixed block size: 2, chosen on these prompts.",
        "Policy over best fixed: 1.200 of its tokens/s (1.200 to 1.200), 1.000 of its tau.",
        "Policy over champion version 4: 1.091 of its tokens/s (1.091 to 1.091).",
        "Oracle, one block size for each prompt, known in hindsight: 1.500 (1.500 to 1.500) of the best fixed "
        "tokens/s. The policy captures 40% of what that is above 1; the policy's regret is 20.0% of the oracle's.",
        "Best static way: B=2, each half of the prompts' chosen on the other half. policy over it: "
        "1.200 (1.200 to 1.200) of its tokens/s.",
    ]
    assert "by prompt set" not in table
    result = json.loads((config.output / "evaluation.json").read_text())
    assert result["table"] + "\n" == table
    assert result["by_set"].keys() == {"a"}
    assert (result["held_out"]["champion"], result["held_out"]["champion_ratio"]) == (4, pytest.approx(24 / 22))


@pytest.mark.parametrize("of_oracle", [[20, 20, 20], [18, 20, 40]])
def test_without_certain_headroom_there_is_nothing_to_capture(
    config: EvaluateConfig, tiny_pair: Pair, of_oracle: list[float]
) -> None:
    speeds = {AR: [10] * 3, "B=2": [20] * 3, POLICY: [19] * 3, ORACLE: of_oracle}
    table = saved(config, speeds, tiny_pair.id, "aaa")
    assert "That is not above 1 beyond its interval: there is nothing to capture; the policy's regret is" in table
    assert "champion" not in table


def test_a_policy_is_compared_with_the_untrained_choice(config: EvaluateConfig, tiny_pair: Pair) -> None:
    """Prompt by prompt, so that one which is slower everywhere alike does not widen the interval."""
    slow = [1.0, 0.5, 2.0]
    speeds = {AR: [10] * 3, "B=2": [20] * 3, UNTRAINED: [20 * s for s in slow], POLICY: [21 * s for s in slow]}
    table = saved(config, speeds, tiny_pair.id, "aaa")
    assert "Policy over the untrained choice: 1.050 of its tokens/s (1.050 to 1.050)." in table
    found = json.loads((config.output / "evaluation.json").read_text())["held_out"]
    names = ("untrained_ratio", "untrained_ratio_low", "untrained_ratio_high")
    assert [found[name] for name in names] == pytest.approx([1.05] * 3)
    del speeds[UNTRAINED]
    assert "untrained" not in saved(config, speeds, tiny_pair.id, "aaa")
    found = json.loads((config.output / "evaluation.json").read_text())["held_out"]
    assert [found[name] for name in names] == [0, 0, 0]


def test_a_champion_that_was_left_out_is_not_compared_with(config: EvaluateConfig, tiny_pair: Pair) -> None:
    speeds = {AR: [10, 10], "B=2": [20, 20], POLICY: [24, 24]}
    assert "champion" not in saved(config, speeds, tiny_pair.id, "aa", champion=4)
    assert json.loads((config.output / "evaluation.json").read_text())["held_out"]["champion"] == 0


def test_speeds_by_prompt_set(config: EvaluateConfig, tiny_pair: Pair) -> None:
    """A set of one group has no interval and no line; what has a size of its own has no column."""
    speeds = {AR: [10] * 6, "B=2": [20] * 6, MEANS: [30, 30, 20, 20, 20, 10], POLICY: [22] * 2 + [18] * 4}
    table = saved(config, speeds, tiny_pair.id, "aabbbc")
    lines = table.splitlines()
    start = lines.index("Speed over that of B=2, by prompt set:") + 2
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + 6]]
    assert rows[0] == ["prompts", MEANS, POLICY]
    assert rows[2] == ["a", "1.500 (1.500 to 1.500)", "1.100 (1.100 to 1.100)"]
    assert rows[3] == ["b", "1.000 (1.000 to 1.000)", "0.900 (0.900 to 0.900)"]
    assert rows[4][0] == "all"
    everywhere = (6 / 20) / (2 / 22 + 4 / 18)  # tokens over seconds in all, both
    assert rows[4][2].startswith(f"{everywhere:.3f} (0.8")
    assert rows[5] == [""]
    by_set = json.loads((config.output / "evaluation.json").read_text())["by_set"]
    assert list(by_set) == ["a", "b", "all"]
    assert by_set["a"]["B=2"]["value"] == 1


def test_the_control_tells_what_the_clock_is_worth(config: EvaluateConfig, tiny_pair: Pair) -> None:
    """It is compared with AR, whose work it does, and not with the best fixed block size."""
    speeds = {AR: [10] * 4, "B=2": [20] * 4, CONTROL: [10.2, 10.2, 9.9, 9.9], POLICY: [20] * 4}
    lines = saved(config, speeds, tiny_pair.id, "aabb").splitlines()
    everywhere = (4 / 10) / (2 / 10.2 + 2 / 9.9)
    (clock,) = [line for line in lines if line.startswith("Clock")]
    assert f"{CONTROL}, which is the same work by another engine, made {everywhere:.3f} (0.978 to" in clock
    assert "; by set 0.990 to 1.020." in clock
    start = lines.index("Speed over that of B=2 (AR again: over AR's), by prompt set:") + 2
    assert lines[start].split("|")[2].strip() == CONTROL
    assert lines[start + 2].split("|")[2].strip() == "1.020 (1.020 to 1.020)"
    wider = 1.02 ** float(scipy.stats.t.ppf(0.975, 1))  # no prompt differs from another, and two engines do by 2%
    assert lines[start + 2].split("|")[3].strip() == f"1.000 ({1 / wider:.3f} to {wider:.3f})"
    assert "Clock" not in saved(config, {AR: [10] * 2, "B=2": [20] * 2}, tiny_pair.id, "aa")
    alone = saved(config, {AR: [10] * 2, CONTROL: [9] * 2}, tiny_pair.id, "aa")
    assert "made 0.900 (0.900 to 0.900) of AR's tokens/s. The intervals" in alone


# Bad input: one line, before Ray, and before MLflow where the policy is not at fault


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(**_: object) -> None:
        raise AssertionError("started Ray")

    monkeypatch.setattr("jobs.evaluate.connect", started)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> None:
        raise AssertionError("opened a store")

    monkeypatch.setattr("jobs.evaluate.Registry.open", opened)


def refused(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says on stderr, which must be one line."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments.split()])
    with pytest.raises(SystemExit) as exited:
        main(EvaluateConfig, evaluate.run)
    error = capsys.readouterr().err
    assert exited.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not ray.is_initialized()
    return error


@pytest.mark.usefixtures("no_ray", "no_mlflow")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts nope", "unknown prompt set 'nope': choose one of demo, "),
        ("--prompts gone.jsonl", "prompt file not found: gone.jsonl"),
        ("--prompts demo --num-prompts 1", "1 prompts: intervals need at least two"),
        ("--prompts demo --pair nope", "unknown pair 'nope': named pairs are smollm2-135m, "),
        (
            "--prompts demo --target x --block-sizes 2 4",
            "target 'x' has no draft, block_sizes (2, 4) needs one: --draft",
        ),
        ("--prompts demo --target x --tree-sizes 3", "target 'x' has no draft, tree_sizes (3,) needs one: --draft"),
        ("--prompts demo --sweep nowhere", "nowhere: no such file"),
        ("--prompts demo --sweep sweep", "sweep sweep: made for target {target} with draft"),
        (
            "--prompts {overlap} --sweep sweep {pair}",
            "1 of 3 prompts are in sweep sweep and so not held out; the first: {swept}",
        ),
        ("--prompts demo --sweep sweep {pair} --seed 0", "seed 0: must be another than the sweep's 0"),
        ("--prompts demo --sweep sweep {pair} --seed -1 --repeats 2", "seed -1: must be another than the sweep's 0"),
        (
            "--prompts demo --sweep sweep {pair} --block-sizes 6 8",
            "(6, 8): none is a candidate of the sweep [2, 3, 4]",
        ),
        ("--prompts demo --block-sizes 1 2", "(1, 2): must be ascending and at least 2 (1 is AR"),
        ("--prompts demo --block-sizes 4 2", "(4, 2): must be ascending"),
        ("--prompts demo --block-sizes 2 2", "(2, 2): must be ascending"),
        ("--prompts demo --block-sizes 33", "(33,): must be at most 32"),
        (
            "--prompts demo --baselines random luck",
            "'luck': must be of control, random, means, verification, budget, untrained, lookup, switch, "
            "no-lookup, oracle",
        ),
        ("--prompts demo --tree-sizes 3 2", "(3, 2): must be ascending and 1 to 31"),
        ("--prompts demo --tree-sizes 2 2", "(2, 2): must be ascending and 1 to 31"),
        ("--prompts demo --tree-sizes 0 2", "(0, 2): must be ascending and 1 to 31"),
        ("--prompts demo --tree-sizes 4 32", "(4, 32): must be ascending and 1 to 31"),
        ("--prompts demo --max-new-tokens 1", "max_new_tokens: Input should be greater than or equal to 4"),
        ("--prompts demo --temperature nan", "temperature: Input should be a finite number"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str,
    message: str,
    tmp_path: Path,
    tiny_pair_dirs: tuple[Path, Path],
    swept_rows: list[SweepRow],
    metadata: Metadata,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft = tiny_pair_dirs
    write_rows(tmp_path / "sweep" / "part.parquet", swept_rows, metadata)
    overlap = prompt_file(tmp_path / "overlap.jsonl", [*QUESTIONS[:2], SWEPT[1]])
    given = arguments.format(overlap=overlap, pair=f"--target {target} --draft {draft}")
    row = next(row for row in swept_rows if row.prompt == SWEPT[1])
    first = f"{row.prompt_id} {row.prompt!r}"
    assert message.format(target=target, swept=first) in refused(given, monkeypatch, capsys)


@pytest.mark.usefixtures("no_ray", "no_mlflow")
def test_sweeps_are_of_one_pair(
    config: EvaluateConfig, tmp_path: Path, swept_rows: list[SweepRow], metadata: Metadata
) -> None:
    """Of one name, but of another revision."""
    other = dataclasses.replace(metadata, pair=metadata.pair._replace(draft_revision="another"))
    for name, of_sweep in (("one", metadata), ("two", other)):
        write_rows(tmp_path / name / "part.parquet", swept_rows, of_sweep)
    with pytest.raises(ValueError, match=r"of one pair wanted, these are of .*another"):
        read_inputs(changed(config, sweep=(str(tmp_path / "one"), str(tmp_path / "two"))))


def test_a_submitted_job_needs_an_absolute_output(config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(ValueError, match="output x: must be absolute in a submitted job"):
        evaluate.run(changed(config, output=Path("x")))


# With a registry


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new store; a copy of it costs nothing."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    Registry.open(f"sqlite:///{path}")
    return path


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return Registry.open()


def register(registry: Registry, directory: Path, pair: Pair) -> Version:
    with registry.log_run("train") as record:
        return registry.register_policy(directory, target=pair.id.target, run_id=record.id, tags=pair.id._asdict())


def command_for(config: EvaluateConfig, policy: object, *more: object) -> str:
    pair = f"--target {config.pair.target} --draft {config.pair.draft}"
    return " ".join(map(str, (pair, "--prompts", *config.prompts, "--policy", policy, *more)))


@pytest.mark.usefixtures("no_ray", "registry")
def test_prompts_that_a_policy_was_trained_on_are_refused(
    config: EvaluateConfig,
    policy_dir: Path,
    tiny_pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rival = write_policy(tmp_path / "rival", tiny_pair)
    LearnedFrom(frozenset({prompt_key("something else")})).write(policy_dir)
    LearnedFrom(frozenset({prompt_key(QUESTIONS[3]), prompt_key(QUESTIONS[5])})).write(rival)
    prompt = next(p for p in load_prompts(*config.prompts) if p.text in (QUESTIONS[3], QUESTIONS[5]))
    where = f"2 of 8 prompts are among those that policy {rival} was trained on"
    first = f"the first: {prompt_ids(prompt, 0, 0.0)[0]} {prompt.text!r}"
    for arguments in ((rival,), (policy_dir, "--rivals", rival)):
        assert f"{where}; {first}" in refused(command_for(config, *arguments), monkeypatch, capsys)


@pytest.mark.usefixtures("no_ray")
def test_policies_that_are_not_there_are_refused(
    config: EvaluateConfig,
    registry: Registry,
    tiny_pair: Pair,
    policy_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(policy: object, *more: object) -> str:
        return refused(command_for(config, policy, *more), monkeypatch, capsys)

    for policy in ("champion", "newest"):
        assert "not found" in said(policy)
        assert said(policy).endswith("Give the directory of a policy, or --policy none\n")
    assert "nowhere/policy.json: no such file" in said("nowhere")
    assert "gone/policy.json: no such file" in said(policy_dir, "--rivals", "gone")
    other = dataclasses.replace(tiny_pair, id=tiny_pair.id._replace(target="other"))
    assert "made for target other with draft" in said(write_policy(tmp_path / "other", other))
    register(registry, policy_dir, tiny_pair)
    assert "@champion" in said("champion")
    assert f"output {tmp_path / 'empty'}: no evaluation.json, nothing to log" in said(
        "none", "--relog", "--output", tmp_path / "empty"
    )


def test_the_champion_is_measured_beside_every_other_policy(
    config: EvaluateConfig, registry: Registry, policy_dir: Path, tiny_pair: Pair
) -> None:
    def found(policy: object, **changes: object) -> tuple[list[str], int | None, int | None]:
        policies, version, champion = find_policies(changed(config, policy=str(policy), **changes), registry)
        return list(policies), version and version.number, champion

    assert found("none") == ([], None, None)
    assert found(policy_dir) == ([POLICY], None, None)
    first, second = (register(registry, policy_dir, tiny_pair) for _ in range(2))
    assert found("newest") == ([POLICY], 2, None)
    registry.set_champion(first)
    assert found("newest") == ([POLICY, CHAMPION], 2, 1)
    assert found(policy_dir) == ([POLICY, CHAMPION], None, 1)
    assert found("champion") == ([POLICY], 1, None)
    assert found("newest", rivals=()) == ([POLICY], 2, None)
    rival = write_policy(policy_dir.parent / "rival", tiny_pair)
    assert found("newest", rivals=(str(rival), CHAMPION)) == ([POLICY, "rival", CHAMPION], 2, 1)
    for name in ("AR", "B=3", "tree 3", UNTRAINED):  # named like another method
        namesake = write_policy(policy_dir.parent / name, tiny_pair)
        assert found("newest", rivals=(str(namesake),)) == ([POLICY, str(namesake)], 2, None)
    registry.set_champion(second)
    assert found("newest") == ([POLICY], 2, None)


def test_a_rival_does_not_take_the_place_of_the_policy(
    config: EvaluateConfig, registry: Registry, policy_dir: Path, tiny_pair: Pair, tmp_path: Path
) -> None:
    """Directories of policies are called "policy" by default."""
    ours = write_policy(tmp_path / "ours", tiny_pair)
    policies, _, _ = find_policies(changed(config, policy=str(ours), rivals=(str(policy_dir),)), registry)
    assert policies[POLICY] == ours
    assert policy_dir in policies.values()


def test_a_champion_of_another_draft_is_left_out(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    registry: Registry,
    policy_dir: Path,
    tiny_pair: Pair,
    tmp_path: Path,
) -> None:
    other = dataclasses.replace(tiny_pair, id=tiny_pair.id._replace(draft="another-draft"))
    registry.set_champion(register(registry, write_policy(tmp_path / "other", other), other))
    register(registry, policy_dir, tiny_pair)
    config = changed(config, policy="newest")
    policies, version, champion = find_policies(config, registry)
    setting = Watched(config, plan_of(config, prompts[1], policies, None, version, champion)).setting
    assert CHAMPION not in setting.block_sizes
    assert "another-draft" in setting.left_out[CHAMPION]


# Telling MLflow


@pytest.fixture
def measured(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> tuple[EvaluateConfig, Version]:
    """A finished evaluation of version 2, with version 1 as champion, of which MLflow knows nothing yet."""
    directories = [write_policy(tmp_path / str(size), tiny_pair, size) for size in (2, 3)]
    LearnedFrom(frozenset({prompt_key("something else")})).write(directories[1])
    champion, version = (register(registry, directory, tiny_pair) for directory in directories)
    registry.set_champion(champion)
    config = changed(config, policy="newest")
    policies, *numbers = find_policies(config, registry)
    plan = plan_of(config, prompts[1][:3], policies, None, *numbers)
    evaluator = Watched(config, plan)
    runs = list(measure_all(evaluator, evaluator.call, config, plan))
    evaluate_result.save(config, plan, evaluator.setting, runs)
    return config, version


def test_a_version_is_tagged_with_what_it_is_worth_beside_the_champion(
    measured: tuple[EvaluateConfig, Version], registry: Registry
) -> None:
    config, version = measured
    result = evaluate_result.log(config.output, registry)
    tagged = registry.version(version.name, version.number)
    assert tagged.held_out == result.held_out
    assert tagged.tags["heldout.run_id"] == result.run_id
    stored = json.loads((config.output / "runs.json").read_text())
    speed = {}
    for method in (POLICY, CHAMPION):
        totals = [run["totals"] for run in stored["runs"] if run["method"] == method]
        speed[method] = sum(t["num_tokens"] for t in totals) / sum(t["total_s"] for t in totals)
    figures = tagged.held_out
    assert figures is not None
    assert (figures.champion, figures.policy_speed) == (1, pytest.approx(speed[POLICY]))
    assert figures.champion_ratio == pytest.approx(speed[POLICY] / speed[CHAMPION])
    assert figures.champion_ratio_low <= figures.champion_ratio <= figures.champion_ratio_high
    assert figures.untrained_ratio_low < figures.untrained_ratio < figures.untrained_ratio_high
    assert [row.method for row in result.figures] == [
        *FIXED,
        CONTROL,
        RANDOM,
        MEANS,
        UNTRAINED,
        POLICY,
        CHAMPION,
        ORACLE,
        STATIC,
    ]
    assert f"Policy over champion version 1: {figures.champion_ratio:.3f} of its tokens/s" in result.table


def test_figures_of_prompts_that_may_have_been_swept_are_not_recorded_with_the_version(
    measured: tuple[EvaluateConfig, Version], registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    config, version = measured
    file = config.output / "evaluation.json"
    stored = json.loads(file.read_text())
    assert stored["setting"]["shown_held_out"]  # by the prompts that the policy remembers
    stored["setting"]["shown_held_out"] = False
    file.write_text(json.dumps(stored))
    result = evaluate_result.log(config.output, registry)
    assert result.held_out is not None
    assert registry.version(version.name, version.number).held_out is None
    assert f"not recorded with version {version.number}: --sweep must show" in capsys.readouterr().out
    assert result.best_fixed in SIZES


def test_a_store_that_is_lost_costs_no_result(
    measured: tuple[EvaluateConfig, Version], registry: Registry, empty_store: Path, tmp_path: Path
) -> None:
    config, version = measured
    whole = (tmp_path / "mlflow.db").read_bytes()
    (tmp_path / "mlflow.db").write_bytes(b"no database any more " * 1000)
    written = {path: path.read_bytes() for path in config.output.glob("*.*")}
    with pytest.raises(
        ValueError, match=f"MLflow store .*The results are in {config.output}; --relog logs"
    ) as caught:
        evaluate_result.log(config.output, registry)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in config.output.glob("*.*")} == written
    (tmp_path / "mlflow.db").write_bytes(whole)
    result = evaluate.run(changed(config, relog=True))
    again = Registry.open()
    assert again.version(version.name, version.number).held_out == result.held_out
    logged = again._client.get_run(result.run_id)
    assert logged.info.status == "FINISHED"
    assert logged.data.metrics["policy.tokens_per_s"] == pytest.approx(
        next(row for row in result.figures if row.method == POLICY).tokens_per_s.value
    )


def test_artifacts_that_cannot_be_stored_cost_no_result(
    measured: tuple[EvaluateConfig, Version], registry: Registry, tmp_path: Path
) -> None:
    config, version = measured
    shutil.rmtree(tmp_path / "mlartifacts")
    (tmp_path / "mlartifacts").write_text("no directory")
    with pytest.raises(ValueError, match=f"The results are in {config.output}; --relog logs them later"):
        evaluate_result.log(config.output, registry)
    (tmp_path / "mlartifacts").unlink()
    result = evaluate.run(changed(config, relog=True))
    assert registry.version(version.name, version.number).held_out == result.held_out


# The job as a user runs it


@pytest.mark.ray
def test_the_job_goes_on_after_a_kill_measures_records_and_tags(
    config: EvaluateConfig,
    tiny_pair: Pair,
    policy_dir: Path,
    swept_rows: list[SweepRow],
    metadata: Metadata,
    registry: Registry,
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "sweep" / "part.parquet", swept_rows, metadata)
    registry.set_champion(register(registry, write_policy(tmp_path / "first", tiny_pair, 2), tiny_pair))
    version = register(registry, policy_dir, tiny_pair)
    old = write_policy(tmp_path / "old", retrained(tiny_pair))
    odd = prompt_file(tmp_path / "odd.jsonl", ["", "long " * 300])
    command = [
        *("jobs/evaluate.py", "--prompts", *config.prompts, str(odd), "--policy", "newest"),
        *("--target", str(config.pair.target), "--draft", str(config.pair.draft), "--dtype", "float32"),
        *("--sweep", str(tmp_path / "sweep"), "--output", str(config.output), "--concurrency", "2", "--waves", "1"),
        *(
            "--max-new-tokens",
            str(NUM_TOKENS),
            "--block-sizes",
            "2",
            "4",
            "--tree-sizes",
            "3",
            "--temperature",
            "1",
            "--repeats",
            "2",
        ),
        *("--rivals", "champion", str(old)),
    ]
    environment = os.environ | {"MLFLOW_TRACKING_URI": registry.uri, "OMP_NUM_THREADS": "1"}

    def start() -> Job:
        return Job(command, cwd=ROOT, env=environment, output=tmp_path / "said")

    def lines() -> list[str]:
        """Whole lines of the file of groups that are done."""
        return "".join(path.read_text() for path in config.output.glob("runs-*.jsonl")).split("\n")[:-1]

    job = start()
    job.wait_for(lambda: len(lines()) >= 2)
    job.kill()
    assert f"evaluate: old is left out: policy made for target {tiny_pair.id.target}" in job.log
    before = lines()
    assert 2 <= len(before) < 8
    (file,) = config.output.glob("runs-*.jsonl")
    with file.open("a") as torn:
        torn.write(before[0][:50])

    job = start()
    assert job.wait(300) == 0, job.log
    output = job.log
    assert f"evaluate: going on after {len(before)} of 8 groups" in output
    assert "evaluate: 8/8 groups, 0 s left" in output
    assert f"{odd}: 1 of 2 rows set aside: line 1: empty prompt" in output
    assert "evaluate: 1 of 9 prompts set aside: 'long long" in output
    assert not file.exists()

    table = (config.output / "table.md").read_text()
    assert table in output
    limits = [answer_limit(prompt, 12) for prompt in load_prompts(config.prompts[0])]
    range_ = f"{min(limits)} to {max(limits)}"
    settings = f"8 held-out prompts, 2 at a time, 2 times; {range_} tokens at most, temperature 1"
    assert f", 1 threads: {settings}" in table
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    methods = [AR, "B=2", "B=4", "tree 3", CONTROL, RANDOM, MEANS, UNTRAINED, POLICY, CHAMPION, ORACLE]
    assert names[2:] == [*methods, STATIC]

    result = json.loads((config.output / "evaluation.json").read_text())
    assert [row["method"] for row in result["figures"]] == [*methods, STATIC]
    assert {row["share_equal"] for row in result["figures"]} == {1.0}
    groups = [(repeat, number) for repeat in range(2) for number in range(4)]
    every = [(repeat, 2 * number + i, m) for repeat, number in groups for m in methods for i in range(2)]
    measured = json.loads((config.output / "runs.json").read_text())
    runs = measured["runs"]
    assert [(run["repeat"], run["prompt"], run["method"]) for run in runs] == every
    assert runs[: 2 * len(methods) * len(before)] == [run for line in before for run in json.loads(line)["runs"]]
    assert sorted(prompt["text"] for prompt in measured["prompts"]) == QUESTIONS
    assert result["best_fixed"]["chosen_on"] == "the sweep's prompts"
    assert result["policy_version"]["number"] == version.number
    plain, policy = result["figures"][0], result["figures"][methods.index(POLICY)]
    assert (plain["tau"]["value"], plain["mean_block_size"]) == (1.0, 1.0)
    totals = [run["totals"] for run in runs if run["method"] == POLICY]
    speed = sum(t["num_tokens"] for t in totals) / sum(t["total_s"] for t in totals)
    assert policy["tokens_per_s"]["value"] == pytest.approx(speed)

    tagged = registry.version(model_name(tiny_pair.id.target), version.number)
    assert tagged.held_out is not None
    assert tagged.held_out.policy_speed == pytest.approx(speed)
    assert tagged.held_out.speed_ratio_low <= tagged.held_out.speed_ratio_high
    assert tagged.held_out.champion == 1
    logged = registry._client.get_run(tagged.tags["heldout.run_id"])
    assert logged.data.metrics["policy.tokens_per_s"] == pytest.approx(speed)
    assert logged.data.metrics["B2.tau"] == pytest.approx(result["figures"][1]["tau"]["value"])
    assert logged.data.params["concurrency"] == "2"
    artifacts = {item.path for item in registry._client.list_artifacts(tagged.tags["heldout.run_id"])}
    assert artifacts == {"evaluation.json", "runs.json", "table.json", "table.md"}
