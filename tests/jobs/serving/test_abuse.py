"""Abuse of a server next to well-behaved clients: every kind is answered, and the clients get what was promised.

Abusers send bodies that never end, do not read their answers, leave early, ask for absurd things and send junk. The
long test also kills and stops replicas, takes the registry away and changes champions, for ten minutes:
`pytest -m soak tests/jobs/serving/test_abuse.py`.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import load_policy
from blockpilot.prompts.files import load_prompts
from helpers import abusers
from helpers.abusers import Abuser
from helpers.api import app_of, idle, over_http, replica_of
from helpers.policies import register
from helpers.processes import descendants
from helpers.servers import ROOT, Server, configured
from jobs.bench.http_load import Clients, Received
from jobs.common.registry import Registry, Version
from jobs.serving import gateway
from jobs.serving.api import Limits
from jobs.serving.clients import ApiKeys

GOOD_KEY, BAD_KEY = "of-the-well-behaved", "of-the-abusers"
MINUTES, NUM_CLIENTS, NUM_ABUSERS, FAULT_EVERY_S = 10.0, 3, 8, 20.0
HEALTH_EVERY_S, HEALTH_PATIENCE_S, MEMORY_EVERY_S = 1.0, 30.0, 5.0
SLOWEST_HEALTH_S, MOST_GROWTH = 5.0, 1.2
PROCESSES = ("ServeReplica:blockpilot:gateway", "ServeReplica:blockpilot:smollm2")
POLICIES = tuple(str(ROOT / "workflows" / "policies" / name) for name in ("policy-step", "policy-class"))
LOST = "the replica with this request was lost"


def test_abusers_are_answered_and_get_no_internal_error(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"READER_S": 0.1, "LEAVE_S": 0.1, "NUM_AT_ONCE": 20, "GRAMMARS": {"wrong": abusers.GRAMMARS["wrong"]}}
    for name, value in settings.items():
        monkeypatch.setattr(abusers, name, value)
    monkeypatch.setattr(gateway, "LOOK_S", 0.2)
    limits = Limits(max_body_bytes=2**16, timeout_s=5, body_timeout_s=0.3)
    outcomes: Counter[str] = Counter()

    async def abuse(root: str) -> None:
        abuser = Abuser(int(root.rpartition(":")[2]), "a-key", "target", seed=1)
        for _ in range(60):
            outcomes[await abuser.abuse()] += 1

    with replica_of(tiny_pair, num_slots=2, max_length=500, max_queue=6) as replica:
        app = app_of(replica, keys=ApiKeys.of(("a-key", "another")), limits=limits)
        with over_http(app) as root:
            asyncio.run(abuse(root))
            idle(replica)
    kinds = {"absurd: 400", "junk: 400", "leave: left", "oversized: 413", "slow body: 408", "slow reader: 200"}
    kinds |= {"grammar: wrong 400", "slow bodies: 408", "endless head: 400"}
    assert kinds <= outcomes.keys()
    assert not [kind for kind in outcomes if "500" in kind or "Error" in kind]


@pytest.mark.soak
def test_what_the_well_behaved_were_promised_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", _store(tmp_path))  # MLflow itself looks there for a version's files
    versions = registered()
    (tmp_path / "keys").write_text(f"{GOOD_KEY}\n{BAD_KEY}\n")
    settings = {
        "policy": "champion", "resources": {"num_actors": 2}, "num_slots": 4, "max_queue": 28, "max_length": 1024,
        "api_key_file": str(tmp_path / "keys"), "registry_every_s": 2, "request_timeout_s": 60, "body_timeout_s": 5,
        "drain_s": 5, "output": str(tmp_path / "serve"),
    }  # fmt: skip
    with configured(settings, tmp_path) as server:
        run = AbuseRun(tmp_path, server, versions)
        asyncio.run(run.run())
    report = run.report
    print(report)
    assert report.good["right"] > 20
    assert not report.good["lost"] + report.good["wrong"], report.examples
    assert not [kind for kind in report.bad if "500" in kind.replace(",", " ").split()]
    assert set(report.faults) == {"replica killed", "champion changed", "replica stopped", "registry away"}
    assert max(report.health_s) <= SLOWEST_HEALTH_S
    for points in report.memory.values():
        first, last = (max(part) for part in (points[: len(points) // 3], points[-(len(points) // 3) :]))
        assert last <= MOST_GROWTH * first


@dataclass
class Report:
    """Counts of requests and faults, and their outcomes."""

    good: Counter[str] = field(default_factory=Counter)
    """Answers to the well-behaved, by outcome: right, refused, on a lost replica, lost, wrong."""
    bad: Counter[str] = field(default_factory=Counter)
    """Abuse by kind and by the statuses that answered it."""
    faults: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Resident bytes by kind of process, summed over its processes."""
    examples: list[str] = field(default_factory=list)
    """Lost and wrong answers, and failed health checks."""


