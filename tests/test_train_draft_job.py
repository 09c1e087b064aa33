"""The draft job: a target without a draft gets one, by the command a user types; a kill changes nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import descendants
from safetensors.torch import load_file

from blockpilot.draft_data import FeatureSource, read_answers, write_features
from blockpilot.draft_fit import BlockLoss, DraftFit, copy_target_layers, frequent_tokens
from blockpilot.pairs import load_pair, load_target
from jobs.config import ConfigError
from jobs.train_draft import TrainDraftConfig, fresh_draft, plan_shards, run, write_shards

ROOT = Path(__file__).parent.parent


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"say the number {i}\n" for i in range(24)))
    return path


def config(target: Path, path: Path, **changes: object) -> TrainDraftConfig:
    values: dict[str, object] = {
        "target": str(target),
        "prompts": (str(path),),
        "mask_token": "<mask>",
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
        ({"prompts_per_shard": 64}, "24 prompts in shards of 64: at least 2 shards"),
    ],
)
def test_bad_input_is_refused_before_ray_starts(
    change: dict[str, object],
    message: str,
    tiny_pair_dirs: tuple[Path, Path],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jobs.train_draft.connect", lambda **_: pytest.fail("Ray started"))
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        run(config(tiny_pair_dirs[0], prompts, **change))


def test_bad_values_are_refused_by_the_configuration(tiny_pair_dirs: tuple[Path, Path], prompts: Path) -> None:
    with pytest.raises(ConfigError, match=r"block_size: Input should be greater than or equal to 2 \(got 1\)"):
        config(tiny_pair_dirs[0], prompts, block_size=1)


def test_held_out_prompts_are_never_trained_on(tiny_pair_dirs: tuple[Path, Path], prompts: Path) -> None:
    train, held_out = plan_shards(config(tiny_pair_dirs[0], prompts, prompts_per_shard=4, held_out=0.34))
    texts = [{prompt.text for shard in side for prompt in shard.prompts} for side in (train, held_out)]
    assert texts[0].isdisjoint(texts[1])
    assert (len(texts[0]), len(texts[1])) == (16, 8)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([("a", (0, 5)), ("a", (0, 5))], r"features of target layers \(0, 5\), this draft reads \(1, 3\)"),
        ([("a", (1, 3)), ("b", (1, 3))], "features of several targets, a, b"),
    ],
)
def test_features_of_other_layers_or_targets_are_refused(
    sources: list[tuple[str, tuple[int, ...]]], message: str, tiny_pair_dirs: tuple[Path, Path], prompts: Path
) -> None:
    training = config(tiny_pair_dirs[0], prompts, prompts_per_shard=12, num_layers=2, target_layer_ids=(1, 3))
    shards = [shard for side in plan_shards(training) for shard in side]
    shards[0].answers.parent.mkdir(parents=True)
    for shard, source in zip(shards, sources, strict=True):
        write_features(shard.features, torch.zeros(4, 96), FeatureSource(*source))
    with pytest.raises(ValueError, match=message):
        write_shards(training, shards)


@pytest.mark.ray
def test_a_killed_worker_changes_nothing(tiny_pair_dirs: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    """The command with its training worker killed gives the draft of plain `DraftFit` on the same answers."""
    training = config(
        tiny_pair_dirs[0],
        prompts,
        prompts_per_shard=8,
        num_layers=2,
        block_size=4,
        max_new_tokens=24,
        epochs=6,
        batch_size=2,
        checkpoint_every=16,
        autocast=False,
        num_sampled=64,
    )
    command = [sys.executable, str(ROOT / "jobs" / "train_draft.py")]
    for name in training.model_fields_set - {"autocast"}:
        value = getattr(training, name)
        command += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [*command, "--no-autocast"], cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        kill_training_worker(job, training.output)
        assert job.wait(200) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        job.kill()
    found = load_file(training.output / "draft" / "model.safetensors")
    expected = plainly_trained(training)
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in expected.items())
    pair = load_pair(target=str(tiny_pair_dirs[0]), draft=str(training.output / "draft"))
    assert pair.block_size == 4
    assert "held-out tau" in (tmp_path / "log").read_text()


def plainly_trained(training: TrainDraftConfig) -> dict[str, torch.Tensor]:
    """The weights after `DraftFit` on the job's own answers, in this process and in one go."""
    train, _ = plan_shards(training)
    paths = [shard.answers for shard in train]
    model, _, _ = load_target(training.target, torch.bfloat16)
    weight = model.get_input_embeddings().weight.float()
    draft = fresh_draft(training)
    copy_target_layers(draft, model)
    frequent = frequent_tokens([answer.tokens for path in paths for answer in read_answers(path)])
    fit = DraftFit(BlockLoss(draft, weight, weight), paths, frequent, training.settings)
    assert len(list(fit.steps())) == fit.num_steps == 48
    return draft.state_dict()


def kill_training_worker(job: "subprocess.Popen[bytes]", output: Path) -> None:
    """kill -9 the worker once a checkpoint is on disk."""
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and job.poll() is None:
        if list(output.glob("train/*/checkpoint_*/state.pt")):
            for pid in descendants(job.pid, "ray::RayTrainWorker"):
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)
    raise AssertionError("no checkpoint and worker to kill")
