"""Comparison of this engine with alternatives on a CPU: transformers, llama.cpp and vLLM's CPU build.

Every peer decodes the same prompts to the same number of tokens, greedily, with the same weights, dtype and threads.
vLLM uses the same draft (without a selector over a separate vocabulary, which it cannot read), or lookup. This engine
decodes with fixed block sizes, and with the untrained choice (which includes lookup), with and without the draft.
Peers are interleaved batch by batch; each runs in a separate process that loads once and is suspended while others
work. A row shows tokens per second, including the prefill, and the median over batches of the ratio to the first row.

    python jobs/bench/peers.py --threads 2 --vllm-python ~/vllm/bin/python --llama-bench llama-bench --gguf model.gguf

How to install vLLM and llama.cpp, each outside this environment: docs/results.md.
"""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from transformers import AutoTokenizer

from blockpilot.device import device_name
from blockpilot.drafts.dflash_checkpoint import load_draft, save_draft
from blockpilot.evaluation.tables import markdown
from blockpilot.native.library import pick_dtype
from blockpilot.pairs.checkpoints import find_draft, find_target
from blockpilot.prompts.files import load_prompts
from blockpilot.storage import write_text
from jobs.common.config import Config, PairConfig, main

WORKER = Path(__file__).with_name("peer_worker.py")


class PeersConfig(Config):
    """Peers and workload."""

    pair: PairConfig = PairConfig()
    prompts: str = "demo"
    """A prompt set or file."""
    requests: tuple[int, ...] = (1, 4, 16)
    """Numbers of requests decoded together."""
    rounds: int = Field(default=3, ge=1)
    """Batches per number of requests, after one for warm-up."""
    num_tokens: int = Field(default=64, ge=2)
    """Tokens of every answer."""
    block_sizes: tuple[int, ...] = (1, 4, 8)
    """Block sizes of this engine; vLLM drafts one token less. 1 is plain decoding."""
    lookups: tuple[Literal["ngram", "suffix"], ...] = ()
    """vLLM's lookup methods, without a draft; suffix needs arctic-inference in its environment."""
    vllm_export: Path | None = None
    """A file of jobs/export.py, as a further configuration of vLLM."""
    enforce_eager: bool = False
    """vLLM without torch.compile, which takes minutes for each configuration."""
    threads: int = Field(default=1, ge=1)
    """Threads of every peer."""
    vllm_python: Path | None = None
    """Python of an environment with vLLM; by default vLLM is not compared."""
    llama_bench: Path | None = None
    """llama.cpp's program llama-bench; by default llama.cpp is not compared."""
    gguf: Path | None = None
    """The target as a GGUF file, for llama-bench."""
    output: Path = Path("runs/peers")
    """Output directory of the table, all answers, and the logs of the peers."""


class Peer(NamedTuple):
    """Configuration of a worker process."""

    name: str
    python: Path
    settings: dict[str, Any]

    def takes(self, num_requests: int) -> bool:
        return num_requests == 1 or self.settings["peer"] != "llama.cpp"


class DecodedBatch(NamedTuple):
    """A batch decoded by a peer."""

    seconds: float
    answers: list[list[int]]

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


def peers(config: PeersConfig) -> list[Peer]:
    """The configured peers. Raises ValueError for a program or a file that does not exist."""
    for name in ("vllm_python", "vllm_export", "llama_bench", "gguf"):
        path = getattr(config, name)
        if path is not None and not path.exists():
            raise ValueError(f"{name} {path}: no such file")
    if (config.llama_bench is None) != (config.gguf is None):
        raise ValueError(f"llama_bench {config.llama_bench} and gguf {config.gguf}: both are needed")
    config.pair.need_draft("a comparison with other engines")
    target, draft = config.pair.models
    shared: dict[str, Any] = {"dtype": pick_dtype(config.pair.dtype, "cpu"), "threads": config.threads}
    shared |= {"num_drafted": 0, "chooses": False, "max_rows": max(config.requests)}
    shared |= {"target": str(find_target(target).directory), "draft": str(find_draft(draft).directory)}
    this_python = Path(sys.executable)
    plain: dict[str, dict[str, Any]] = {"plain": {"num_drafted": 0}}
    fixed: dict[str, dict[str, Any]] = {_size_name(n): {"num_drafted": n - 1} for n in config.block_sizes}
    chosen: dict[str, dict[str, Any]] = {"choice": {"chooses": True}, "lookup": {"chooses": True, "draft": None}}
    kinds = [("blockpilot", this_python, fixed | chosen), ("transformers", this_python, plain)]
    if config.vllm_python is not None:
        draft_of_vllm = without_selector(Path(shared["draft"]), config.output / "draft-without-selector")
        kinds.append(("vllm", config.vllm_python, _vllm(config, str(draft_of_vllm))))
    all_peers = [
        Peer(f"{kind}, {name}", python, shared | {"peer": kind} | drafts)
        for kind, python, by_name in kinds
        for name, drafts in by_name.items()
    ]
    if config.llama_bench is not None:
        program = {"peer": "llama.cpp", "program": str(config.llama_bench), "target": str(config.gguf)}
        all_peers.append(Peer("llama.cpp, plain", this_python, shared | program))
    return all_peers


def without_selector(draft: Path, folder: Path) -> Path:
    """DFlash draft without its candidate selector, written to `folder`; the draft itself if it has no selector over a
    separate vocabulary, or has convolutions.
    """
    model = load_draft(draft)
    if model.candidate_selector is None or model.vocabulary is None or model.options.conv_kernel_size:
        return draft
    options = {name: value for name, value in model.config.dflash_config.items() if not name.startswith("selector_")}
    save_draft(model.with_options(options), folder)
    return folder


