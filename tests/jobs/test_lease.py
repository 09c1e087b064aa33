"""Lease of an output: one driver writes at a time; a dead one is replaced, a living one is not disturbed."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockpilot.storage import file_names, write_text
from helpers.leases import take_over
from helpers.patience import patient, wait_until
from helpers.processes import Job
from helpers.s3 import s3_server
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

RACE = """
import multiprocessing, os, sys, time
from jobs.common import lease
place, kind, num = sys.argv[1], sys.argv[2], int(sys.argv[3])
lease.BEAT_S, lease.PATIENCE_S = 0.05, float(sys.argv[4])
fork = multiprocessing.get_context("fork")
if kind == "after a dead one" and os.fork() == 0:
    lease.Lease(place).__enter__()
    os._exit(0)
time.sleep(0.5)
start, inside, refused = fork.Barrier(num), fork.Value("i"), fork.Value("i")
def drive():
    mine = lease.Lease(place)
    start.wait()
    try:
        with mine:
            inside.value += 1
            while inside.value + refused.value < num:
                time.sleep(0.01)
            mine.check()
    except ValueError as error:
        assert "another driver has just begun" in str(error) or "is writing there" in str(error), error
        with refused.get_lock():
            refused.value += 1
drivers = [fork.Process(target=drive) for _ in range(num)]
for driver in drivers:
    driver.start()
for driver in drivers:
    driver.join()
print(inside.value, "inside,", refused.value, "refused;", os.listdir(place))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    monkeypatch.setattr(lease, "PATIENCE_S", patient(0.5))


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[Job]:
    """Another process that holds the lease; killed when the block ends."""
    holder = Job(["-c", HOLDER, folder], cwd=folder, env=os.environ, output=folder.with_suffix(".said"))
    holder.wait_for(lambda: "held\n" in holder.log)
    yield holder
    holder.kill()


def test_a_living_holder_is_not_disturbed_and_a_killed_one_is_succeeded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold(tmp_path) as holder:
        for location in (tmp_path, tmp_path.as_uri()):
            with pytest.raises(ValueError, match=f"process id {holder.pid} on .* is writing there"):
                Lease(location).__enter__()
        assert json.loads((tmp_path / LEASE_FILE).read_text())["pid"] == holder.pid
    assert (tmp_path / LEASE_FILE).exists()
    monkeypatch.setattr(lease, "PATIENCE_S", 3600.0)
    with Lease(tmp_path) as driver_lease:
        driver_lease.check()


@pytest.mark.parametrize(
    "content", ['{"holder": "x", "host": "a-lost-host", "pid": 1, "beat": 5}', "", "[]", '{"holder": 1}']
)
def test_a_lease_of_a_lost_host_or_a_damaged_one_is_taken_over_after_a_wait(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LEASE_FILE).write_text(content)
    with Lease(tmp_path) as driver_lease:
        assert [path.name for path in tmp_path.iterdir()] == [f"{LEASE_FILE}.2"]
        driver_lease.check()
    assert not list(tmp_path.iterdir())
    output = capsys.readouterr().out
    assert f"; waiting {lease.PATIENCE_S:g} s" in output
    assert "lost" not in content or "leased to the driver with process id 1 on a-lost-host" in output


def test_a_holder_that_slept_learns_that_it_was_succeeded(tmp_path: Path) -> None:
    with hold(tmp_path) as sleeper:
        os.kill(sleeper.pid, signal.SIGSTOP)
        with Lease(tmp_path) as driver_lease:
            os.kill(sleeper.pid, signal.SIGCONT)
            assert sleeper.wait(20) == 1
            driver_lease.check()
            assert f"process id {os.getpid()} on {socket.gethostname()} has taken over" in sleeper.log
    assert not (tmp_path / LEASE_FILE).exists()


@pytest.mark.parametrize("kind", ["none before", "after a dead one"])
def test_of_many_that_start_at_once_one_gets_in(kind: str, tmp_path: Path) -> None:
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        command = ["-c", RACE, folder, kind, "8", patient(0.5)]
        race = Job(command, cwd=tmp_path, env=os.environ, output=tmp_path / f"{i}.said")
        assert race.wait(60) == 0, race.log
        assert race.log.splitlines()[-1] == "1 inside, 7 refused; []", race.log


def test_of_many_that_start_at_once_on_an_object_store_one_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores have no exclusive creation: the last write wins, and all drivers read it back."""
    num, held_leases = 6, list[Lease]()
    start, all_decided = threading.Barrier(num), threading.Barrier(num)
    with s3_server(monkeypatch) as bucket:

        def drive() -> None:
            driver_lease = Lease(f"{bucket}/output")
            start.wait()
            with contextlib.suppress(ValueError), driver_lease:
                held_leases.append(driver_lease)
                all_decided.wait()
                driver_lease.check()
                return
            all_decided.wait()

        drivers = [threading.Thread(target=drive) for _ in range(num)]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join()
        assert len(held_leases) == 1
        assert file_names(bucket) == []


def lease_of_another(pid_namespace: str, beat: int) -> str:
    """Lease of a driver whose process id does not exist here."""
    with subprocess.Popen(["true"]) as process:
        pass
    return json.dumps(
        Lease("x")._me | {"holder": "x", "pid": process.pid, "pid_namespace": pid_namespace, "beat": beat}
    )


def test_a_process_id_of_another_namespace_says_nothing(tmp_path: Path) -> None:
    """Living holder with an unknown process id: containers with one host name do not see each other's processes."""
    stop_event = threading.Event()

    def renew() -> None:
        for beat in itertools.count():
            write_text(tmp_path / LEASE_FILE, lease_of_another("pid:[1]", beat))
            if stop_event.wait(0.05):
                return

    holder = threading.Thread(target=renew)
    holder.start()
    try:
        wait_until((tmp_path / LEASE_FILE).exists, 10)
        with pytest.raises(ValueError, match="is writing there; end it"):
            Lease(tmp_path).__enter__()
    finally:
        stop_event.set()
        holder.join()


def test_a_lease_that_is_gone_is_lost(tmp_path: Path) -> None:
    """Missing lease counts as lost: another driver took it over and has finished, or the output was deleted."""
    with Lease(tmp_path) as driver_lease:
        (tmp_path / LEASE_FILE).unlink()
        for _ in range(2):
            with pytest.raises(ValueError, match="its lease is gone; this driver stops"):
                driver_lease.check()
            (tmp_path / LEASE_FILE).write_text(lease_of_another("", 1))
    assert (tmp_path / LEASE_FILE).exists()


def test_results_come_while_the_lease_is_held(tmp_path: Path) -> None:
    with Lease(tmp_path) as driver_lease:
        results = driver_lease.while_held(iter(range(3)))
        assert next(results) == 0
        take_over(tmp_path)
        with pytest.raises(ValueError, match="process id 7 on elsewhere has taken over"):
            next(results)
