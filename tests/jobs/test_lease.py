"""One driver writes to an output at a time: the dead are succeeded, the living are not disturbed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.patience import patient
from jobs.common import lease
from jobs.common.lease import LEASE_FILE, Lease

HOLDER = """
import sys, time
from jobs.common import lease
lease.BEAT_S = 0.1
with lease.Lease(sys.argv[1]) as held:
    print("held", flush=True)
    while True:
        time.sleep(0.1)
        try:
            held.check()
        except ValueError as error:
            print(error)
            raise SystemExit(1)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "PATIENCE_S", patient(1.0))


@contextlib.contextmanager
def hold(place: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lease; killed when the block ends."""
    command = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lease_is_gone_with_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with Lease(tmp_path / "output"):
            assert (tmp_path / "output" / LEASE_FILE).exists()
        assert not list((tmp_path / "output").iterdir())


@pytest.mark.parametrize("kind", ["path", "uri"])
def test_the_living_holder_is_not_disturbed(kind: str, tmp_path: Path) -> None:
    with hold(tmp_path) as holder:
        with pytest.raises(ValueError, match=f"process id {holder.pid} on .* is writing there"):
            Lease(str(tmp_path) if kind == "path" else tmp_path.as_uri()).__enter__()
        assert json.loads((tmp_path / LEASE_FILE).read_text())["pid"] == holder.pid


def test_a_killed_holder_is_succeeded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold(tmp_path):
        pass
    assert (tmp_path / LEASE_FILE).exists()
    monkeypatch.setattr(lease, "PATIENCE_S", 3600.0)
    with Lease(tmp_path) as mine:
        mine.check()


def test_a_holder_of_a_lost_host_is_succeeded_after_a_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"holder": "x", "host": "a-lost-host", "pid": 1, "beat": 5}
    (tmp_path / LEASE_FILE).write_text(json.dumps(found))
    with Lease(tmp_path) as mine:
        mine.check()
    waiting = f"waiting {lease.PATIENCE_S:.0f} s"
    assert f"leased to the driver with process id 1 on a-lost-host; {waiting}" in capsys.readouterr().out


def test_a_holder_that_slept_learns_that_it_was_succeeded(tmp_path: Path) -> None:
    with hold(tmp_path) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        with Lease(tmp_path) as mine:
            sleeper.send_signal(signal.SIGCONT)
            assert sleeper.wait(patient(20)) == 1
            mine.check()
            assert sleeper.stdout is not None
            assert f"process id {os.getpid()} on {socket.gethostname()} has taken over" in sleeper.stdout.read()
    assert not (tmp_path / LEASE_FILE).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"holder": 1}'])
def test_a_damaged_lease_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / LEASE_FILE).write_text(content)
    with Lease(tmp_path):
        assert json.loads((tmp_path / LEASE_FILE).read_text())["pid"] == os.getpid()
