"""Workflows: stages that fit together, and parts of the demo."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from blockpilot.pairs.loading import Pair
from blockpilot.pairs.table import NAMED_PAIRS
from blockpilot.prompts.files import load_prompts
from helpers.api import app_of, over_http, replica_of
from helpers.command_line import error_of
from jobs import serve
from jobs.common.config import PairConfig
from jobs.common.registry import model_name
from jobs.evaluation.result import EvaluateResult
from workflows import paper, smollm2_135m
from workflows.paper import PaperConfig
from workflows.pipeline import Pipeline, learn
from workflows.smollm2_135m import DemoConfig

HUB_PAIRS = tuple(paper.PAPER_PAIRS)


def all_pipelines(output: Path) -> Iterator[tuple[str, Pipeline]]:
    yield "smollm2-135m", smollm2_135m.pipeline(DemoConfig(output=output))
    for pair in HUB_PAIRS:
        yield pair, paper.pipeline(PaperConfig(pair=pair, output=output, temperature=1.0))


def test_a_pair_that_is_not_the_papers_is_refused_with_the_names_allowed() -> None:
    assert set(HUB_PAIRS) <= NAMED_PAIRS.keys()
    error = error_of(PaperConfig, paper.run, "--pair smollm2-135m")
    assert error == f"error: pair: must be one of {', '.join(HUB_PAIRS)} (got 'smollm2-135m')\n"


def test_a_registry_out_of_reach_is_known_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/nowhere/mlflow.db")
    with pytest.raises(ValueError, match=r"nowhere/mlflow\.db: no such directory"):
        learn(smollm2_135m.pipeline(DemoConfig(output=tmp_path / "demo")))
    assert not ray.is_initialized()
    assert not (tmp_path / "demo").exists()


def test_stages_fit_together(tmp_path: Path) -> None:
    """Each stage reads the output of the one before it, for one pair; all outputs are in one folder."""
    for name, stages in all_pipelines(tmp_path):
        names = [stage.pair.names() for stage in (stages.sweep, stages.evaluate, stages.serve)]
        assert names == [(name, None, None)] * 3
        assert stages.train.sweep == stages.evaluate.sweep == (stages.sweep.output,)
        assert stages.evaluate.policy == "newest"
        assert stages.promote.model == model_name(NAMED_PAIRS[name].target)
        assert stages.serve.policy == "auto"
        assert stages.sweep.temperature == stages.evaluate.temperature
        assert stages.sweep.seed != stages.evaluate.seed
        assert not set(stages.sweep.prompts) & set(stages.evaluate.prompts)
        outputs = [stages.sweep.output, stages.train.output, stages.evaluate.output, stages.serve.output]
        assert all(Path(output).is_relative_to(tmp_path) for output in outputs)
        assert len(set(outputs)) == 4
        # A sweep records what its policy learns from; the policy is measured together with the baseline it must beat.
        of_prompts = stages.train.fit.kind == "prompt"
        assert of_prompts or stages.sweep.method == "dense", name
        assert of_prompts or "untrained" in stages.evaluate.baselines, name
        assert stages.train.objective == "tau" or stages.sweep.price_rows, name


def test_hub_pairs_train_the_papers_policy_around_the_drafts_block_size(tmp_path: Path) -> None:
    """arXiv 2606.31315, section 4."""
    for pair in HUB_PAIRS:
        stages = paper.pipeline(PaperConfig(pair=pair, output=tmp_path))
        fit = stages.train.fit
        assert (fit.kind, fit.hidden, fit.epochs, fit.lr, fit.patience) == ("prompt", 2048, 100, 1e-5, None)
        assert (fit.anneal, fit.weight_decay) == (False, 0)  # Adam
        named = re.search(r"-b(\d+)@", NAMED_PAIRS[pair].draft)
        trained = int(named.group(1)) if named else {"llama31-8b": 10}.get(pair, 16)
        around = tuple(range(trained - 2, trained + 3))
        assert stages.sweep.candidates == ((1, *around) if pair == "qwen3-coder-30b-a3b" else around)


def test_the_papers_protocol_runs_where_it_is_told_to(tmp_path: Path) -> None:
    stages = paper.pipeline(PaperConfig(output=tmp_path, gpu="H200", num_gpus=3, temperature=1.0, num_prompts=5))
    assert (stages.sweep.resources.accelerator_type, stages.sweep.resources.num_actors) == ("H200", 3)
    assert stages.train.accelerator_type == stages.evaluate.accelerator_type == "H200"
    assert stages.serve.resources.accelerator_type == "H200"
    assert (stages.sweep.temperature, stages.evaluate.num_prompts) == (1.0, 5)
    assert {stage.pair.dtype for stage in (stages.sweep, stages.evaluate, stages.serve)} == {"bfloat16"}


# The demo


def test_the_demo_holds_prompts_out(tmp_path: Path) -> None:
    config = DemoConfig(output=tmp_path)
    smollm2_135m.split_prompts(config)
    stages = smollm2_135m.pipeline(config)
    train, held_out = (load_prompts(name) for stage in (stages.sweep, stages.evaluate) for name in stage.prompts)
    assert sorted(p.text for p in train + held_out) == sorted(p.text for p in load_prompts("demo"))
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert len(train) >= config.num_training_prompts
    assert len(held_out) >= config.num_prompts
    written = [(tmp_path / name).read_bytes() for name in ("train.jsonl", "held_out.jsonl")]
    smollm2_135m.split_prompts(config)
    assert [(tmp_path / name).read_bytes() for name in ("train.jsonl", "held_out.jsonl")] == written


def test_the_demo_measures_fast_and_serves_exactly(tmp_path: Path) -> None:
    stages = smollm2_135m.pipeline(DemoConfig(output=tmp_path, port=1234))
    dtypes = [stage.pair.dtype for stage in (stages.sweep, stages.evaluate, stages.serve)]
    assert dtypes == ["auto", "auto", "float32"]
    assert stages.serve.port == 1234


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--candidates 4 2", "candidates"),
        ("--prompts nope", "unknown prompt set 'nope'"),
        ("--pair nope", "unknown pair 'nope'"),
        ("--held-out 1", "held_out"),
    ],
)
def test_bad_input_ends_the_demo_at_once(arguments: str, message: str, tmp_path: Path) -> None:
    assert message in error_of(DemoConfig, smollm2_135m.run, f"--output {tmp_path} {arguments}")


@pytest.fixture
def url(tiny_pair: Pair) -> Iterator[str]:
    """The API over real HTTP, without Ray Serve."""
    with replica_of(tiny_pair, num_slots=2, max_length=256) as replica, over_http(app_of(replica)) as root:
        yield f"{root}/v1"


def test_the_answer_that_is_asked_for_is_the_targets_own(
    url: str, tiny_pair_dirs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tiny_pair_dirs
    pair = PairConfig(target=str(target), draft=str(draft), dtype="float32")
    answer = smollm2_135m.ask(url, "what?", 20)
    out = capsys.readouterr().out
    assert answer
    assert f"what? (block_size: auto)\n> {answer}\nusage: " in out
    assert "'acceptance_length'" in out
    assert smollm2_135m.ask(url, "what?", 20, 3) == answer
    assert "'block_size': 3" in capsys.readouterr().out
    assert smollm2_135m.plain_answer(pair, "what?", 20) == answer
    assert smollm2_135m.plain_answer(pair, "what else?", 20) != answer


def test_a_served_answer_that_is_not_the_targets_own_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The check at the end of the demo can fail."""
    monkeypatch.setattr(smollm2_135m, "learn", lambda stages: EvaluateResult([], 6, None, "the table", "run"))
    monkeypatch.setattr(serve, "start", lambda config: "url")
    monkeypatch.setattr(serve, "what_runs", lambda name: "policy none")
    monkeypatch.setattr(serve, "stop", lambda: None)
    monkeypatch.setattr(smollm2_135m, "ask", lambda *_: "served")
    monkeypatch.setattr(smollm2_135m, "plain_answer", lambda *_: "plain")
    with pytest.raises(
        RuntimeError, match="block size auto: 'served'; one token at a time the target writes 'plain'"
    ):
        smollm2_135m.run(DemoConfig(output=tmp_path))
