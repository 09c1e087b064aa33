"""Sweep job: by command, killed at any moment, continued, submitted to a cluster."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from ray.cluster_utils import Cluster
from safetensors.torch import load_file, save_file

from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt
from blockpilot.storage import file_names
from blockpilot.sweep.rows import Metadata, Reject, SweepRow, read_file, write_rows
from blockpilot.sweep.sweep import sweep_prompts
from helpers.clusters import RAY, free_ports, head_node
from helpers.command_line import error_of
from helpers.patience import patient, wait_until
from helpers.processes import Job, descendants
from helpers.s3 import s3_server
from helpers.sweep_workers import KnownRows
from helpers.sweeps import metadata, read_sweep, synthetic_rows
from helpers.trainings import ROOT, environment
from jobs.common import lease
from jobs.common.cluster import connect, new_actor
from jobs.common.config import ConfigError, PairConfig, Resources
from jobs.common.lease import Lease
from jobs.sweep import SweepConfig, _cut, _identity, run
from jobs.sweeping.folder import SweepFolder, SweepShard
from jobs.sweeping.scheduler import Scheduler, SweepTask

CANDIDATES = (1, 2, 4)
SETTINGS = {"max_new_tokens": 24, "temperature": 0.7, "seed": 3}
TOO_LONG = "x" * 1100  # the tiny target's context is 1024
FILES_OF_SHARDS = ("rows", "parquet"), ("prompts", "jsonl")


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    texts = [f"question {i}?" for i in range(15)] + [TOO_LONG]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def config(pair_config: PairConfig, prompt_file: Path, tmp_path: Path) -> SweepConfig:
    return SweepConfig(
        pair=pair_config,
        prompts=(str(prompt_file),),
        candidates=CANDIDATES,
        prompts_per_shard=2,
        output=str(tmp_path / "sweep"),
        price_rows=0,
        **SETTINGS,
    )


def command(config: SweepConfig) -> list[str]:
    """Command-line arguments that give `config`."""
    assert config.pair.target is not None
    assert config.pair.draft is not None
    return [
        *("--target", config.pair.target, "--draft", config.pair.draft, "--dtype", "float32"),
        *("--prompts", *config.prompts, "--candidates", *map(str, CANDIDATES)),
        *("--max-new-tokens", "24", "--temperature", "0.7", "--seed", "3", "--prompts-per-shard", "2"),
        *("--output", config.output, "--max-attempts", "2", "--price-rows", "0"),
    ]


@pytest.fixture(scope="module")
def expected(
    tiny_pair: Pair, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[SweepRow]]:
    """Rows by part name, replayed in this process shard by shard, without kills."""
    output = str(tmp_path_factory.mktemp("expected"))
    config = SweepConfig(prompts=(str(prompt_file),), prompts_per_shard=2, output=output, **SETTINGS)
    return replayed(tiny_pair, *open_sweep(config))


def replayed(pair: Pair, shards: Sequence[SweepShard], folder: SweepFolder) -> dict[str, list[SweepRow]]:
    return {s.part: sweep_prompts(pair, prompts(folder, s), CANDIDATES, **SETTINGS).rows for s in shards}


def open_sweep(config: SweepConfig) -> tuple[list[SweepShard], SweepFolder]:
    """Shards and directory of a sweep, ready to be written to."""
    shards, prompt_list = _cut(config)
    folder = SweepFolder(config.output, _identity(config, shards))
    folder.open(shards, prompt_list)
    return shards, folder


def prompts(folder: SweepFolder, shard: SweepShard) -> list[Prompt]:
    return folder.prompts(shard, range(len(shard.prompts)))


def texts(folder: SweepFolder, shard: SweepShard) -> list[str]:
    return [prompt.text for prompt in prompts(folder, shard)]


# Bad input: one line, before Ray starts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts nope", "unknown prompt set 'nope': choose one of demo, "),
        ("--prompts gone.jsonl", "prompt file not found: gone.jsonl"),
        ("--prompts {bad}", "bad.jsonl: no prompt in 2 rows: line 1: empty prompt; line 2: not JSON"),
        ("--pair nope", "unknown pair 'nope': named pairs are smollm2-135m, "),
        ("--target x", "target 'x' has no draft, a sweep needs one: --draft names one"),
        ("--candidates 3 2", "larger than the one before"),
        ("--candidates 0 2", "0 is not a block size"),
        ("--candidates 2 33", "at most 32"),
        ("--temperature nan", "temperature: Input should be a finite number"),
        ("--top-p 0", "top_p: Input should be greater than 0"),
        (f"--seed {2**63}", "seed: Input should be less than"),
        ("--max-new-tokens 1", "max_new_tokens: Input should be greater than or equal to 2"),
    ],
)
def test_bad_input_is_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": ""}\n{"prompt": \n')
    command_line = f"--output {tmp_path / 'out'} {arguments.format(bad=tmp_path / 'bad.jsonl')}"
    assert message in error_of(SweepConfig, run, command_line)
    assert not (tmp_path / "out").exists()


def test_a_sweep_needs_a_candidate() -> None:
    with pytest.raises(ConfigError, match=r"candidates \(\): at least one block size is needed"):
        SweepConfig(candidates=())


def test_the_output_may_be_a_uri(config: SweepConfig, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as bucket:
        config = config.model_copy(update={"output": f"{bucket}/by-uri?region=us-east-1", "prompts_per_shard": 8})
        with Lease(config.output) as output_lease:
            shards, folder = open_sweep(config)
            expected = replayed(tiny_pair, shards, folder)
            OpenSweep(config, shards, folder, metadata_of(folder, tiny_pair), expected).write(*shards)
            folder.write_rejects([])
            output_lease.check()
        for location in (folder.rows, config.output):
            assert read_sweep(location).rows == [row for rows in expected.values() for row in rows]
        assert left(config) == {shard.part: [TOO_LONG] for shard in shards if TOO_LONG in texts(folder, shard)}
        files = {f"{kind}/{Path(s.part).stem}.{end}" for s in shards for kind, end in FILES_OF_SHARDS}
        assert set(file_names(config.output)) == {"config.json", *files}
    with pytest.raises(ValueError, match="nosuch://x"):
        open_sweep(config.model_copy(update={"output": "nosuch://x"}))


# Shards and the output directory


def test_shards_hold_every_prompt_once_in_order(config: SweepConfig, prompt_file: Path) -> None:
    doubled = config.model_copy(update={"prompts": (str(prompt_file), "demo", str(prompt_file)), "num_prompts": 7})
    shards, folder = open_sweep(doubled)
    in_order = [text for shard in shards for text in texts(folder, shard)]
    assert len(in_order) == len(set(in_order)) == 14
    assert [len(shard.prompts) for shard in shards] == [2] * 7
    assert [shard.part for shard in shards] == sorted({shard.part for shard in shards})
    assert [shard.number for shard in shards] == list(range(7))
    assert open_sweep(doubled)[0] == shards
    reseeded, other_folder = open_sweep(doubled.model_copy(update={"seed": 4, "output": config.output + "4"}))
    assert [texts(other_folder, shard) for shard in reseeded] == [texts(folder, shard) for shard in shards]
    assert not {shard.part for shard in reseeded} & {shard.part for shard in shards}


class OpenSweep(NamedTuple):
    """A sweep's folder, ready to be written to, and the rows of every part."""

    config: SweepConfig
    shards: list[SweepShard]
    folder: SweepFolder
    metadata: Metadata
    expected: dict[str, list[SweepRow]]

    def write(self, *shards: SweepShard) -> None:
        for shard in shards:
            self.folder.write(shard, self.expected[shard.part], self.metadata)


