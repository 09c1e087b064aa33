"""Draft training job: the command trains a draft for a target; a killed worker changes nothing."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from blockpilot.draft_training.answers import Answer, AnswerSource, answer_source, write_answers
from blockpilot.draft_training.edges import EdgeFit, read_slots
from blockpilot.draft_training.features import (
    FeatureShard,
    FeatureSource,
    StoredCorpus,
    TargetFeatures,
    write_features,
)
from blockpilot.draft_training.loss import frequent_tokens
from blockpilot.draft_training.training import DraftFit, DraftFitSettings, TrainingFit
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import new_draft_config, save_draft
from blockpilot.pairs.loading import load_pair
from blockpilot.prompts.files import load_prompts
from helpers.processes import Job, descendants
from helpers.tiny import MASK_ID
from helpers.trainings import ROOT, environment
from jobs import answers
from jobs.common.config import ConfigError
from jobs.common.registry import EXPERIMENT, Registry
from jobs.train_draft import check_answers, run, write_shard_features
from jobs.training.draft import TrainDraftConfig, draft_loss, edge_loss, fresh_draft, mask_token_id

EAGLE3: dict[str, object] = {"kind": "eagle3", "draft_vocab_size": 100}
SMALL: dict[str, object] = {"draft_vocab_size": 100, "num_own_prompts": 0}
SELECTOR: dict[str, object] = {"selector_rank": 4, "selector_top_k": 6, "only_edges": True}
SELECTOR_WEIGHTS = "hidden_projection.weight", "predecessor_codebook", "successor_codebook"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.txt")


def write_prompts(path: Path) -> Path:
    path.write_text("".join(f"say the number {i}\n" for i in range(24)))
    return path


def config(target: Path, path: Path, **changes: object) -> TrainDraftConfig:
    values: dict[str, object] = {
        "target": str(target),
        "prompts": (str(path),),
        "held_out": 0.3,
        "mask_token": "<mask>",
        "answers": path.parent / "answers",
        "output": path.parent / "draft",
    }
    return TrainDraftConfig(**values | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token": "<nope>"}, "mask_token '<nope>': not in the vocabulary"),
        ({"target_layer_ids": (1, 6)}, "target_layer_ids 6: must be 0 to 5"),
        ({"prompts": ("nowhere",)}, "unknown prompt set 'nowhere'"),
        ({"prompts": ("demo:many",)}, "prompts 'demo:many': must be NAME or NAME:COUNT"),
        ({"held_out": 1e-9}, "24 in all leave none for training or held out"),
        ({"fit": DraftFitSettings(epochs=0)}, "epochs 0: must be at least 1"),
        ({"start": "nowhere"}, "draft nowhere: no config.json there"),
        ({"kind": "eagle3"}, "draft_vocab_size 16384: must be 1 to 260"),
        ({"draft_vocab_size": 261}, "draft_vocab_size 261: must be 8 to 260"),
        ({**EAGLE3, "target_layer_ids": (1, 2)}, "target_layer_ids [1, 2]: EAGLE-3 reads 3 layers"),
        ({**EAGLE3, "markov_rank": 4}, "markov_rank 4: of a DFlash draft; must be 0 for EAGLE-3"),
        ({"only_edges": True}, "only_edges: needs a markov_rank or a selector_rank above 0"),
        (
            SELECTOR | {"draft_vocab_size": 100},
            "draft_vocab_size 100: only_edges keeps the start's vocabulary",
        ),
        ({"only_edges": True, "selector_rank": 4}, "only_edges: start must be a draft's directory, not target"),
    ],
)
def test_bad_input_is_refused_before_ray_starts(
    change: dict[str, object],
    message: str,
    tiny_pair_dirs: tuple[Path, Path],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jobs.answers.connect", lambda **_: pytest.fail("Ray started"))
    with pytest.raises(ValueError, match=re.escape(message)):
        run(config(tiny_pair_dirs[0], prompts, **change))


def test_models_that_do_not_fit_are_refused(tiny_pair_dirs: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        ValueError, match="target family 'gpt2': supported are llama, mistral, ministral, qwen2, qwen3"
    ):
        run(config(tmp_path, prompts))
    target, start = AutoConfig.from_pretrained(tiny_pair_dirs[0]), tmp_path / "start"
    for extra, message in (
        (0, r"start .*: a draft of block size 4, 1 layers, .* the configuration is block size 8, 3"),
        (1, "draft does not fit target: vocabulary"),
    ):
        target.vocab_size += extra
        save_draft(DraftModel(new_draft_config(target, num_layers=1, block_size=4, mask_token_id=0)), start)
        with pytest.raises(ValueError, match=message):
            run(config(tiny_pair_dirs[0], prompts, start=str(start)))
    with pytest.raises(ConfigError, match=r"block_size: Input should be greater than or equal to 2 \(got 1\)"):
        config(tiny_pair_dirs[0], prompts, block_size=1)


def test_a_start_gets_the_parts_that_it_lacks(
    tiny_pair_dirs: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    """Causal mask and selector added to a start draft; its convolutions, vocabulary and weights are kept."""
    target = AutoConfig.from_pretrained(tiny_pair_dirs[0])
    convolutions = {"conv_kernel_size": 2, "conv_group_size": 8}
    shape: dict[str, Any] = {"num_layers": 1, "block_size": 4, "mask_token_id": MASK_ID}
    start = DraftModel(new_draft_config(target, **shape, **convolutions))
    start.vocabulary = torch.arange(20)
    save_draft(start, tmp_path / "start")
    same_shape = {"num_layers": 1, "block_size": 4, "start": str(tmp_path / "start")}
    plain_draft = fresh_draft(config(tiny_pair_dirs[0], prompts, **same_shape))
    extended_draft = fresh_draft(
        config(tiny_pair_dirs[0], prompts, **same_shape, causal=True, selector_rank=4, selector_top_k=6)
    )
    assert (plain_draft.options.causal, plain_draft.options.selector_rank) == (None, 0)
    assert (extended_draft.options.causal, extended_draft.options.selector_rank) == (True, 4)
    for draft in (plain_draft, extended_draft):
        assert draft.options.conv_kernel_size == 2
        assert draft.vocabulary.tolist() == list(range(20))
        state = draft.state_dict()
        assert all(state[name].equal(value.bfloat16().float()) for name, value in start.state_dict().items())


def test_held_out_prompts_are_never_trained_on(tiny_pair_dirs: tuple[Path, Path], prompts: Path) -> None:
    """Disjoint prompts for training and held out; prompts that differ only by case and punctuation count as one."""
    with prompts.open("a") as lines:
        lines.write("Say the number 3!\n")
    plan = answers.plan(config(tiny_pair_dirs[0], prompts, prompts_per_shard=4), ())
    train, held_out = ([prompt.text for shard in side for prompt in shard.prompts] for side in plan)
    assert set(train).isdisjoint(held_out)
    assert len(train + held_out) == len({*train, *held_out}) == 24
    assert min(len(train), len(held_out)) >= 3


def test_answers_are_kept_when_only_later_turns_change(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "chat.jsonl"
    plans = []
    for follow_ups in ([], ["And why?"]):
        lines = ({"prompt": f"question {i}", "follow_ups": follow_ups} for i in range(40))
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        plan = answers.plan(config(tiny_pair_dirs[0], prompts), ())
        plans.append([shard.path.name for side in plan for shard in side])
    assert plans[0] == plans[1]


def test_more_prompt_sets_leave_the_shards_of_the_present_ones(
    tiny_pair_dirs: tuple[Path, Path], prompts: Path
) -> None:
    before = answers.plan(config(tiny_pair_dirs[0], prompts), ())
    after = answers.plan(config(tiny_pair_dirs[0], prompts, prompts=(str(prompts), "demo")), ())
    assert set(before.train) < set(after.train)
    assert set(before.held_out) < set(after.held_out)


@pytest.mark.parametrize(
    ("tokens", "revisions", "message"),
    [
        ([1, 2, 3, 4], ("a", "b"), "answers of several targets, revisions a, b"),
        ([1, 2, 3], ("a", "a"), "no answer of 2 tokens or more"),
        ([1, 2, 3, 4], ("a", "a"), "answers of revision a, the target is .* now"),
        ([1, 2, 3, 512], ("a", "a"), "mask_token '<mask>': in use in .*parquet"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(
    tokens: list[int], revisions: tuple[str, str], message: str, tiny_pair_dirs: tuple[Path, Path], prompts: Path
) -> None:
    training = config(tiny_pair_dirs[0], prompts)
    plan = answers.plan(training, ())
    mask = mask_token_id(training)
    for side, revision in zip(plan, revisions, strict=True):
        for shard in side:
            shard.path.parent.mkdir(parents=True)
            answer = Answer("test", [mask if token == 512 else token for token in tokens], 2, 0.0, 0)
            write_answers(shard.path, [answer], AnswerSource("tiny", revision))
    with pytest.raises(ValueError, match=message):
        check_answers(training, plan)


def test_features_of_another_revision_are_refused(tiny_pair_dirs: tuple[Path, Path], prompts: Path) -> None:
    training = config(tiny_pair_dirs[0], prompts, num_layers=2, target_layer_ids=(1, 3))
    plan = answers.plan(training, ())
    for side in plan:
        for shard in side:
            features = training.answers / "features-1-3" / side[0].path.parent.name / f"{shard.path.stem}.safetensors"
            for path in (shard.path, features):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_answers(shard.path, [Answer("test", [1, 2, 3, 4], 2, 0.0, 0)], AnswerSource("tiny", "a"))
            write_features(
                features, TargetFeatures(torch.zeros(4, 96), torch.zeros(4, 48)), FeatureSource("b", (1, 3))
            )
    with pytest.raises(ValueError, match=r"target_revision='b'.*expected revision a and layers"):
        write_shard_features(training, plan)


@pytest.fixture(scope="module")
def shared(tiny_pair_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a target that never samples the mask token, prompts, and the answers that trainings share."""
    folder = tmp_path_factory.mktemp("shared")
    target_that_never_writes_masks(tiny_pair_dirs[0], folder / "target")
    write_prompts(folder / "prompts.txt")
    return folder


