"""The study of policies: neither the draft nor a policy was trained on measured prompts."""

import functools
import math
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from blockpilot.policy.dataset import prompt_key
from blockpilot.policy.learned import PromptPolicy
from blockpilot.policy.store import load_policy
from blockpilot.prompts.files import load_prompts, split
from blockpilot.prompts.sets import read_set
from jobs.answers import AnswersConfig, load_counted
from jobs.common.learned_from import LearnedFrom
from jobs.common.registry import UNTRAINED
from jobs.evaluation.result import RESULT_FILE
from workflows import policy_study
from workflows.policy_study import (
    CODE_SETS,
    HELD_OUT_FROM_DRAFT,
    KEPT,
    NUM_PROMPTS,
    SEEN_BY_DRAFT,
    StudyConfig,
    compare,
    evaluations,
    finished,
    held_out_chitchat,
    policies,
    sweep_config,
    transfer_config,
    unseen,
)

MODEL_CARD = Path(__file__).parents[2] / "blockpilot" / "data" / "smollm2_135m_dflash_b8" / "README.md"
WHEELS = {"chitchat": "chitchat-dataset", "chatterbot": "chatterbot-corpus"}


@pytest.fixture(autouse=True)
def sets_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache of prompt sets, some of which take seconds to read."""
    monkeypatch.setattr("blockpilot.prompts.files.read_set", turns_of_set)


@functools.cache
def turns_of_set(name: str) -> list[tuple[str, ...]]:
    return list(read_set(name))


def skip_without(name: str) -> None:
    if name in WHEELS:
        try:
            metadata.distribution(WHEELS[name])
        except metadata.PackageNotFoundError:
            pytest.skip(f"{WHEELS[name]} is not installed")


@pytest.mark.parametrize("name", [*SEEN_BY_DRAFT, *HELD_OUT_FROM_DRAFT])
def test_training_prompts_are_new_to_the_draft(name: str) -> None:
    """The draft's prompts are NAME or NAME:COUNT of the model card (jobs/answers.py), without the held-out ones."""
    seen_as = f"{name}:{SEEN_BY_DRAFT[name]}" if name in SEEN_BY_DRAFT else name
    assert f" {seen_as} " in MODEL_CARD.read_text()
    skip_without(name)
    ours, seen = unseen(name, NUM_PROMPTS.get(name, 64)), load_counted(seen_as, AnswersConfig().seed)
    if name in HELD_OUT_FROM_DRAFT:
        seen, _ = split(seen, AnswersConfig().held_out, AnswersConfig().seed)
    assert len(ours) == NUM_PROMPTS.get(name, 64)
    assert not {prompt.text for prompt in ours} & {prompt.text for prompt in seen}


@pytest.mark.parametrize("name", sorted(NUM_PROMPTS.keys() - {*SEEN_BY_DRAFT, *HELD_OUT_FROM_DRAFT}))
def test_of_a_benchmark_other_prompts_are_measured(tmp_path: Path, name: str) -> None:
    try:
        ours = {prompt.text for prompt in unseen(name, NUM_PROMPTS[name])}
    except ValueError as error:
        pytest.skip(str(error))
    assert len(ours) == NUM_PROMPTS[name]
    config = StudyConfig(output=tmp_path)
    for measured in (evaluations(config)[0], transfer_config(config)):
        if name in measured.prompts:
            theirs = load_prompts(name, measured.num_prompts, measured.shuffle_seed)
            assert not ours & {prompt.text for prompt in theirs}


def test_conversations_that_are_measured_are_held_out_from_the_policy() -> None:
    skip_without("chitchat")
    assert len(held_out_chitchat()) >= StudyConfig().num_prompts
    assert "chitchat" not in NUM_PROMPTS


def test_configurations_fit_together(tmp_path: Path) -> None:
    config = StudyConfig(output=tmp_path)
    default, paper, no_code = policies(config).values()
    assert default.fit.kind == no_code.fit.kind == "step"
    assert (paper.fit.kind, paper.fit.hidden) == ("prompt", 512)
    assert no_code.leave_out == CODE_SETS
    assert default.sweep == tuple(sweep_config(config, temperature).output for temperature in (0.0, 1.0))
    measured = evaluations(config)
    settings = {(evaluation.temperature, evaluation.concurrency) for evaluation in measured}
    assert settings == {(t, n) for t in (0, 1) for n in (1, 4, 16)}
    assert len({evaluation.output for evaluation in [*measured, transfer_config(config)]}) == 7
    for evaluation in [*measured, transfer_config(config)]:
        assert evaluation.sweep == ()  # held-out prompts follow from the policies' files
        assert evaluation.seed != sweep_config(config, 0.0).seed
    assert paper.candidates is not None
    assert set(paper.candidates) <= set(sweep_config(config, 0.0).candidates or ())
    assert set(measured[0].block_sizes or ()) == set(paper.candidates) - {1}
    assert UNTRAINED in measured[0].baseline_methods
    for of_policy in (default, paper, no_code):
        of_policy.output.mkdir()
    first = evaluations(config)[0]
    assert Path(first.policy) == default.output
    assert [Path(place) for place in first.rivals] == [paper.output]
    assert Path(transfer_config(config).policy) == no_code.output


def test_evaluations_of_this_machine_go_before_those_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_study, "KEPT_EVALUATIONS", tmp_path / "kept")
    output = StudyConfig(output=tmp_path / "runs").evaluation(0.0, 4)
    assert finished(output) is None
    for folder in (tmp_path / "kept" / output.name, output):
        folder.mkdir(parents=True)
        assert finished(output) != folder  # started, not finished
        (folder / RESULT_FILE).touch()
        assert finished(output) == folder


def test_kept_evaluations_are_compared_where_none_were_measured(tmp_path: Path) -> None:
    table = compare(StudyConfig(output=tmp_path))
    first, _, *rows = table.splitlines()
    assert first.count("at a time") == 6
    assert {"B=2", "untrained", "policy"} <= {row.split("|")[1].strip() for row in rows}
    values = [float(cell) for cell in rows[0].split("|")[2:-1]]
    assert values[-1] == pytest.approx(math.prod(values[:-1]) ** (1 / 6), abs=0.01)
    assert (tmp_path / "speed_ups.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no evaluation is finished"):
        compare(StudyConfig(output=tmp_path, loads=(3,)))


@pytest.mark.parametrize("name", ["step", "class", "no-code"])
def test_policies_of_the_repository_are_those_of_the_study(tmp_path: Path, name: str) -> None:
    """Policies of the repository, used if none are trained here, did not learn from measured prompts."""
    config = StudyConfig(output=tmp_path)
    folder = Path(config.policy(name))
    assert folder.parent == KEPT
    policy, wanted = load_policy(folder), policies(config)[name]
    assert policy.info.kind == wanted.fit.kind
    assert policy.price is not None
    if isinstance(policy, PromptPolicy):
        assert policy.info.shape.hidden == wanted.fit.hidden
        assert policy.candidates.sizes == wanted.candidates
    else:  # weights of greedy and of sampled slots are trained
        assert np.abs(policy.weights).max(axis=1).min() > 0.1
    known = LearnedFrom.read(folder).prompts
    assert len(known) > 300
    try:
        names = ("gsm8k", "humaneval", "mt-bench", "mbpp")
        benchmarks = [prompt for benchmark in names for prompt in load_prompts(benchmark, config.num_prompts)]
        measured = [*held_out_chitchat(), *benchmarks]
    except ValueError as error:
        pytest.skip(str(error))
    assert not known & {prompt_key(prompt.text) for prompt in measured}
