"""The comparison with peers, on the tiny pair, with those of this environment."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import patient
from jobs.bench.peers import DecodedBatch, Peer, PeersConfig, measure, peers, run, running, table
from jobs.common.config import PairConfig


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> PeersConfig:
    target, draft = map(str, tiny_pair_dirs)
    return PeersConfig(
        pair=PairConfig(target=target, draft=draft, dtype="float32"),
        requests=(1, 3),
        rounds=2,
        num_tokens=6,
        block_sizes=(1, 3),
        output=tmp_path / "peers",
    )


def test_all_decode_the_same_answers(config: PeersConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """In float32 this engine's are those of transformers, plainly and with drafts, alone and together."""
    run(config)
    kept = json.loads((config.output / "answers.json").read_text())
    assert list(kept) == ["1", "3"]
    for num, of_load in kept.items():
        own = [f"blockpilot, {name}" for name in ("plain", "B=3", "choice", "lookup")]
        assert list(of_load) == [*own, "transformers, plain"]
        first = [batch["answers"] for batch in of_load["blockpilot, plain"]]
        assert [len(batch) for batch in first] == [int(num)] * 2
        assert {len(answer) for batch in first for answer in batch} == {6}
        for batches in of_load.values():
            assert [batch["answers"] for batch in batches] == first
            assert all(batch["seconds"] > 0 for batch in batches)
    assert (config.output / "table.md").read_text() in capsys.readouterr().out


def test_ratios_are_of_the_same_batches() -> None:
    def answered(*seconds: float) -> list[DecodedBatch]:
        return [DecodedBatch(each, [[1] * 10]) for each in seconds]

    found = {1: {"ours": answered(1, 2, 4), "other": answered(2, 2, 2), "third": answered(1, 1, 1)}}
    found[4] = {"ours": answered(1, 2, 4), "third": answered(4, 4, 4)}
    _, _, *rows = (line.split("|")[1:-1] for line in table(found).splitlines())
    shown = [[cell.strip() for cell in row] for row in rows]
    assert shown == [
        ["ours", "5.0 (1.00)", "5.0 (1.00)"],
        ["other", "5.0 (1.00)", "-"],
        ["third", "10.0 (2.00)", "2.5 (0.50)"],
    ]


def test_vllm_drafts_as_many_tokens(config: PeersConfig, tmp_path: Path) -> None:
    """A block of B has B - 1 drafted tokens; llama.cpp takes one request at a time."""
    (tmp_path / "program").touch()
    program = tmp_path / "program"
    export = tmp_path / "vllm.json"
    export.write_text('{"method": "dflash", "num_speculative_tokens": 3}')
    changes = {"vllm_python": program, "llama_bench": program, "gguf": program, "lookups": ("ngram", "suffix")}
    found = peers(config.model_copy(update=changes | {"vllm_export": export}))
    assert [peer.name for peer in found if not peer.takes(3)] == ["llama.cpp, plain"]
    assert {peer.name: _num_drafted(peer) for peer in found if not peer.name.startswith("llama.cpp")} == {
        **{"blockpilot, plain": 0, "blockpilot, B=3": 2, "blockpilot, choice": 0, "blockpilot, lookup": 0},
        **{"transformers, plain": 0, "vllm, plain": 0, "vllm, B=3": 2},
        **{"vllm, ngram": 5, "vllm, suffix": 32, "vllm, export": 3},
    }


def _num_drafted(peer: Peer) -> int:
    """Tokens that a peer drafts a step."""
    speculative = peer.settings.get("speculative_config")
    return int(speculative["num_speculative_tokens"] if speculative else peer.settings["num_drafted"])


def test_what_is_not_there_is_named(config: PeersConfig) -> None:
    with pytest.raises(ValueError, match="vllm_python nowhere: no such file"):
        peers(config.model_copy(update={"vllm_python": Path("nowhere")}))
    with pytest.raises(ValueError, match=r"llama_bench None and gguf .*: both are needed"):
        peers(config.model_copy(update={"gguf": Path(__file__)}))


def test_a_peer_that_fails_is_named_with_its_log(config: PeersConfig, tmp_path: Path) -> None:
    (program := tmp_path / "python").write_text("#!/bin/sh\necho no vllm here >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ValueError, match=r"a peer has ended; what it said: .*vllm-plain\.log"):
        measure(config.model_copy(update={"vllm_python": program, "block_sizes": (1,)}))
    assert "no vllm here" in (config.output / "vllm-plain.log").read_text()


def test_what_a_peer_has_started_ends_with_it(tmp_path: Path) -> None:
    """As vLLM starts its engine."""
    program, held = tmp_path / "program", tmp_path / "held"
    os.mkfifo(held)
    program.write_text(f"#!/bin/sh\nexec 3> {held}\nsleep 600 &\necho '{{\"ready\": true}}'\ncat > /dev/null\n")
    program.chmod(0o700)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    peer = Peer("other", program, {"threads": 1})
    with running(peer, tmp_path / "log"), pytest.raises(BlockingIOError):  # sleep has it open
        os.read(reader, 1)
    assert select.select([reader], [], [], 10)[0]
    assert os.read(reader, 1) == b""  # nobody has
    os.close(reader)


MEASUREMENT = """
import sys, time
from pathlib import Path
from jobs.bench.peers import Peer, running
with running(Peer("other", Path(sys.argv[1]), {"threads": 1}), Path(sys.argv[2])):
    print("stopped", flush=True)
    time.sleep(600)
"""


def test_peers_that_are_stopped_end_with_a_killed_measurement(tmp_path: Path) -> None:
    """They and what they have started, as vLLM starts its engine."""
    program, held = tmp_path / "program", tmp_path / "held"
    os.mkfifo(held)
    program.write_text(f"#!/bin/sh\nexec 3> {held}\nsleep 600 &\necho '{{\"ready\": true}}'\ncat > /dev/null\n")
    program.chmod(0o700)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-c", MEASUREMENT, str(program), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        assert measurement.stdout.readline() == "stopped\n"
        with pytest.raises(BlockingIOError):  # sleep has it open
            os.read(reader, 1)
        measurement.kill()
    assert select.select([reader], [], [], patient(10))[0]
    assert os.read(reader, 1) == b""  # nobody has
    os.close(reader)
