"""Evaluation: what is timed, that every method really decodes, what is refused, and the job as a user runs it."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from blockpilot.engine import Engine, Prefill, Request, generate
from blockpilot.measure import Measured, decode_group
from blockpilot.pairs import Pair
from blockpilot.policy import CandidateSet, ClassPolicy, PolicyInfo, ProbsMLP, save_policy
from blockpilot.prompts import Prompt, load_prompts
from blockpilot.records import MIN_PROB, Metadata, SweepRow, write_rows
from blockpilot.report import Comparison, Run, Totals
from blockpilot.sweep import decode
from blockpilot.verify import Sampling
from jobs import evaluate
from jobs.config import PairConfig, main
from jobs.evaluate import AR, POLICY, EvaluateConfig, Evaluator, Plan, Setting, Swept, default_block_sizes
from jobs.registry import Registry, model_name

ROOT = Path(__file__).parent.parent
QUESTIONS = [f"question {i}?" for i in range(8)]
SWEPT = [f"swept {i}?" for i in range(4)]
CANDIDATES = (2, 3, 4)
NUM_TOKENS = 12


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
    return decode(tiny_pair, load_prompts(str(path)), CANDIDATES, max_new_tokens=NUM_TOKENS).rows


@pytest.fixture
def metadata(tiny_pair: Pair) -> Metadata:
    config = {"seed": 0}
    return Metadata(config, tiny_pair.id, "float32", tiny_pair.vocab_size, 4, list(CANDIDATES), {}, "unknown")


def policy_for(pair: Pair) -> ClassPolicy:
    """A network that always chooses 3; without a policy the engine would take the trained size, 4."""
    network = ProbsMLP(torch.arange(pair.vocab_size), pair.vocab_size, len(CANDIDATES), 16)
    torch.nn.init.zeros_(network.head.weight)
    network.head.bias.data = torch.tensor([0.0, 1.0, 0.0])
    return ClassPolicy(PolicyInfo(pair.id, pair.vocab_size, CandidateSet(CANDIDATES), MIN_PROB), network)


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path], prompts: tuple[Path, list[Prompt]], tmp_path: Path) -> EvaluateConfig:
    target, draft = tiny_pair_dirs
    return EvaluateConfig(
        pair=PairConfig(target=str(target), draft=str(draft)),
        prompts=(str(prompts[0]),),
        policy="none",
        max_new_tokens=NUM_TOKENS,
        output=tmp_path / "out",
    )


# Timing


def requests(pair: Pair, texts: list[Prompt], block_size: int | None, temperature: float = 0.0) -> list[Request]:
    stops = pair.stop_token_ids
    sampling = Sampling(temperature=temperature, seed=5)
    return [Request(p.encode(pair.tokenizer), NUM_TOKENS, sampling, block_size, stops) for p in texts]


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_together", [1, 3])
def test_sums_are_those_of_single_runs(
    tiny_pair: Pair, prompts: tuple[Path, list[Prompt]], block_size: int, num_together: int
) -> None:
    texts = prompts[1][:num_together]
    engine = Engine(tiny_pair, num_slots=num_together, max_length=256)
    started = time.perf_counter()
    measured = decode_group(engine, requests(tiny_pair, texts, block_size, temperature=1.0))
    took = time.perf_counter() - started
    alone = [
        list(
            generate(
                tiny_pair,
                prompt.encode(tiny_pair.tokenizer),
                block_size=block_size,
                max_new_tokens=NUM_TOKENS,
                temperature=1.0,
                seed=5,
            )
        )
        for prompt in texts
    ]
    verified = [step for steps in alone for step in steps if step.block_size]
    totals = measured.totals(reference=measured.outputs)
    assert measured.outputs == [tuple(t for step in steps for t in step.tokens) for steps in alone]
    assert totals.num_verified == len(verified)
    assert totals.num_emitted == sum(len(step.tokens) for step in verified)
    assert totals.num_tokens == totals.num_emitted + num_together
    assert (totals.num_chosen, totals.sum_chosen) == (num_together, num_together * block_size)
    assert totals.num_later_steps == max(len(steps) for steps in alone) - 2  # a step prefills and verifies, too
    assert totals.num_later_tokens < totals.num_tokens
    assert 0.5 * took < totals.total_s <= took
    assert totals.later_s < totals.total_s


def test_prefill_and_policy_are_inside_the_time_end_to_end(
    tiny_pair: Pair, prompts: tuple[Path, list[Prompt]]
) -> None:
    def slow(prefill: Prefill) -> int:
        time.sleep(0.2)
        return 3

    engine = Engine(tiny_pair, num_slots=2, max_length=256, policy=slow)
    measured = decode_group(engine, requests(tiny_pair, prompts[1][:2], None))
    totals = measured.totals(reference=measured.outputs)
    assert measured.step_s[0] >= 0.4
    assert totals.total_s == pytest.approx(measured.step_s[0] + totals.later_s)
    assert totals.sum_chosen == 6


def test_equal_texts_are_counted_whole() -> None:
    measured = Measured([(1, 2), (3,), ()], [[2], [], []], [1.0], [3])
    assert measured.totals([(1, 2), (3,), ()]).num_equal == 3
    assert measured.totals([(1, 2, 3), (3,), (1,)]).num_equal == 1
    with pytest.raises(ValueError, match="shorter"):
        measured.totals([(1, 2)])


# The actor, as the plain class it is


def plan_of(texts: list[Prompt], policy: Path | None = None, sweep: Swept | None = None) -> Plan:
    return Plan(tuple(texts), sweep, policy, None)


@pytest.fixture
def policy_dir(tiny_pair: Pair, tmp_path: Path) -> Path:
    save_policy(policy_for(tiny_pair), tmp_path / "policy")
    return tmp_path / "policy"


@pytest.mark.parametrize(("concurrency", "temperature"), [(1, 0.0), (3, 1.0)])
def test_all_methods_decode_the_same_text_in_an_order_that_rotates(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    policy_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
    temperature: float,
) -> None:
    """In float32 the block size changes the speed only. The last of the groups of 3 has 2 prompts."""
    settings = {"concurrency": concurrency, "temperature": temperature, "repeats": 2}
    evaluator = Evaluator(config.model_copy(update=settings), plan_of(prompts[1], policy_dir), num_threads=1)
    setting = evaluator.load()
    methods = [AR, "B=2", "B=3", "B=4", POLICY]
    assert list(setting.methods) == methods
    decoded: list[int | None] = []

    def spy(engine: Engine, group: list[Request]) -> Measured:
        decoded.append(group[0].block_size)
        return decode_group(engine, group)

    monkeypatch.setattr(evaluate, "decode_group", spy)
    num_groups = -(-len(QUESTIONS) // concurrency)
    places = [(repeat, group) for repeat in range(2) for group in range(num_groups)]
    runs = [run for place in places for run in evaluator.measure(*place)]
    orders = [decoded[i : i + len(methods)] for i in range(0, len(decoded), len(methods))]
    sizes = [1, 2, 3, 4, None]
    assert orders == [sizes[(r + g) % 5 :] + sizes[: (r + g) % 5] for r, g in places]
    assert [(run.repeat, run.group) for run in runs] == [place for place in places for _ in methods]
    assert all(run.totals.num_equal == run.totals.num_requests for run in runs)
    assert sum(run.totals.num_requests for run in runs if run.method == AR) == 2 * len(QUESTIONS)
    assert {run.totals.sum_chosen / run.totals.num_chosen for run in runs if run.method == POLICY} == {3}


def test_repeats_draw_new_texts_only_when_sampling(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: dict[float, list[list[tuple[int, ...]]]] = {}
    for temperature in (0.0, 1.0):
        evaluator = Evaluator(config.model_copy(update={"temperature": temperature}), plan_of(prompts[1]), 1)
        evaluator.load()
        for repeat in range(2):
            measured = decode_group(evaluator._engine, evaluator._requests(prompts[1][:1], "B=2", repeat, NUM_TOKENS))
            outputs.setdefault(temperature, []).append(measured.outputs)
    assert outputs[0.0][0] == outputs[0.0][1]
    assert outputs[1.0][0] != outputs[1.0][1]


def test_a_prompt_longer_than_the_context_is_named(config: EvaluateConfig, tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "long.jsonl", ["short?", "long " * 300])
    evaluator = Evaluator(config, plan_of(load_prompts(str(path))), num_threads=1)
    with pytest.raises(ValueError, match=r"prompt 'long long .*' of long: prompt of 15\d\d tokens: at most 1023"):
        evaluator.load()


def test_a_policy_or_sweep_of_other_weights_is_refused(
    config: EvaluateConfig, prompts: tuple[Path, list[Prompt]], tiny_pair: Pair, tmp_path: Path
) -> None:
    retrained = dataclasses.replace(tiny_pair, id=tiny_pair.id._replace(draft_revision="other"))
    save_policy(policy_for(retrained), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"policy made for .*@other .*; this pair is"):
        Evaluator(config, plan_of(prompts[1], tmp_path / "policy"), num_threads=1).load()
    swept = Swept(retrained.id, CANDIDATES, {})
    with pytest.raises(ValueError, match=r"made for .*draft_revision='other'.*; this pair is"):
        Evaluator(config, plan_of(prompts[1], sweep=swept), num_threads=1).load()


def test_default_block_sizes() -> None:
    assert default_block_sizes(8, ()) == (2, 4, 6, 8)
    assert default_block_sizes(16, (1, 14, 15, 16, 17, 18)) == (4, 8, 12, 14, 15, 16, 17, 18)
    assert default_block_sizes(4, ()) == (2, 3, 4)


# The best fixed block size


def comparison_of(step_s: dict[str, float], tokens_per_s: dict[str, float]) -> Comparison:
    """Methods with these figures, the same on two groups."""
    runs = []
    for method, seconds in step_s.items():
        later = {"num_later_tokens": 8, "num_later_steps": 10, "later_s": 10 * seconds}
        counts = {"num_verified": 10, "num_emitted": 20, "num_chosen": 1, "sum_chosen": 2, "num_equal": 1}
        total_s = 100 / tokens_per_s[method]
        totals = Totals(num_requests=1, num_tokens=100, total_s=total_s, **later, **counts)  # type: ignore[arg-type]
        runs += [Run(method, 0, 0, totals), Run(method, 1, 0, totals)]
    return Comparison(runs)


def test_best_fixed_is_chosen_before_the_held_out_prompts_are_seen(tiny_pair: Pair) -> None:
    methods: dict[str, int | None] = {AR: 1, "B=2": 2, "B=4": 4, POLICY: None}
    setting = Setting(tiny_pair.id, "float32", "cpu", 1, methods)
    speed = {AR: 10.0, "B=2": 30.0, "B=4": 20.0, POLICY: 40.0}
    measured = comparison_of({AR: 1.0, "B=2": 1.2, "B=4": 1.5, POLICY: 0.1}, speed)

    def swept(taus: dict[int, float]) -> Swept:
        return Swept(tiny_pair.id, (2, 4), taus)

    def chosen(taus: dict[int, float]) -> int:
        return evaluate._best_fixed(measured, setting, swept(taus))[0]

    assert chosen({2: 1.5, 4: 2.0}) == 4  # 1.25 and 1.33 against 1
    assert chosen({2: 1.5, 4: 1.7}) == 2
    assert chosen({2: 1.1, 4: 1.2, 8: 9.0}) == 1  # 8 was not measured
    assert evaluate._best_fixed(measured, setting, swept({2: 1.5}))[1] == "the sweep's prompts"
    assert evaluate._best_fixed(measured, setting, None) == (2, "these prompts")


# Bad input: one line, before Ray, and before MLflow where the policy is not at fault


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(**_: object) -> None:
        raise AssertionError("started Ray or MLflow")

    monkeypatch.setattr("jobs.evaluate.connect", started)
    monkeypatch.setattr("jobs.evaluate.Registry.open", started)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts nope", "unknown prompt set 'nope': choose one of demo, "),
        ("--prompts gone.jsonl", "prompt file not found: gone.jsonl"),
        ("--prompts demo --num-prompts 1", "1 prompts 1 at a time: intervals need at least two groups"),
        ("--prompts demo --num-prompts 8 --concurrency 8", "8 prompts 8 at a time"),
        ("--prompts demo --pair nope", "unknown pair 'nope': named pairs are smollm2-135m, "),
        ("--prompts demo --target x", "target 'x' and draft None: both are needed"),
        ("--prompts demo --sweep nowhere", "nowhere: no such file"),
        ("--prompts demo --sweep sweep", "sweep sweep: made for target {target} with draft"),
        (
            "--prompts {overlap} --sweep sweep {pair}",
            "1 of 3 prompts are in sweep sweep and so not held out; the first",
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
        ("--prompts demo --max-new-tokens 1", "max_new_tokens: Input should be greater than or equal to 2"),
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
    given = arguments.format(overlap=overlap, pair=f"--target {target} --draft {draft}").split()
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *given])
    with pytest.raises(SystemExit) as exited:
        main(EvaluateConfig, evaluate.run)
    error = capsys.readouterr().err
    assert exited.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message.format(target=target) in error
    assert not ray.is_initialized()


def test_a_submitted_job_needs_an_absolute_output(config: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(ValueError, match="output x: must be absolute in a submitted job"):
        evaluate.run(config.model_copy(update={"output": Path("x")}))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("store")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.chdir(folder)
        yield Registry.open()


def test_policies_that_are_not_there_are_refused(
    config: EvaluateConfig, registry: Registry, tiny_pair: Pair, tmp_path: Path
) -> None:
    def refused(policy: str) -> str:
        with pytest.raises(ValueError, match="policy") as caught:
            evaluate.find_policy(config.model_copy(update={"policy": policy}), registry)
        return str(caught.value)

    for policy in ("champion", "newest"):
        assert "not found" in refused(policy)
        assert refused(policy).endswith("Give the directory of a policy, or --policy none")
    assert "nowhere/policy.json: no such file" in refused("nowhere")
    other = dataclasses.replace(tiny_pair, id=tiny_pair.id._replace(target="other"))
    save_policy(policy_for(other), tmp_path / "other")
    assert "made for target other with draft" in refused(str(tmp_path / "other"))


# The job as a user runs it


@pytest.mark.ray
def test_the_job_measures_records_and_tags(
    config: EvaluateConfig,
    tiny_pair: Pair,
    policy_dir: Path,
    swept_rows: list[SweepRow],
    metadata: Metadata,
    registry: Registry,
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "sweep" / "part.parquet", swept_rows, metadata)
    with registry.log_run("train") as record:
        target = tiny_pair.id.target
        version = registry.register_policy(policy_dir, target=target, run_id=record.id, tags={})
    assert version.held_out is None
    command = [
        *(sys.executable, "jobs/evaluate.py", "--prompts", *config.prompts, "--policy", "newest"),
        *("--target", str(config.pair.target), "--draft", str(config.pair.draft)),
        *("--sweep", str(tmp_path / "sweep"), "--output", str(config.output), "--concurrency", "3"),
        *("--max-new-tokens", str(NUM_TOKENS), "--block-sizes", "2", "4", "--temperature", "1"),
    ]
    environment = os.environ | {"MLFLOW_TRACKING_URI": registry.uri, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "evaluate: 3/3 groups, 0 s left" in done.stdout

    table = (config.output / "table.md").read_text()
    assert table in done.stdout
    assert (
        "float32 on cpu, 1 thread: 8 held-out prompts, 3 at a time, once; 12 tokens at most, temperature 1" in table
    )
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert names[2:] == [AR, "B=2", "B=4", POLICY]

    result = json.loads((config.output / "evaluation.json").read_text())
    assert [row["method"] for row in result["figures"]] == names[2:]
    assert [row["share_equal"] for row in result["figures"]] == [1.0] * 4
    assert len(result["runs"]) == 3 * 4
    assert sorted(result["prompts"]) == QUESTIONS
    assert result["best_fixed"]["chosen_on"] == "the sweep's prompts"
    assert result["policy_version"] == version.number
    plain, policy = result["figures"][0], result["figures"][-1]
    assert (plain["tau"]["value"], plain["mean_block_size"]) == (1.0, 1.0)
    totals = [run["totals"] for run in result["runs"] if run["method"] == POLICY]
    speed = sum(t["num_tokens"] for t in totals) / sum(t["total_s"] for t in totals)
    assert policy["tokens_per_s"]["value"] == pytest.approx(speed)

    tagged = registry.version(model_name(tiny_pair.id.target), version.number)
    assert tagged.held_out is not None
    assert tagged.held_out.policy_speed == pytest.approx(speed)
    assert tagged.held_out.speed_ratio_low <= tagged.held_out.speed_ratio_high
    logged = registry._client.get_run(tagged.tags["heldout.run_id"])
    assert logged.data.metrics["policy.tokens_per_s"] == pytest.approx(speed)
    assert logged.data.metrics["B2.tau"] == pytest.approx(result["figures"][1]["tau"]["value"])
    assert logged.data.params["concurrency"] == "3"
    artifacts = {item.path for item in registry._client.list_artifacts(tagged.tags["heldout.run_id"])}
    assert artifacts == {"evaluation.json", "table.json", "table.md"}


def test_figures_of_prompts_that_may_have_been_swept_are_not_recorded_with_the_version(
    config: EvaluateConfig,
    prompts: tuple[Path, list[Prompt]],
    tiny_pair: Pair,
    policy_dir: Path,
    registry: Registry,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with registry.log_run("train") as record:
        version = registry.register_policy(policy_dir, target=tiny_pair.id.target, run_id=record.id, tags={})
    plan = Plan(tuple(prompts[1]), None, policy_dir, version)
    evaluator = Evaluator(config, plan, num_threads=1)
    setting = evaluator.load()
    runs = [run for group in range(2) for run in evaluator.measure(0, group)]
    result = evaluate._report(config, plan, setting, runs, registry)
    assert result.held_out is not None
    assert registry.version(version.name, version.number).held_out is None
    assert f"not recorded with version {version.number}: --sweep must show" in capsys.readouterr().out
    assert result.best_fixed in (1, 2, 3, 4)