def small_training(shared: Path, output: Path, **changes: object) -> TrainDraftConfig:
    sizes: dict[str, object] = {
        **{"prompts_per_shard": 8, "num_own_prompts": 24, "temperatures": (0.0, 0.2), "max_new_tokens": 24},
        **{"num_layers": 2, "block_size": 4, "checkpoint_every": 16},
        "fit": DraftFitSettings(epochs=10, batch_size=2, num_sampled=64, autocast=False),
    }
    return config(shared / "target", shared / "prompts.txt", output=output, **sizes | changes)


@pytest.mark.ray
def test_a_killed_worker_changes_nothing(shared: Path, registry: Registry, tmp_path: Path) -> None:
    """Draft of the command with a killed training worker, equal to that of plain `DraftFit` on the same answers."""
    # Ray Train's workers have another working directory than the driver.
    target = os.path.relpath(shared / "target", tmp_path)
    training = small_training(shared, tmp_path / "draft", answers=tmp_path / "answers", **SMALL)
    training = training.model_copy(update={"target": target})
    command: list[object] = [ROOT / "jobs" / "train_draft.py"]
    command += ["--epochs", "10", "--batch-size", "2", "--num-sampled", "64", "--no-autocast"]
    for name in training.model_fields_set - {"fit"}:
        value = getattr(training, name)
        command += [f"--{name.replace('_', '-')}", *(value if isinstance(value, tuple) else (value,))]
    job = Job(command, cwd=tmp_path, env=environment(), output=tmp_path / "log")
    try:
        job.wait_for(lambda: list(training.output.glob("train/*/checkpoint_*/state.pt")))
        pid, *_ = descendants(job.pid, "ray::RayTrainWorker")
        os.kill(pid, signal.SIGKILL)
        assert job.wait(200) == 0, job.log[-3000:]
    finally:
        job.kill()
    _, draft = check_trained(training, registry)
    assert draft.vocabulary.shape == (100,)
    assert re.search(r"tau \d\.\d+ at T=0", job.log)