@pytest.fixture
def opened(config: SweepConfig, tiny_pair: Pair, expected: dict[str, list[SweepRow]]) -> OpenSweep:
    shards, folder = open_sweep(config)
    return OpenSweep(config, shards, folder, metadata_of(folder, tiny_pair), expected)


def metadata_of(folder: SweepFolder, pair: Pair) -> Metadata:
    return Metadata(folder.identity, pair.id, "float32", pair.vocab_size, pair.block_size, [*CANDIDATES], {}, "")


def left(config: SweepConfig) -> dict[str, list[str]]:
    """Texts that the same command would still sweep, by part name."""
    shards, folder = open_sweep(config)
    by_part = {shard.part: [p.text for p in folder.prompts(shard, folder.left(shard))] for shard in shards}
    return {part: texts for part, texts in by_part.items() if texts}


def test_a_folder_knows_what_is_left(opened: OpenSweep, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts left to sweep in a folder; a damaged part is swept again."""
    config, shards, folder, metadata, expected = opened
    assert left(config) == {shard.part: texts(folder, shard) for shard in shards}
    first, second, third = shards[:3]
    opened.write(first)
    folder.write(second, expected[second.part][1:], metadata)  # one of its two
    assert next(iter(left(config).items())) == (second.part, texts(folder, second)[:1])
    folder.write(second, expected[second.part][:1], metadata)
    assert next(iter(left(config))) == third.part
    assert read_sweep(folder.rows).rows == expected[first.part] + expected[second.part]

    opened.write(*shards)
    (with_long,) = (shard for shard in shards if TOO_LONG in texts(folder, shard))
    damaged = next(shard for shard in shards if shard != with_long)
    part = Path(folder.rows) / damaged.part
    part.write_bytes(part.read_bytes()[:-50])
    (part.parent / f".{damaged.part}.123.tmp").write_bytes(b"of a writer that was killed")
    assert left(config) == {damaged.part: texts(folder, damaged), with_long.part: [TOO_LONG]}
    assert f"decoding again what was in {part}: not a readable" in capsys.readouterr().out
    assert [file.name for file in sorted(part.parent.iterdir())] == [shard.part for shard in shards]


def test_a_folder_of_another_sweep_is_refused(opened: OpenSweep) -> None:
    config, shards, folder, *_ = opened
    open_sweep(config.model_copy(update={"temperature": 0.5}))  # no rows are there yet: nothing to lose
    open_sweep(config)
    opened.write(shards[0])
    for field, value in {
        "temperature": 0.5,
        "candidates": (1, 2),
        "method": "dense",
        "pair": PairConfig(name="smollm2-135m"),
        "num_prompts": 5,
        "prompts_per_shard": 3,
    }.items():
        other_config = config.model_copy(update={field: value})
        with pytest.raises(ValueError, match=rf"holds another sweep \(stored and requested: {field}"):
            run(other_config)
    retuned_config = config.model_copy(update={"slots": 3, "max_attempts": 7, "price_rows": 1})
    assert open_sweep(retuned_config)[1].identity == folder.identity
    assert not ray.is_initialized()


def test_other_prompts_or_weights_under_the_same_names_are_another_sweep(
    config: SweepConfig, tiny_pair: Pair, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    draft, path = tmp_path / "draft", tmp_path / "questions.txt"
    shutil.copytree(tiny_pair_dirs[1], draft)
    path.write_text("one\ntwo\n")
    pair = PairConfig(target=str(tiny_pair_dirs[0]), draft=str(draft), dtype="float32")
    config = config.model_copy(update={"pair": pair, "prompts": (str(path),)})
    (shard,), folder = open_sweep(config)
    rows = sweep_prompts(tiny_pair, prompts(folder, shard), CANDIDATES, **SETTINGS).rows
    folder.write(shard, rows, metadata_of(folder, tiny_pair))
    path.write_text("one\nthree\n")
    with pytest.raises(ValueError, match=r"holds another sweep \(stored and requested: prompts_digest"):
        run(config)
    path.write_text("one\ntwo\n")
    weights = load_file(draft / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in weights.items()}, draft / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds another sweep \(stored and requested: revisions"):
        run(config)


def test_one_driver_writes_at_a_time(config: SweepConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "PATIENCE_S", patient(0.5))
    me = f"process id {os.getpid()} on {socket.gethostname()}"
    with Lease(config.output) as output_lease:
        with pytest.raises(ValueError, match=f"output {config.output}: the driver with {me} is writing there"):
            run(config)
        output_lease.check()
    assert not Path(config.output, "config.json").exists()


def test_rows_and_files_of_others_do_not_join(opened: OpenSweep) -> None:
    """Rows of another pair, new or already in the folder, and unknown files are refused."""
    config, (first, second, *_), folder, metadata, expected = opened
    opened.write(first)
    reopened_folder = SweepFolder(config.output, folder.identity)
    assert reopened_folder.left(first) == ()
    retrained = dataclasses.replace(metadata, pair=metadata.pair._replace(draft_revision="new"))
    pattern = r"another pair or precision \(pair.draft_revision: '.*' and 'new'\)"
    with pytest.raises(ValueError, match=pattern):
        reopened_folder.write(second, expected[second.part], retrained)
    write_rows(f"{folder.rows}/{second.part}", expected[second.part], retrained)
    with pytest.raises(ValueError, match=pattern):
        run(config)
    write_rows(f"{folder.rows}/part-00099-x.parquet", expected[first.part], metadata)
    with pytest.raises(ValueError, match=r"rows/part-00099-x\.parquet does not belong to this sweep"):
        run(config)
    Path(config.output, "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds rows, but config\.json is not readable"):
        run(config)


# Lost workers and whole runs


def parts(config: SweepConfig) -> list[Path]:
    return sorted(Path(config.output, "rows").glob("*.parquet"))


def assert_complete(config: SweepConfig, expected: dict[str, list[SweepRow]]) -> None:
    """Assert that all rows are those of an undisturbed run, and that only the too long prompt is set aside."""
    assert {part.name: read_file(part).rows for part in parts(config)} == expected
    assert read_sweep(config.output).rows == [row for rows in expected.values() for row in rows]
    (reject,) = map(json.loads, Path(config.output, "rejects.jsonl").read_text().splitlines())
    assert reject["prompt"] == TOO_LONG
    assert "tokens: at most 1023 leave room for an answer (the model's limit is 1024 tokens)" in reject["error"]


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes; a larger one raises OSError."""
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)


