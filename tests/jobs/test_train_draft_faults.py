"""Faults of a draft's training: short answers, a second driver, and drafts or masks that change between two runs."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot.draft_training.answers import Answer, AnswerSource, write_answers
from blockpilot.draft_training.training import DraftFitSettings
from blockpilot.pairs.checkpoints import find_target
from helpers import one_process
from helpers.leases import take_over
from helpers.patience import patient
from jobs import answers, train_draft
from jobs.answers import AnswerShards
from jobs.common import lease
from jobs.common.lease import Lease
from jobs.train_draft import run, write_shard_slots
from jobs.training.draft import TrainDraftConfig

SELECTOR: dict[str, object] = {"selector_rank": 4, "selector_top_k": 6, "only_edges": True}


@pytest.fixture
def training(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> TrainDraftConfig:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say the number {i}\n" for i in range(24)))
    return TrainDraftConfig(
        target=str(tiny_pair_dirs[0]),
        prompts=(str(prompts),),
        held_out=0.3,
        mask_token="<mask>",
        answers=tmp_path / "answers",
        output=tmp_path / "draft",
        start=str(tiny_pair_dirs[1]),
        num_layers=2,
        block_size=4,
        prompts_per_shard=8,
        fit=DraftFitSettings(epochs=2, batch_size=1, num_sampled=64, autocast=False),
    )


def changed(training: TrainDraftConfig, **changes: object) -> TrainDraftConfig:
    return TrainDraftConfig(**training.model_dump(exclude={"fit"}) | {"fit": training.fit} | changes)


def write_shards(training: TrainDraftConfig, lengths: Sequence[Sequence[int]]) -> AnswerShards:
    """Answers to every prompt; lengths: number of their tokens by shard, used cyclically."""
    plan, number = answers.plan(training, ()), 0
    generator = torch.Generator().manual_seed(0)
    source = AnswerSource(training.target, find_target(training.target).revision)
    for side in plan:
        for i, shard in enumerate(side):
            shard_answers = []
            for j, _ in enumerate(shard.prompts):
                num_tokens = lengths[i % len(lengths)][j % len(lengths[i % len(lengths)])]
                tokens = torch.randint(97, 123, (5 + num_tokens,), generator=generator).tolist()
                shard_answers.append(Answer("test", tokens, 5, float(number % 2), number))
                number += 1
            shard.path.parent.mkdir(parents=True, exist_ok=True)
            write_answers(shard.path, shard_answers, source)
    return plan


@pytest.mark.usefixtures("in_one_process", "registry")
@pytest.mark.parametrize(
    "options",
    [
        {"start": "target", "draft_vocab_size": 20},
        {"start": "target", "stream_features": True},
        {"start": "target", "kind": "eagle3", "draft_vocab_size": 20},
        SELECTOR,
    ],
    ids=str,
)
def test_answers_of_one_token_cost_no_training(training: TrainDraftConfig, options: dict[str, object]) -> None:
    """Answers without a position to draft, alone in a batch or alone in a shard, are left out."""
    training = changed(training, **options)
    plan = write_shards(training, [[9, 1, 1, 6], [1]])
    assert len(plan.train) > 1
    weights = load_file(run(training).draft / "model.safetensors")
    assert all(weight.float().isfinite().all() for weight in weights.values())


@pytest.mark.usefixtures("in_one_process", "registry")
def test_held_out_answers_of_one_token_are_refused_before_the_training(training: TrainDraftConfig) -> None:
    plan = write_shards(training, [[9]])
    source = AnswerSource(training.target, find_target(training.target).revision)
    for shard in plan.held_out:
        write_answers(shard.path, [Answer("test", [1, 2, 3], 2, 0.0, 0)], source)
    with pytest.raises(ValueError, match="answers/held_out: no answer of 2 tokens or more"):
        run(training)
    assert not training.output.exists()


@pytest.mark.usefixtures("in_one_process", "registry")
def test_one_driver_trains_and_exports(training: TrainDraftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second driver is refused; one that has lost its lease during the training exports nothing."""
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "PATIENCE_S", patient(0.5))
    write_shards(training, [[9]])
    with Lease(training.output), pytest.raises(ValueError, match="is writing there; end it"):
        run(training)

    def train(*arguments: Any) -> object:
        take_over(training.output)
        return one_process.train(*arguments)

    monkeypatch.setattr("jobs.train_draft.train", train)
    with pytest.raises(ValueError, match="process id 7 on elsewhere has taken over; this driver stops"):
        run(training)
    assert not (training.output / "draft").exists()


@pytest.mark.usefixtures("in_one_process", "registry")
def test_unfinished_files_of_another_training_stay(training: TrainDraftConfig) -> None:
    """Features that another training with the same answers is writing."""
    write_shards(training, [[9]])
    others, left = training.answers / "features-1" / "train" / ".a.1.tmp", training.answers / "train" / ".b.1.tmp"
    others.parent.mkdir(parents=True)
    for path in (others, left):
        path.write_text("half")
    answers.run(training)
    assert others.exists()
    assert not left.exists()


def test_a_changed_start_or_mask_is_another_training(
    training: TrainDraftConfig, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Ray Train would return the finished run of the same name."""
    start = tmp_path / "start"
    shutil.copytree(tiny_pair_dirs[1], start)
    training = changed(training, start=str(start))
    plan = write_shards(training, [[9]])
    name = train_draft._run_name(training, plan)
    assert train_draft._run_name(changed(training, mask_token="<pad>"), plan) != name
    weights = load_file(start / "model.safetensors")
    save_file({key: weight * 1.5 for key, weight in weights.items()}, start / "model.safetensors")
    assert train_draft._run_name(training, plan) != name


def test_slots_of_a_causal_draft_are_stored_apart(
    training: TrainDraftConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = changed(training, **SELECTOR)
    plan = write_shards(training, [[9]])
    monkeypatch.setattr("jobs.train_draft.pooled", one_process.pooled)
    files = [
        [shard.features for side in write_shard_slots(changed(training, causal=causal), plan) for shard in side]
        for causal in (False, True)
    ]
    assert set(files[0]).isdisjoint(files[1])
    assert all(file.exists() for one_mask in files for file in one_mask)