def _vllm(config: PeersConfig, draft: str) -> dict[str, dict[str, Any]]:
    """Speculative configurations of vLLM by name; none for plain decoding."""
    lookups = {
        # As in vLLM's documentation.
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        "suffix": {"method": "suffix", "num_speculative_tokens": 32},
    }
    speculative: dict[str, Any] = {}
    for size in config.block_sizes:
        drafted = {"method": "dflash", "model": draft, "num_speculative_tokens": size - 1}
        speculative[_size_name(size)] = drafted if size > 1 else None
    speculative |= {name: lookups[name] for name in config.lookups}
    if config.vllm_export is not None:
        speculative["export"] = json.loads(config.vllm_export.read_text())
    eager = {"enforce_eager": config.enforce_eager}
    return {name: eager | {"speculative_config": options} for name, options in speculative.items()}


def _size_name(block_size: int) -> str:
    return f"B={block_size}" if block_size > 1 else "plain"


@contextmanager
def running(peer: Peer, log: Path) -> Iterator["Worker"]:
    """Run the peer's process until the end of the block; its output goes to `log`."""
    environment = os.environ | {"OMP_NUM_THREADS": str(peer.settings["threads"])}
    command: list[str | Path] = [peer.python, WORKER, json.dumps(peer.settings)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
    with process, _ended_with_this_process(process.pid):
        try:
            yield Worker(process, log)
        finally:
            _end_group(process)


@contextmanager
def _ended_with_this_process(group: int) -> Iterator[None]:
    """Kill a process group when this process ends or is killed: a shell waits for the end of its standard input."""
    command = ["sh", "-c", f"read _; kill -s KILL -- -{group}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as shell:
        try:
            yield
        finally:
            shell.kill()


def _end_group(process: "subprocess.Popen[str]") -> None:
    """End a process and its children, since vLLM's engine outlives its parent."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        os.killpg(process.pid, signal.SIGKILL)


class Worker:
    """A peer's loaded process, suspended while others work, since some peers spin for seconds after an answer."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log
        self._answer()

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> DecodedBatch:
        """Decode prompts together."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        print(json.dumps({"prompts": prompts, "num_tokens": num_tokens}), file=self._process.stdin, flush=True)
        return DecodedBatch(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"a peer has ended; its log: {self._log}")
        os.killpg(self._process.pid, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure(config: PeersConfig) -> dict[int, dict[str, list[DecodedBatch]]]:
    """Decoded batches by number of requests and name of the peer, in the same order for all peers."""
    measured: dict[int, dict[str, list[DecodedBatch]]] = defaultdict(lambda: defaultdict(list))
    tokenizer = AutoTokenizer.from_pretrained(find_target(config.pair.models[0]).directory)
    prompts = [list(prompt.encode(tokenizer)) for prompt in load_prompts(config.prompts)]
    config.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        workers = []
        for peer in peers(config):
            print(f"peers: loading {peer.name}", flush=True)
            log = config.output / f"{peer.name.replace(', ', '-')}.log"
            workers.append((peer, stack.enter_context(running(peer, log))))
        for num in config.requests:
            repeated = prompts * num * config.rounds
            batches = [repeated[i * num : (i + 1) * num] for i in range(config.rounds)]
            active = [(peer, worker) for peer, worker in workers if peer.takes(num)]
            for _, worker in active:
                worker.decode(batches[0], 4)
            for i, batch in enumerate(batches):
                for peer, worker in active[i % len(active) :] + active[: i % len(active)]:
                    measured[num][peer.name].append(worker.decode(batch, config.num_tokens))
                print(f"peers: {num} requests, {i + 1}/{len(batches)} batches", flush=True)
    return measured


def table(measured: dict[int, dict[str, list[DecodedBatch]]]) -> str:
    """Tokens per second and ratios to the first peer, a row per peer."""
    names = list(dict.fromkeys(name for by_peer in measured.values() for name in by_peer))
    rows = []
    for name in names:
        row = {"peer": name}
        for num, by_peer in measured.items():
            row[f"{num} at a time"] = _speed_and_ratio(by_peer.get(name), by_peer[names[0]])
        rows.append(row)
    return markdown(rows)


def _speed_and_ratio(batches: list[DecodedBatch] | None, baseline: list[DecodedBatch]) -> str:
    """Median speed, and median ratio to the baseline batch by batch; "-" for a peer without batches."""
    if not batches:
        return "-"
    ratio = median(batch.speed / first.speed for batch, first in zip(batches, baseline, strict=True))
    return f"{median(batch.speed for batch in batches):.1f} ({ratio:.2f})"


def keep(output: Path, text: str, measured: dict[int, dict[str, list[DecodedBatch]]]) -> None:
    """Write and print a table; write all batches, by number of requests and peer, to answers.json."""
    write_text(output / "table.md", text)
    answers = {
        num: {name: [batch._asdict() for batch in batches] for name, batches in by_peer.items()}
        for num, by_peer in measured.items()
    }
    write_text(output / "answers.json", json.dumps(answers))
    print(f"\n{text}")


def run(config: PeersConfig) -> None:
    """Measure, and print and write the table."""
    torch.set_num_threads(config.threads)
    measured = measure(config)
    title = f"{config.pair.models[0]}, {pick_dtype(config.pair.dtype, 'cpu')} on {device_name(torch.device('cpu'))}"
    text = f"{title}: tokens/s, and times the first row.\n\n{table(measured)}\n"
    keep(config.output, text, measured)


if __name__ == "__main__":
    main(PeersConfig, run)
