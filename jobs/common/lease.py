"""Lease of an output directory: one driver at a time writes there, on any file system.

The holder renews a small file every BEAT_S seconds. A new driver that finds a lease watches it for PATIENCE_S: a
renewed lease belongs to a live driver, and the new one is refused; otherwise the holder is dead, and the new driver
takes over. A dead process in the same PID namespace is recognised by its id, without waiting.

The file is `lease.json`; a driver that takes over lease number n creates the file of number n + 1, and the highest
number is valid. Since a file is created exclusively (storage.create), at most one driver takes over.
"""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from blockpilot.storage import Place, create, delete, file_names, join, read_bytes, without_secrets, write_bytes

LEASE_FILE = "lease.json"
BEAT_S = 2.0
PATIENCE_S = 6.0
T = TypeVar("T")


class Lease:
    """A lease of `place`, held inside a `with` block. Raises ValueError if another driver holds it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._me = {"holder": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()} | _pid_namespace()
        self._number = 0
        self._leave = threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        dead = self._dead()
        self._number = max(dead, default=0) + 1
        if not create(self._file(self._number), self._content(0)):
            raise ValueError(f"output {self.place}: another driver has just begun to write there")
        rivals = {number: content for number, content in self._leases().items() if number != self._number}
        if rivals.items() - dead.items():  # a holder resumed, or several drivers took over different files
            delete(self._file(self._number))
            raise ValueError(f"output {self.place}: {_name(rivals[max(rivals)])} is writing there, too; try again")
        for number in rivals:
            delete(self._file(number))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._leave.set()
        self._thread.join()
        if self._is_mine(self._leases()):
            delete(self._file(self._number))

    def check(self) -> None:
        """Raise ValueError if another driver has taken over the lease, for example while this one was suspended."""
        leases = self._leases()
        if not self._lost and not (self._is_mine(leases) and max(leases) == self._number):
            self._lost = f"{_name(leases[max(leases)])} has taken over" if leases else "its lease is gone"
        if self._lost:
            raise ValueError(f"output {self.place}: {self._lost}; this driver stops")

    def while_held(self, results: Iterator[T]) -> Iterator[T]:
        """Yield the results, with a `check` before each."""
        for result in results:
            self.check()
            yield result

    def _renew(self) -> None:
        beat = 0
        while not self._leave.wait(BEAT_S):
            beat += 1
            try:
                self.check()
                write_bytes(self._file(self._number), self._content(beat))
            except OSError:  # a full or absent disk: the next write of a result raises
                continue
            except ValueError:  # lost: the next `check` raises again
                return

    def _dead(self) -> dict[int, bytes]:
        """The leases in the directory, all of dead drivers. Raises ValueError for a live driver."""
        leases = self._leases()
        possibly_live = [content for content in leases.values() if not _is_dead(content)]
        if not possibly_live:
            return leases
        name = _name(possibly_live[-1])
        directory = without_secrets(os.fspath(self.place))
        print(f"output {directory}: leased to {name}; waiting {PATIENCE_S:g} s to see whether it is alive")
        time.sleep(PATIENCE_S)
        renewed = self._leases()
        if renewed.items() - leases.items():
            raise ValueError(
                f"output {self.place}: {_name(renewed[max(renewed)])} is writing there; end it, or choose another"
            )
        return renewed

    def _leases(self) -> dict[int, bytes]:
        """Content of the leases in the directory by their numbers, ascending."""
        names = map(
            re.compile(rf"{re.escape(LEASE_FILE)}(?:\.(\d+))?").fullmatch, file_names(self.place, recursive=False)
        )
        leases = {}
        for number in sorted(int(name[1] or 1) for name in names if name):
            with suppress(FileNotFoundError):  # released meanwhile
                leases[number] = read_bytes(self._file(number))
        return leases

    def _is_mine(self, leases: Mapping[int, bytes]) -> bool:
        return _read(leases.get(self._number, b"")).get("holder") == self._me["holder"]

    def _file(self, number: int) -> str:
        return join(self.place, LEASE_FILE if number == 1 else f"{LEASE_FILE}.{number}")

    def _content(self, beat: int) -> bytes:
        return json.dumps(self._me | {"beat": beat}).encode() + b"\n"


def _pid_namespace() -> dict[str, str]:
    """Boot id and PID namespace, within which process ids are comparable; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return {"boot": boot, "pid_namespace": os.readlink("/proc/self/ns/pid")}
    except OSError:  # not Linux
        return {"boot": "", "pid_namespace": ""}


def _is_dead(content: bytes) -> bool:
    """True if the holder ran in this PID namespace and has ended."""
    lease, machine = _read(content), {"host": socket.gethostname()} | _pid_namespace()
    if not machine.items() <= lease.items() or type(lease.get("pid")) is not int:
        return False
    try:
        os.kill(lease["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # a process of another user
        return False
    return False


def _read(content: bytes) -> dict[str, Any]:
    """Fields of a lease; empty for a damaged one."""
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _name(content: bytes) -> str:
    lease = _read(content)
    return f"the driver with process id {lease.get('pid', '?')} on {lease.get('host', '?')}"