@pytest.mark.usefixtures("in_one_process")
def test_other_drafts_are_those_of_a_plain_fit(
    shared: Path, tiny_pair_dirs: tuple[Path, Path], registry: Registry, tmp_path: Path
) -> None:
    """EAGLE-3 draft, and a selector alone, whose training leaves all other weights of the draft unchanged."""
    training = small_training(shared, tmp_path / "eagle3", **EAGLE3)
    run(training)
    check_trained(training, registry)

    training = small_training(shared, tmp_path / "selector", start=str(tiny_pair_dirs[1]), **SELECTOR)
    run(training)
    trained, draft = check_trained(training, registry, num_runs=2)
    assert draft.vocabulary is None
    start_weights = load_file(tiny_pair_dirs[1] / "model.safetensors")
    assert trained.keys() - start_weights.keys() == {f"candidate_selector.{name}" for name in SELECTOR_WEIGHTS}
    assert all(torch.equal(trained[name], weight.to(trained[name].dtype)) for name, weight in start_weights.items())
    assert trained["candidate_selector.successor_codebook"].any()


def check_trained(
    training: TrainDraftConfig, registry: Registry, num_runs: int = 1
) -> tuple[dict[str, torch.Tensor], Any]:
    """Compare a training with a plain fit on the same answers; returns its weights and its loaded draft."""
    trained = load_file(training.output / "draft" / "model.safetensors")
    expected, losses = plainly_trained(training)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], weight.to(trained[name].dtype)) for name, weight in expected.items())
    assert logged_losses(registry, num_runs) == pytest.approx(losses)
    pair = load_pair(target=training.target, draft=str(training.output / "draft"), dtype="float32")
    assert pair.block_size == 4
    return trained, pair.draft


