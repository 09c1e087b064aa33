"""Comparison with peers, on the tiny pair, with the peers of this environment."""

import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from blockpilot.drafts.dflash_checkpoint import load_draft
from blockpilot.pairs.checkpoints import find_draft
from blockpilot.pairs.table import EMBEDDED_DRAFT
from helpers.patience import patient
from helpers.processes import Job
from jobs.bench.peer_worker import PEERS, Decode
from jobs.bench.peers import DecodedBatch, Peer, PeersConfig, Worker, peers, run, running, table, without_selector
from jobs.common.config import PairConfig


@pytest.fixture
def config(pair_config: PairConfig, tmp_path: Path) -> PeersConfig:
    sizes: dict[str, Any] = {"requests": (1, 3), "rounds": 2, "num_tokens": 6, "block_sizes": (3,)}
    return PeersConfig(pair=pair_config, output=tmp_path / "peers", **sizes)


class PeerHere(NamedTuple):
    """Peer in this process, where torch is already loaded."""

    decode_tokens: Decode

    def decode(self, prompts: list[list[int]], num: int) -> DecodedBatch:
        started = time.perf_counter()
        answers = self.decode_tokens(prompts, num)
        return DecodedBatch(time.perf_counter() - started, answers)


@contextmanager
def running_once(peer: Peer, log: Path) -> Iterator[Worker | PeerHere]:
    """Run one peer in a separate process, the others in this one."""
    if peer.name != "blockpilot, B=3":
        yield PeerHere(PEERS[peer.settings["peer"]](peer.settings))
        return
    with running(peer, log) as worker:
        yield worker


def test_all_decode_the_same_answers(
    config: PeersConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same answers as transformers in float32: with drafts, lookup or both, for single requests and batches."""
    monkeypatch.setattr("jobs.bench.peers.running", running_once)
    run(config)
    answers = json.loads((config.output / "answers.json").read_text())
    assert list(answers) == ["1", "3"]
    for num, batches_by_peer in answers.items():
        *engine_names, transformers_name = batches_by_peer
        assert engine_names == [f"blockpilot, {name}" for name in ("B=3", "choice", "lookup")]
        assert transformers_name == "transformers, plain"
        expected = [batch["answers"] for batch in batches_by_peer[transformers_name]]
        assert [len(batch) for batch in expected] == [int(num)] * 2
        assert {len(answer) for batch in expected for answer in batch} == {6}
        for batches in batches_by_peer.values():
            assert [batch["answers"] for batch in batches] == expected
            assert all(batch["seconds"] > 0 for batch in batches)
    assert (config.output / "table.md").read_text() in capsys.readouterr().out


def test_ratios_are_of_the_same_batches() -> None:
    def answered(*seconds: float) -> list[DecodedBatch]:
        return [DecodedBatch(batch_s, [[1] * 10]) for batch_s in seconds]

    batches = {1: {"ours": answered(1, 2, 4), "other": answered(2, 2, 2), "third": answered(1, 1, 1)}}
    batches[4] = {"ours": answered(1, 2, 4), "third": answered(4, 4, 4)}
    _, _, *rows = (line.split("|")[1:-1] for line in table(batches).splitlines())
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["ours", "5.0 (1.00)", "5.0 (1.00)"],
        ["other", "5.0 (1.00)", "-"],
        ["third", "10.0 (2.00)", "2.5 (0.50)"],
    ]


def test_vllm_drafts_as_many_tokens(config: PeersConfig, tmp_path: Path) -> None:
    """A block of B has B - 1 drafted tokens; llama.cpp takes one request at a time."""
    (program := tmp_path / "program").touch()
    (export := tmp_path / "vllm.json").write_text('{"method": "dflash", "num_speculative_tokens": 3}')
    changes = {"vllm_python": program, "llama_bench": program, "gguf": program, "lookups": ("ngram", "suffix")}
    all_peers = peers(config.model_copy(update=changes | {"block_sizes": (1, 3), "vllm_export": export}))
    assert [peer.name for peer in all_peers if not peer.takes(3)] == ["llama.cpp, plain"]
    assert {peer.name: num_drafted(peer) for peer in all_peers} == {
        **{"blockpilot, plain": 0, "blockpilot, B=3": 2, "blockpilot, choice": 0, "blockpilot, lookup": 0},
        **{"transformers, plain": 0, "vllm, plain": 0, "vllm, B=3": 2},
        **{"vllm, ngram": 5, "vllm, suffix": 32, "vllm, export": 3, "llama.cpp, plain": 0},
    }


def test_vllm_drafts_without_a_selector_that_it_cannot_read(tmp_path: Path) -> None:
    """Selector of the embedded draft, over the draft's vocabulary, removed; all other weights are kept."""
    embedded = find_draft(EMBEDDED_DRAFT).directory
    plain = load_draft(without_selector(embedded, tmp_path / "plain"))
    assert plain.edges is None
    expected = load_draft(embedded).state_dict()
    assert all(weight.equal(expected[name]) for name, weight in plain.state_dict().items())
    assert without_selector(tmp_path / "plain", tmp_path / "other") == tmp_path / "plain"


def num_drafted(peer: Peer) -> int:
    """Tokens that a peer drafts a step."""
    speculative = peer.settings.get("speculative_config")
    return int(speculative["num_speculative_tokens"] if speculative else peer.settings["num_drafted"])


def test_what_is_missing_is_named(config: PeersConfig) -> None:
    with pytest.raises(ValueError, match="vllm_python nowhere: no such file"):
        peers(config.model_copy(update={"vllm_python": Path("nowhere")}))
    with pytest.raises(ValueError, match=r"llama_bench None and gguf .*: both are needed"):
        peers(config.model_copy(update={"gguf": Path(__file__)}))


# --- processes ---


def script(folder: Path, lines: str) -> Path:
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o700)
    return program


