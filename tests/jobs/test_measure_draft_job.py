"""Measuring a draft: the figures of the command are those of decoding, and bad input is refused before Ray."""

import json
import os
from pathlib import Path

import pytest
import torch

from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.engine.generate import generate
from blockpilot.evaluation.statistics import Interval
from blockpilot.pairs.loading import load_pair
from blockpilot.prompts.files import load_prompts, split
from helpers.eagle3 import random_eagle3
from helpers.processes import Job
from helpers.tiny import tiny_target
from jobs.common.config import ConfigError, PairConfig
from jobs.measure_draft import DraftWorker, MeasureDraftConfig, MeasureTask, TauFigure, prompts_of, run, tables

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> MeasureDraftConfig:
    prompts = tmp_path / "sums.txt"
    prompts.write_text("".join(f"what is {i} and {i}\n" for i in range(20)))
    target, draft = map(str, tiny_pair_dirs)
    return MeasureDraftConfig(
        pair=PairConfig(target=target, draft=draft, dtype="float32"),
        prompts=(str(prompts),),
        num_prompts=4,
        block_sizes=(2, 4),
        max_new_tokens=16,
        output=tmp_path / "measured",
    )


def test_figures_are_those_of_decoding(config: MeasureDraftConfig) -> None:
    task = MeasureTask("sums", tuple(load_prompts(config.prompts[0], 4)), 1.0)
    found = {m.block_size: m for m in DraftWorker(config).measure(task)}
    pair = load_pair(target=config.pair.target, draft=config.pair.draft, dtype="float32")
    for block_size in (2, 4):
        runs = [
            list(
                generate(
                    pair,
                    prompt.encode(pair.tokenizer),
                    block_size=block_size,
                    max_new_tokens=16,
                    temperature=1.0,
                    seed=config.seed + i,
                )
            )[1:]
            for i, prompt in enumerate(task.prompts)
        ]
        emitted, steps = sum(len(step.tokens) for run in runs for step in run), sum(map(len, runs))
        assert found[block_size].num_tokens == emitted
        # The last block of a request that reaches its limit is shorter there than here.
        assert found[block_size].tau.value == pytest.approx(emitted / steps, rel=0.05)


def test_an_eagle3_draft_is_measured_by_its_directory(
    config: MeasureDraftConfig, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """At the temperature at which a random draft is now and then right."""
    save_eagle3(random_eagle3(tiny_target().config, torch.arange(200)), tmp_path / "eagle", dtype=torch.float32)
    pair = config.pair.model_copy(update={"draft": str(tmp_path / "eagle")})
    worker = DraftWorker(config.model_copy(update={"pair": pair}))
    short, long = worker.measure(MeasureTask("sums", tuple(load_prompts(config.prompts[0], 4)), 6.0))
    assert 1 < short.tau.value < long.tau.value


@pytest.mark.ray
def test_the_command_writes_every_set_temperature_and_block_size(config: MeasureDraftConfig, tmp_path: Path) -> None:
    arguments = f"""--target {config.pair.target} --draft {config.pair.draft} --dtype float32 --num-prompts 4
        --prompts {config.prompts[0]} --block-sizes 2 4 --max-new-tokens 16 --output {config.output}"""
    command = [str(ROOT / "jobs" / "measure_draft.py"), *arguments.split()]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    job = Job(command, cwd=tmp_path, env=environment, output=tmp_path / "said")
    assert job.wait(200) == 0, job.log[-3000:]
    assert "tau at T=0" in job.log
    stored = json.loads((config.output / "draft.json").read_text())
    found = stored["measured"]
    assert [(row["temperature"], row["block_size"]) for row in found] == [(0, 2), (0, 4), (1, 2), (1, 4)]
    assert all(row["tau"]["low"] <= row["tau"]["value"] <= row["tau"]["high"] for row in found)
    assert stored["config"]["block_sizes"] == [2, 4]


def test_only_the_held_out_prompts_of_a_training_set(config: MeasureDraftConfig) -> None:
    held_out = config.model_copy(update={"held_out": 0.3})
    [name] = config.prompts
    assert set(prompts_of(held_out, name)) <= set(split(load_prompts(name), 0.3)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out": 1e-6}, "sums.txt': 0 held out, at least 2 are needed"),
        ({"prompts": ("nowhere",)}, "unknown prompt set 'nowhere'"),
        ({"pair": PairConfig(target="x")}, "target 'x' has no draft, jobs/measure_draft.py needs one"),
    ],
)
def test_bad_input_is_refused_before_ray_starts(
    change: dict[str, object], message: str, config: MeasureDraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.measure_draft.connect", lambda: pytest.fail("Ray started"))
    with pytest.raises(ValueError, match=message):
        run(config.model_copy(update=change))


def test_block_sizes_are_a_candidate_set() -> None:
    with pytest.raises(ConfigError, match="block_sizes"):
        MeasureDraftConfig(block_sizes=(4, 2))


def test_a_table_for_each_temperature_has_the_mean_of_the_sets() -> None:
    values = {("a", 0.0): 2.0, ("b", 0.0): 2.0, ("c", 0.0): 3.5, ("a", 1.0): 1.5}
    found = [TauFigure(name, t, 8, 64, 100, Interval(tau, tau, tau)) for (name, t), tau in values.items()]
    greedy, sampled = tables(found)
    assert [str(column.header) for column in greedy.columns] == ["B", "a (64)", "b (64)", "c (64)", "mean"]
    assert [list(column.cells) for column in greedy.columns][-1] == ["2.50"]
    assert [list(column.cells) for column in sampled.columns] == [["8"], ["1.50 (1.50-1.50)"], ["1.50"]]