def target_that_never_writes_masks(tiny: Path, directory: Path) -> Path:
    """Copy of the tiny target that never samples the mask token; it samples any other token sooner or later."""
    shutil.copytree(tiny, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][MASK_ID] *= 1e-3
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def plainly_trained(training: TrainDraftConfig) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """Weights and loss curve of the job's fit on its answers, in this process and without interruption."""
    shards = sorted((training.answers / "train").glob("*.parquet"))
    assert {answer_source(path).target for path in shards} == {training.target}
    # The job's order of shards is that of its plan, by prompt set and then by number.
    files = sorted((training.answers / "own-prompts").glob("*.jsonl")) if training.num_own_prompts else []
    own_prompts = [p for path in files if path.stat().st_size for p in load_prompts(str(path))]
    plan = answers.plan(training, own_prompts)
    fit: TrainingFit
    if training.only_edges:
        [folder] = training.answers.glob("slots-*")
        torch.manual_seed(training.seed)
        slots = read_slots([folder / "train" / f"{s.path.stem}.safetensors" for s in plan.train])
        fit = EdgeFit(edge_loss(training), slots, training.block_size, training.fit, seed=training.seed)
    else:
        folder = max(training.answers.glob("features-*"), key=lambda path: path.stat().st_mtime)  # the latest kind
        corpus = StoredCorpus(
            [FeatureShard(s.path, folder / "train" / f"{s.path.stem}.safetensors") for s in plan.train]
        )
        frequent = frequent_tokens([answer.tokens for answer in corpus.answers])
        fit = DraftFit(draft_loss(training, corpus.answers), corpus, frequent, training.fit, seed=training.seed)
    losses, total = {}, None
    for sums in fit.steps():
        total = sums if total is None else total + sums
        if fit.step % training.checkpoint_every == 0 or fit.step == fit.num_steps:
            losses[fit.step], total = total.metrics("train")["train_loss"], None
    assert len(losses) > 3
    if training.only_edges:
        start = load_file(Path(training.start) / "model.safetensors")
        return start | {f"candidate_selector.{n}": v for n, v in fit.state_dict()["edges"].items()}, losses
    draft: dict[str, torch.Tensor] = fit.state_dict()["draft"]
    return draft, losses


def logged_losses(registry: Registry, num_runs: int) -> dict[int, float]:
    """Training loss by step, each logged once, in the latest of `num_runs` runs of a registry."""
    client = registry._client
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == num_runs
    last = max(runs, key=lambda run: run.info.start_time)
    history = client.get_metric_history(last.info.run_id, "train_loss")
    assert len({metric.step for metric in history}) == len(history)
    return {metric.step: metric.value for metric in history}
