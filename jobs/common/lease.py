"""Lease of an output directory: one driver at a time writes there, on any file system.

The holder renews a small file every BEAT_S seconds. A driver that finds one watches it for PATIENCE_S: a lease that
is renewed belongs to a driver that lives, and the newcomer is refused; one that is not belongs to a dead driver and
is taken over. A dead driver of this host is told by its process id, without a wait.
"""

import json
import os
import socket
import threading
import time
import uuid
from types import TracebackType
from typing import Any

from blockpilot.storage import Place, delete, is_file, join, read_bytes, write_text

LEASE_FILE = "lease.json"
BEAT_S = 2.0
PATIENCE_S = 6.0


class Lease:
    """A lease of `place`, held inside a `with` block. Raises ValueError where another driver holds it."""

    def __init__(self, place: Place) -> None:
        self.place, self._file = place, join(place, LEASE_FILE)
        self._me = {"holder": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._leave = threading.Event()
        self._lost_to: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        found = self._read()
        if found is not None and not _is_dead(found):
            print(f"output {self.place}: leased to {_name(found)}; waiting {PATIENCE_S:g} s to see whether it lives")
            time.sleep(PATIENCE_S)
            if (again := self._read()) is not None and again != found:
                raise ValueError(f"output {self.place}: {_name(again)} is writing there; end it, or choose another")
        self._write(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._leave.set()
        self._thread.join()
        if self._lost_to is None:
            delete(self._file)

    def check(self) -> None:
        """Raise ValueError if another driver has taken the lease over, as after a long sleep of this one."""
        if self._lost_to is not None:
            raise ValueError(f"output {self.place}: {_name(self._lost_to)} has taken over; this driver stops")

    def _renew(self) -> None:
        beat = 0
        while not self._leave.wait(BEAT_S):
            beat += 1
            try:
                found = self._read()
                if found is not None and found["holder"] != self._me["holder"]:
                    self._lost_to = found
                    return
                self._write(beat)
            except OSError:  # a full or absent disk: what is written there next says so
                continue

    def _read(self) -> dict[str, Any] | None:
        """The lease there; None for none, and for a file that is none."""
        if not is_file(self._file):
            return None
        try:
            found = json.loads(read_bytes(self._file))
        except (FileNotFoundError, ValueError):  # released meanwhile; damaged
            return None
        return found if isinstance(found, dict) and self._me.keys() <= found.keys() else None

    def _write(self, beat: int) -> None:
        write_text(self._file, json.dumps(self._me | {"beat": beat}) + "\n")


def _is_dead(lease: dict[str, Any]) -> bool:
    """True if the holder ran on this host and does not any more."""
    if lease["host"] != socket.gethostname():
        return False
    try:
        os.kill(lease["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    return False


def _name(lease: dict[str, Any]) -> str:
    return f"the driver with process id {lease['pid']} on {lease['host']}"
