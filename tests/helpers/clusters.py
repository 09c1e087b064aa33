"""A Ray cluster of one head node, separate from those that jobs start."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from helpers.patience import patient, wait_until
from jobs.common.cluster import NUM_STARTS, STARTED_LATE

RAY = str(Path(sys.executable).with_name("ray"))


@contextmanager
def head_node(environment: Mapping[str, str]) -> Iterator[str]:
    """Address of a new cluster's jobs API. Retries if the machine is too busy for Ray's time limit."""
    folder = tempfile.mkdtemp(prefix="bp")  # a short path: Ray puts sockets below it
    log = Path(folder) / "log"
    try:
        for starts_left in reversed(range(NUM_STARTS)):
            head, dashboard, agent = _start(environment, folder, log)
            wait_until(partial(_is_up, head, dashboard, agent), 60, log.read_text, poll_s=0.1)
            if head.poll() is None:
                break
            assert starts_left, log.read_text()
            assert STARTED_LATE in log.read_text(), log.read_text()
        try:
            yield dashboard
        finally:
            head.terminate()  # with --block it also ends its processes
            head.wait(timeout=patient(60))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(environment: Mapping[str, str], folder: str, log: Path) -> "tuple[subprocess.Popen[bytes], str, str]":
    """Head process, and the addresses of its dashboard and of its agent."""
    gcs, dashboard, client, agent = free_ports()
    command = [RAY, "start", "--head", "--block", "--num-cpus", "4", "--port", str(gcs)]
    command += ["--dashboard-port", str(dashboard), "--dashboard-agent-listen-port", str(agent)]
    command += ["--ray-client-server-port", str(client)]
    with log.open("wb") as output:
        output_options = {"stdout": output, "stderr": subprocess.STDOUT}
        head = subprocess.Popen(command, env={**environment, "RAY_TMPDIR": folder}, **output_options)
    return head, f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{agent}"


def _is_up(head: "subprocess.Popen[bytes]", dashboard: str, agent: str) -> bool:
    """True if dashboard and agent answer, or the process has ended."""
    if head.poll() is not None:
        return True
    return answers(f"{dashboard}/api/version") and answers(f"{agent}/api/healthz")


def free_ports() -> list[int]:
    """Four free ports, below those of Ray's workers (10002 to 19999)."""
    sockets: list[socket.socket] = []
    for port in random.sample(range(6000, 10000), k=200):
        with contextlib.suppress(OSError):
            sockets.append(socket.create_server(("127.0.0.1", port)))
        if len(sockets) == 4:
            break
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def answers(url: str) -> bool:
    try:
        token = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}  # set for all tests by conftest.py
        return httpx.get(url, headers=token).status_code == 200
    except httpx.TransportError:
        return False
