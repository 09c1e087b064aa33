"""Server processes, started as a user starts them, for tests over HTTP."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from helpers.patience import FACTOR, patient, wait_until
from helpers.processes import Job

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 120
RUN = "import json, sys; from jobs.serve import ServeConfig, run; run(ServeConfig(**json.loads(sys.argv[1])))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@dataclass
class Server:
    """A running server process; `root` is its address."""

    process: Job
    root: str
    key: str = ""

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.root}/v1"

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def model(self, name: str) -> dict[str, Any]:
        """A model's entry in /health."""
        health = httpx.get(f"{self.root}/health", timeout=patient(30), headers=self.authorization).json()
        entry: dict[str, Any] = health["models"][name]
        return entry

    def until(
        self, name: str, wanted: Mapping[str, object], limit_s: float = 30, factor: float = FACTOR
    ) -> dict[str, Any]:
        """A model's entry in /health once it has these values; limits as in `wait_until`."""
        entry: dict[str, Any] = {}

        def holds() -> bool:
            entry.clear()
            entry.update(self.model(name))
            return all(entry.get(key) == value for key, value in wanted.items())

        wait_until(
            holds, limit_s, lambda: f"{entry}, wanted: {dict(wanted)}\n{self.process.log}", factor=factor, poll_s=0.1
        )
        return entry


@contextmanager
def serving(
    arguments: list[str], folder: Path, port: int, host: str = "127.0.0.1", **variables: str
) -> Iterator[Server]:
    """Server of a command line, ended by SIGTERM; `variables` are added to its environment."""
    # Ray would also start idle workers, which no replica can use because of its environment.
    alone = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_prestart_worker_first_driver": "0"}
    environment = os.environ | alone | variables
    process = Job(arguments, cwd=folder, env=environment, output=folder / f"server-{port}.log")
    try:
        process.wait_for(lambda: "serving" in process.log, START_LIMIT_S)
        yield Server(process, f"http://{host}:{port}", variables.get("BLOCKPILOT_API_KEY", ""))
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def configured(config: Mapping[str, Any], folder: Path, **variables: str) -> Iterator[Server]:
    """Server with these fields of a ServeConfig."""
    port = free_port()
    with serving(["-c", RUN, json.dumps({**config, "port": port})], folder, port, **variables) as server:
        yield server