def test_a_full_disk_costs_no_row(opened: OpenSweep) -> None:
    """Rows written before the disk was full stay, the others are swept later; the job ends with a one-line error."""
    config, (first, second, *_), folder, metadata, expected = opened
    opened.write(first)
    mtimes = {part: part.stat().st_mtime_ns for part in parts(config)}
    with pytest.raises(OSError, match="File too large"), full_disk(4096):
        folder.write(second, expected[second.part], metadata)
    with full_disk(400):  # room for a lease
        error = error_of(SweepConfig, run, " ".join(command(config)))
    assert error.startswith("error: [Errno 27] File too large")
    assert {part: part.stat().st_mtime_ns for part in parts(config)} == mtimes
    assert next(iter(left(config).items())) == (second.part, texts(folder, second))


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray's warnings
def test_neither_a_lost_node_nor_a_fatal_prompt_cost_other_prompts(
    config: SweepConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss of one of two nodes while its worker sweeps: the other worker finishes, every prompt once."""
    rows = {row.prompt: row for row in synthetic_rows(40, 0)}
    prompt_path, fatal = tmp_path / "many.jsonl", next(iter(rows))
    prompt_path.write_text("".join(json.dumps({"prompt": prompt, "set": "synthetic"}) + "\n" for prompt in rows))
    changes = {"prompts": (str(prompt_path),), "seed": 0, "temperature": 0.0}
    config = config.model_copy(update=changes)
    shards, folder = open_sweep(config)
    (fatal_part,) = (shard.part for shard in shards if fatal in texts(folder, shard))

    def start() -> tuple[Any, Any]:
        worker = new_actor(KnownRows, Resources(), metadata(), rows, fatal)
        return worker, worker.load.remote()

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "dashboard_port": free_ports()[0]})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        connect()  # to the head, since there is no other node yet
        node = cluster.add_node(num_cpus=1)
        raylet = node.all_processes["raylet"][0].process.pid
        rejects, lost_after = list[Reject](), 0
        tasks = [SweepTask(shard, folder.left(shard)) for shard in shards]
        for task, outcome in Scheduler(folder, start, num_actors=2, max_attempts=2).work(tasks):
            folder.write(task.shard, outcome.rows, metadata())
            rejects += outcome.rejects
            if lost_after:
                continue
            wait_until(lambda: descendants(raylet, "ray::KnownRows"), 60)
            if descendants(raylet, "ray::KnownRows.sweep"):
                lost_after = len(parts(config))
                cluster.remove_node(node, allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()
    output = capsys.readouterr().out
    retried_parts = set(re.findall("trying (.*) again, its worker died", output))
    assert fatal_part in retried_parts
    assert len(retried_parts) > 1
    assert f"looking for what fails in {fatal_part}, its worker died" in output
    assert 0 < lost_after < 10  # of 20
    assert [(reject.prompt, reject.error.split(" (")[0]) for reject in rejects] == [(fatal, "its worker died")]
    assert sorted(row.prompt for row in read_sweep(config.output).rows) == sorted(rows.keys() - {fatal})
    assert left(config) == {fatal_part: [fatal]}  # the same command would try it again


@pytest.mark.ray
def test_kills_cost_no_row_and_the_job_goes_on_when_it_is_submitted(
    config: SweepConfig, expected: dict[str, list[SweepRow]]
) -> None:
    """Kill of the worker, then of the whole job; the same command, submitted to a cluster, writes the other rows."""
    variables = environment() | {"PYTHONPATH": str(ROOT)}
    job = Job(["jobs/sweep.py", *command(config)], cwd=ROOT, env=variables, output=Path(f"{config.output}.log"))
    job.wait_for(lambda: parts(config))
    (worker,) = descendants(job.pid, "ray::SweepWorker")
    os.kill(worker, signal.SIGKILL)
    before = len(parts(config))
    job.wait_for(lambda: len(parts(config)) > before)
    job.kill()
    assert "again, its worker died" in job.log
    mtimes = {part: part.stat().st_mtime_ns for part in parts(config)}
    assert 0 < len(mtimes) < len(expected)

    with head_node(variables) as address:
        submit = [RAY, "job", "submit", "--address", address, "--working-dir", "."]
        submit += ["--", sys.executable, "jobs/sweep.py", *command(config)]
        settings = {"cwd": ROOT, "env": variables, "timeout": patient(180)}
        result = subprocess.run(submit, capture_output=True, text=True, check=False, **settings)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {part: part.stat().st_mtime_ns for part in mtimes} == mtimes  # what was finished was not done again
    assert_complete(config, expected)
