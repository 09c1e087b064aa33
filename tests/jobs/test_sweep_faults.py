"""Faults of a sweep that cost no other prompt: errors of workers, rows that cannot be written, repeated turns."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt
from blockpilot.sweep.rows import Metadata, SweepRow
from blockpilot.sweep.sweep import sweep_prompts
from helpers.sweep_workers import FailsToLoad, StickyError
from helpers.sweeps import metadata, read_sweep, synthetic_rows
from helpers.trainings import ROOT
from jobs.common.cluster import connect, new_actor
from jobs.common.config import PairConfig, Resources
from jobs.common.lease import Lease
from jobs.sweep import SweepConfig, SweepWorker, _cut, _identity, _sweep
from jobs.sweeping.folder import SweepFolder, SweepShard
from jobs.sweeping.scheduler import Scheduler, SweepTask


def write_conversations(path: Path, *conversations: Sequence[str]) -> Path:
    lines = ({"prompt": turns[0], "follow_ups": turns[1:], "set": "synthetic"} for turns in conversations)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def open_sweep(config: SweepConfig) -> tuple[list[SweepShard], SweepFolder]:
    shards, prompts = _cut(config)
    folder = SweepFolder(config.output, _identity(config, shards))
    folder.open(shards, prompts)
    return shards, folder


def all_prompts(shards: Sequence[SweepShard], folder: SweepFolder) -> list[Prompt]:
    return [prompt for shard in shards for prompt in folder.prompts(shard, range(len(shard.prompts)))]


@pytest.fixture
def config(pair_config: PairConfig, tmp_path: Path) -> SweepConfig:
    return SweepConfig(pair=pair_config, candidates=(1, 2, 4), price_rows=0, output=str(tmp_path / "sweep"))


def test_conversations_with_the_same_first_turn_have_one_row(
    config: SweepConfig, tiny_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversations = ("Hello", "Why?"), ("Other",), ("Hello",), ("Hello", "Why?", "How?"), ("Other",)
    path = write_conversations(tmp_path / "chats.jsonl", *conversations)
    config = config.model_copy(update={"prompts": (str(path),), "prompts_per_shard": 2})
    shards, folder = open_sweep(config)
    assert "2 conversations left out" in capsys.readouterr().out
    made_by = Metadata(folder.identity, tiny_pair.id, "float32", tiny_pair.vocab_size, 4, [1, 2, 4], {}, "")
    for shard in shards:
        rows = sweep_prompts(tiny_pair, folder.prompts(shard, range(2)), (1, 2, 4), max_new_tokens=8).rows
        folder.write(shard, rows, made_by)
    assert len(read_sweep(folder.rows).rows) == sum(len(shard.ids) for shard in shards)
    assert {prompt.messages[0].content for prompt in all_prompts(shards, folder)} == {"Hello", "Other"}


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray's warnings
def test_a_worker_with_an_error_of_its_device_is_replaced(
    config: SweepConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error that all later tasks of a process get, and workers that fail to load: only the fatal prompt is lost."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    rows = {row.prompt: row for row in synthetic_rows(8, 0)}
    fatal, path = next(iter(rows)), write_conversations(tmp_path / "prompts.jsonl", *((text,) for text in rows))
    shards, folder = open_sweep(config.model_copy(update={"prompts": (str(path),), "prompts_per_shard": 2}))
    tasks = [SweepTask(shard, folder.left(shard)) for shard in shards]
    connect()

    def outcome(worker: type[Any], *arguments: object) -> tuple[list[str], list[tuple[str, str]]]:
        def start() -> tuple[Any, Any]:
            actor = new_actor(worker, Resources(), metadata(), rows, *arguments)
            return actor, actor.load.remote()

        outcomes = [outcome for _, outcome in Scheduler(folder, start, num_actors=1, max_attempts=2).work(tasks)]
        rejects = [(reject.prompt, reject.error) for outcome in outcomes for reject in outcome.rejects]
        return sorted(row.prompt for outcome in outcomes for row in outcome.rows), rejects

    expected = sorted(rows.keys() - {fatal}), [(fatal, "RuntimeError: device-side assert")]
    assert outcome(StickyError, fatal) == expected
    assert outcome(FailsToLoad, tmp_path / "once", 1) == (sorted(rows), [])
    with pytest.raises(RuntimeError, match="2 workers in a row could not load the pair; the last: MemoryError: of"):
        outcome(FailsToLoad, tmp_path / "often", 9)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray's warnings
def test_a_turn_with_a_row_is_never_rejected(
    config: SweepConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row of a first turn from an earlier run; the worker that sweeps the conversation again fails."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    path = write_conversations(tmp_path / "chats.jsonl", ("Hello", "Why?"))
    config = config.model_copy(update={"prompts": (str(path),), "max_attempts": 1})
    (shard,), folder = open_sweep(config)
    (first, second), row = shard.ids, dataclasses.replace(synthetic_rows(1, 0)[0])
    folder.write(shard, [dataclasses.replace(row, prompt_id=first)], metadata())

    def start(*_: object) -> tuple[Any, Any]:
        worker = new_actor(StickyError, Resources(), metadata(), dict[str, SweepRow](), "Hello")
        return worker, worker.load.remote()

    monkeypatch.setattr("jobs.sweep._start_worker", start)
    with Lease(config.output) as lease:
        rejects = _sweep(config, [shard], folder, lease)
    assert [reject.prompt_id for reject in rejects] == [second]
    assert [row.prompt_id for row in folder.read(shard)] == [first]


def test_rows_that_cannot_be_written_are_rejected(
    config: SweepConfig, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Context vectors beyond float16."""
    path = write_conversations(tmp_path / "prompts.jsonl", ("one",), ("two",))
    draft = tmp_path / "draft"
    shutil.copytree(tiny_pair_dirs[1], draft)
    weights = load_file(draft / "model.safetensors")
    weights["hidden_norm.weight"] *= 1e6
    save_file(weights, draft / "model.safetensors")
    pair = PairConfig(target=str(tiny_pair_dirs[0]), draft=str(draft), dtype="float32")
    changes = {"pair": pair, "prompts": (str(path),), "method": "dense", "max_new_tokens": 24}
    config = config.model_copy(update=changes)
    shards, folder = open_sweep(config)
    worker = SweepWorker(config)
    made_by = worker.load(folder.identity, "")
    outcome = worker.sweep(all_prompts(shards, folder))
    folder.write(shards[0], outcome.rows, made_by)
    assert [reject.prompt for reject in outcome.rejects] == [p.text for p in all_prompts(shards, folder)]
    assert {reject.error for reject in outcome.rejects} == {
        "step_contexts or step_embeddings have entries that are not finite"
    }
