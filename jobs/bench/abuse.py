"""Abuse of a server for some minutes, beside well-behaved clients: is what they were promised kept?

The server is this command's own, with two replicas, two API keys and a registry. Abusers send bodies that never end,
do not read their answers, leave early, ask for absurd things and send junk. Replicas are killed and stopped, the
registry goes away and comes back, champions change. Meanwhile clients with a key of their own ask for answers that
are known beforehand.

    python jobs/bench/abuse.py --minutes 10
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from blockpilot.evaluation.tables import markdown
from blockpilot.policy.store import load_policy
from blockpilot.prompts.files import load_prompts
from blockpilot.storage import write_text
from jobs.bench.abusers import Abuser
from jobs.bench.http_load import Clients, Received
from jobs.common.config import Config, main
from jobs.common.registry import Registry, Version

ROOT = Path(__file__).parents[2]
GOOD_KEY, BAD_KEY = "of-the-well-behaved", "of-the-abusers"
START_S, HEALTH_EVERY_S, HEALTH_PATIENCE_S, MEMORY_EVERY_S = 300.0, 1.0, 30.0, 5.0
PROCESSES = ("ServeReplica:blockpilot:gateway", "ServeReplica:blockpilot:smollm2")
POLICIES = tuple(str(ROOT / "workflows" / "policies" / name) for name in ("policy-step", "policy-class"))
LOST = "the replica with this request was lost"


class AbuseConfig(Config):
    """Length and size of the abuse, and the policies that take turns as champion."""

    minutes: float = Field(default=10.0, gt=0)
    num_clients: int = Field(default=3, ge=1)
    """Well-behaved ones."""
    num_abusers: int = Field(default=8, ge=0)
    policies: tuple[str, ...] = POLICIES
    """Directories of policies of the embedded pair."""
    fault_every_s: float = Field(default=20.0, gt=0)
    """Seconds between two faults."""
    seed: int = 0
    output: Path = Path("runs/abuse")


@dataclass
class Report:
    """Counts of what was sent, and what came of it."""

    good: Counter[str] = field(default_factory=Counter)
    """Answers to the well-behaved, by outcome: right, refused, on a lost replica, lost, wrong."""
    bad: Counter[str] = field(default_factory=Counter)
    """Abuse by kind, and the statuses that answered it."""
    faults: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """(seconds since the start, resident bytes of all such processes) by kind of process."""
    examples: list[str] = field(default_factory=list)
    """Answers that should not have been."""

    @property
    def kept(self) -> bool:
        """True if every promise was kept."""
        failed = (
            self.good["lost"] + self.good["wrong"] + sum("500" in kind.replace(",", " ").split() for kind in self.bad)
        )
        return not failed and max(self.health_s) <= 5


# --- the server ---


@contextmanager
def own_server(config: AbuseConfig, folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A server with its registry in `folder`, stopped at the end."""
    (folder / "keys").write_text(f"{GOOD_KEY}\n{BAD_KEY}\n")
    arguments = {
        "policy": "champion", "port": port, "num-actors": 2, "num-slots": 4, "max-queue": 28, "max-length": 1024,
        "api-key-file": folder / "keys", "registry-every-s": 2, "request-timeout-s": 60, "body-timeout-s": 5,
        "drain-s": 5, "output": folder / "serve",
    }  # fmt: skip
    flags = [str(part) for name, value in arguments.items() for part in (f"--{name}", value)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "server.log").open("wb") as log:
        command = [sys.executable, str(ROOT / "jobs" / "serve.py"), *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _store(folder: Path) -> str:
    return f"sqlite:///{folder.absolute() / 'mlflow.db'}"


def register(config: AbuseConfig, folder: Path) -> list[Version]:
    """Versions of the policies in a registry of their own; the first one is champion."""
    os.environ["MLFLOW_TRACKING_URI"] = _store(folder)  # where MLflow itself looks for what a version is made of
    registry, versions = Registry.open(), list[Version]()
    for directory in config.policies:
        target = load_policy(directory).info.pair.target
        with registry.log_run("abuse") as record:
            versions.append(registry.register_policy(directory, target=target, run_id=record.id, tags={}))
    registry.set_champion(versions[0])
    return versions


# --- the well-behaved, and who watches ---


class AbuseRun:
    """Everything that happens for `config.minutes`, on one event loop."""

    def __init__(self, config: AbuseConfig, folder: Path, port: int, versions: Sequence[Version], pid: int) -> None:
        self.report = Report()
        self._config, self._folder, self._port, self._versions, self._pid = config, folder, port, versions, pid
        self._dice = random.Random(config.seed)
        self._started = self._end = 0.0
        self._model = ""

    async def run(self) -> None:
        async with self._clients() as clients:
            await self._until_ready(clients)
            self._model = await clients.first_model()
            bodies = [self._body(i, prompt.text) for i, prompt in enumerate(load_prompts("demo")[:12])]
            known = [(body, await self._known(clients, body)) for body in bodies]
            self._started = time.monotonic()
            self._end = self._started + 60 * self._config.minutes
            async with asyncio.TaskGroup() as group:
                for number in range(self._config.num_clients):
                    group.create_task(self._behave(clients, known[number:] + known[:number]))
                for number in range(self._config.num_abusers):
                    abuser = Abuser(self._port, BAD_KEY, self._model, self._config.seed + number)
                    group.create_task(self._abuse(abuser))
                for watch in (self._faults, self._watch_health, self._watch_memory):
                    group.create_task(watch())

    def _clients(self) -> Clients:
        return Clients(f"http://127.0.0.1:{self._port}/v1", GOOD_KEY)

    async def _until_ready(self, clients: Clients) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ValueError):
                await clients.first_model()
                return
            await asyncio.sleep(1)
        raise ValueError(f"the server did not start: {self._folder / 'server.log'}")

    async def _known(self, clients: Clients, body: Mapping[str, Any]) -> str:
        """The answer before there is any abuse; raises ValueError where it is not whole."""
        received = await clients.send(body)
        if not received.whole:
            raise ValueError(f"the server does not answer before it is abused: {received.status} {received.error}")
        return received.text

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._end

    def _body(self, number: int, text: str) -> dict[str, Any]:
        message = [{"role": "user", "content": text}]
        sampling = {"temperature": number % 2, "seed": number}
        return {"model": self._model, "messages": message, "max_tokens": 24 + 4 * (number % 5)} | sampling

    async def _behave(self, clients: Clients, known: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        while not self._over:
            body, text = self._dice.choice(known)
            received = await clients.send(body)
            outcome = _outcome(received, text)
            self.report.good[outcome] += 1
            if outcome in ("lost", "wrong"):
                self.report.examples.append(f"{outcome}: {received.status} {received.error or received.text!r}")
            if outcome == "refused":
                await asyncio.sleep(received.retry_after_s)

    async def _watch_health(self) -> None:
        async with httpx.AsyncClient(timeout=HEALTH_PATIENCE_S) as http:
            while not self._over:
                started = time.monotonic()
                try:
                    await http.get(f"http://127.0.0.1:{self._port}/health")
                except httpx.HTTPError as error:
                    self.report.examples.append(f"health: {type(error).__name__}")
                    self.report.health_s.append(HEALTH_PATIENCE_S)
                else:
                    self.report.health_s.append(time.monotonic() - started)
                await asyncio.sleep(HEALTH_EVERY_S)

    async def _watch_memory(self) -> None:
        while not self._over:
            for kind in PROCESSES:
                resident = sum(_resident(pid) for pid in self._processes(kind))
                self.report.memory[kind].append((time.monotonic() - self._started, resident))
            await asyncio.sleep(MEMORY_EVERY_S)

    def _processes(self, kind: str) -> list[int]:
        """Processes below the server's whose title holds `kind`."""
        parents, titles = dict[int, int](), dict[int, str]()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    titles[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return [pid for pid, title in titles.items() if kind in title and self._is_below(pid, parents)]

    def _is_below(self, pid: int, parents: Mapping[int, int]) -> bool:
        while pid in parents and pid != self._pid:
            pid = parents[pid]
        return pid == self._pid

    async def _abuse(self, abuser: Abuser) -> None:
        while not self._over:
            self.report.bad[await abuser.abuse()] += 1

    # --- faults ---

    async def _faults(self) -> None:
        faults = (self._kill, self._swap, self._stop, self._outage)
        number = 0
        while not self._over:
            await asyncio.sleep(min(self._config.fault_every_s, max(0.0, self._end - time.monotonic())))
            if not self._over:
                await faults[number % len(faults)]()
                number += 1

    async def _kill(self) -> None:
        replica = self._dice.choice(self._processes(PROCESSES[-1]))
        os.kill(replica, signal.SIGKILL)
        self.report.faults["replica killed"] += 1

    async def _stop(self) -> None:
        replica = self._dice.choice(self._processes(PROCESSES[-1]))
        os.kill(replica, signal.SIGSTOP)
        self.report.faults["replica stopped for 10 s"] += 1
        await asyncio.sleep(10)
        with contextlib.suppress(ProcessLookupError):  # Serve may have replaced it
            os.kill(replica, signal.SIGCONT)

    async def _swap(self) -> None:
        version = self._versions[(self.report.faults["champion changed"] + 1) % len(self._versions)]
        await asyncio.to_thread(lambda: Registry.open(_store(self._folder)).set_champion(version))
        self.report.faults["champion changed"] += 1

    async def _outage(self) -> None:
        store, away = self._folder / "mlflow.db", self._folder / "mlflow.away"
        store.rename(away)
        store.write_bytes(b"no database " * 1000)
        self.report.faults["registry away for 10 s"] += 1
        await asyncio.sleep(10)
        away.replace(store)


def _outcome(received: Received, text: str) -> str:
    if received.whole:
        return "right" if received.text == text else "wrong"
    if received.status in (429, 503):
        return "refused"
    return "on a lost replica" if LOST in received.error else "lost"


def _resident(pid: int) -> int:
    """Resident bytes of a process; 0 for one that is gone."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


# --- reporting ---


def shown(report: Report) -> str:
    """The report as text."""
    rows = [{"what": f"well-behaved: {name}", "times": str(n)} for name, n in sorted(report.good.items())]
    rows += [{"what": f"abuse: {name}", "times": str(n)} for name, n in sorted(report.bad.items())]
    rows += [{"what": f"fault: {name}", "times": str(n)} for name, n in sorted(report.faults.items())]
    lines = [markdown(rows), f"/health: {len(report.health_s)} times, the slowest {max(report.health_s):.1f} s"]
    for kind, points in report.memory.items():
        thirds = [points[i * len(points) // 3 : (i + 1) * len(points) // 3] for i in range(3)]
        peaks = [max((resident for _, resident in third), default=0) / 2**20 for third in thirds]
        lines.append(f"memory of {kind}, peak MB by third of the time: {', '.join(f'{peak:.0f}' for peak in peaks)}")
    verdict = "every promise was kept" if report.kept else "a promise was broken"
    return "\n".join([*lines, *report.examples[:20], verdict])


def run(config: AbuseConfig) -> Report:
    """Print and write the report. Raises ValueError where the server does not start, or breaks a promise."""
    folder = config.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    versions = register(config, folder)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with own_server(config, folder, port) as server:
        bench = AbuseRun(config, folder, port, versions, server.pid)
        asyncio.run(bench.run())
    text = shown(bench.report)
    print(text)
    write_text(folder / "abuse.md", text + "\n")
    write_text(folder / "abuse.json", json.dumps(vars(bench.report)) + "\n")
    if not bench.report.kept:
        raise ValueError(f"a promise was broken; see {folder / 'abuse.md'}")
    return bench.report


if __name__ == "__main__":
    main(AbuseConfig, run)