def _store(folder: Path) -> str:
    return f"sqlite:///{folder.absolute() / 'mlflow.db'}"


def registered() -> list[Version]:
    """Versions of the policies, registered in a separate registry; the first one is champion."""
    registry = Registry.open()
    versions = [register(registry, directory, load_policy(directory).info.pair) for directory in POLICIES]
    registry.set_champion(versions[0])
    return versions


# --- well-behaved clients, and watchers ---


class AbuseRun:
    """Clients, abusers, faults and watchers, for MINUTES on one event loop."""

    def __init__(self, folder: Path, server: Server, versions: Sequence[Version]) -> None:
        self.report, self._dice, self._end = Report(), random.Random(0), 0.0
        self._folder, self._server, self._versions = folder, server, versions

    async def run(self) -> None:
        async with Clients(self._server.url, GOOD_KEY) as clients:
            model, port = await clients.first_model(), int(self._server.root.rpartition(":")[2])
            bodies = [_body(model, i, prompt.text) for i, prompt in enumerate(load_prompts("demo")[:12])]
            known_answers = [(body, await self._known(clients, body)) for body in bodies]
            self._end = time.monotonic() + 60 * MINUTES
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_CLIENTS):
                    group.create_task(self._behave(clients, known_answers[number:] + known_answers[:number]))
                for number in range(NUM_ABUSERS):
                    group.create_task(self._abuse(Abuser(port, BAD_KEY, model, number)))
                for watch in (self._faults, self._watch_health, self._watch_memory):
                    group.create_task(watch())

    async def _known(self, clients: Clients, body: Mapping[str, Any]) -> str:
        """Answer before any abuse; raises ValueError if it is not complete."""
        received = await clients.send(body)
        if not received.whole:
            raise ValueError(f"the server does not answer before it is abused: {received.status} {received.error}")
        return received.text

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._end

    async def _behave(self, clients: Clients, known_answers: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        while not self._over:
            body, text = self._dice.choice(known_answers)
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
                    await http.get(f"{self._server.root}/health")
                except httpx.HTTPError as error:
                    self.report.examples.append(f"health: {type(error).__name__}")
                    self.report.health_s.append(HEALTH_PATIENCE_S)
                else:
                    self.report.health_s.append(time.monotonic() - started)
                await asyncio.sleep(HEALTH_EVERY_S)

    async def _watch_memory(self) -> None:
        while not self._over:
            for kind in PROCESSES:
                resident = sum(_resident(pid) for pid in descendants(self._server.process.pid, kind))
                self.report.memory[kind].append(resident)
            await asyncio.sleep(MEMORY_EVERY_S)

    async def _abuse(self, abuser: Abuser) -> None:
        while not self._over:
            self.report.bad[await abuser.abuse()] += 1

    # --- faults ---

    async def _faults(self) -> None:
        faults = (self._kill, self._swap, self._stop, self._outage)
        number = 0
        while not self._over:
            await asyncio.sleep(min(FAULT_EVERY_S, max(0.0, self._end - time.monotonic())))
            if not self._over:
                await faults[number % len(faults)]()
                number += 1

    async def _kill(self) -> None:
        replica = self._dice.choice(descendants(self._server.process.pid, PROCESSES[-1]))
        os.kill(replica, signal.SIGKILL)
        self.report.faults["replica killed"] += 1

    async def _stop(self) -> None:
        replica = self._dice.choice(descendants(self._server.process.pid, PROCESSES[-1]))
        os.kill(replica, signal.SIGSTOP)
        self.report.faults["replica stopped"] += 1
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
        self.report.faults["registry away"] += 1
        await asyncio.sleep(10)
        away.replace(store)


def _body(model: str, number: int, text: str) -> dict[str, Any]:
    sampling = {"temperature": number % 2, "seed": number, "max_tokens": 24 + 4 * (number % 5)}
    return {"model": model, "messages": [{"role": "user", "content": text}]} | sampling


def _outcome(received: Received, text: str) -> str:
    if received.whole:
        return "right" if received.text == text else "wrong"
    if received.status in (429, 503):
        return "refused"
    return "on a lost replica" if LOST in received.error else "lost"


def _resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
