"""A Ray cluster of one head node, beside those that jobs start."""

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
from pathlib import Path
from typing import NamedTuple

import httpx

from helpers.patience import patient, wait_until

RAY = str(Path(sys.executable).with_name("ray"))


class HeadNode(NamedTuple):
    """A head node; `ray_tmpdir` is the RAY_TMPDIR of processes that take it for the machine's latest cluster."""

    pid: int
    dashboard: str
    ray_tmpdir: str


@contextmanager
def head_node(environment: Mapping[str, str]) -> Iterator[HeadNode]:
    folder = tempfile.mkdtemp(prefix="bp")  # short, for Ray puts sockets below it
    gcs, dashboard, client, agent = free_ports()
    address = f"http://127.0.0.1:{dashboard}"
    command = [RAY, "start", "--head", "--block", "--num-cpus", "4", "--port", str(gcs)]
    command += ["--dashboard-port", str(dashboard), "--dashboard-agent-listen-port", str(agent)]
    command += ["--ray-client-server-port", str(client)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    head = subprocess.Popen(command, env={**environment, "RAY_TMPDIR": folder}, **quiet)

    def is_up() -> bool:
        assert head.poll() is None
        return answers(f"{address}/api/version") and answers(f"http://127.0.0.1:{agent}/api/healthz")

    try:
        wait_until(is_up, 60, poll_s=0.1)
        yield HeadNode(head.pid, address, folder)
    finally:
        head.terminate()  # with --block it takes its processes along
        head.wait(timeout=patient(60))
        shutil.rmtree(folder, ignore_errors=True)


def free_ports() -> list[int]:
    """Four ports below those that Ray gives to its workers (10002 to 19999)."""
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