@contextmanager
def starter(folder: Path) -> Iterator[tuple[Path, int]]:
    """A peer that starts a process, as vLLM starts its engine, and a pipe that both hold open for writing."""
    pipe = folder / "held"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    yield script(folder, f"exec 3> {pipe}\nsleep 600 &\necho '{{\"ready\": true}}'\ncat > /dev/null\n"), reader
    assert select.select([reader], [], [], patient(10))[0]
    assert os.read(reader, 1) == b""  # no process holds it
    os.close(reader)


def test_a_peer_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    peer = Peer("vllm, plain", script(tmp_path, "echo no vllm here >&2\nexit 1\n"), {"threads": 1})
    with pytest.raises(ValueError, match=r"a peer has ended; its log: .*log"), running(peer, tmp_path / "log"):
        pass
    assert "no vllm here" in (tmp_path / "log").read_text()


def test_what_a_peer_has_started_ends_with_it(tmp_path: Path) -> None:
    with (
        starter(tmp_path) as (program, reader),
        running(Peer("other", program, {"threads": 1}), tmp_path / "log"),
        pytest.raises(BlockingIOError),  # it is held
    ):
        os.read(reader, 1)


MEASUREMENT = """
import sys, time
from pathlib import Path
from jobs.bench.peers import Peer, running
with running(Peer("other", Path(sys.argv[1]), {"threads": 1}), Path(sys.argv[2])):
    print("stopped", flush=True)
    time.sleep(600)
"""


def test_peers_that_are_stopped_end_with_a_killed_measurement(tmp_path: Path) -> None:
    with starter(tmp_path) as (program, reader):
        command = ["-c", MEASUREMENT, program, tmp_path / "log"]
        measurement = Job(command, cwd=tmp_path, env=os.environ, output=tmp_path / "said")
        measurement.wait_for(lambda: "stopped" in measurement.log)
        with pytest.raises(BlockingIOError):  # it is held
            os.read(reader, 1)
        measurement.kill()
