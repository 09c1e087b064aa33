"""How long tests wait for others: until nothing has happened for long, however busy the machine is.

A limit is in seconds of a machine that does nothing else. It is longer by one factor (BLOCKPILOT_TEST_PATIENCE, by
default 3), since it only ends what hangs. While more processes want to run than there are cores, its time passes as
much slower as each of them does.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

FACTOR = float(os.environ.get("BLOCKPILOT_TEST_PATIENCE", "3"))
LOAD = Path("/proc/loadavg")
MOST_PROGRESS = 10  # limits in all: what goes on and on without an end hangs, too


def patient(seconds: float) -> float:
    """A limit for waits that cannot be polled, such as a client's timeout."""
    return seconds * FACTOR


class Patience:
    """Limit of a wait: `left` is false when it has passed. Poll it, for its time is counted between two polls."""

    def __init__(self, limit_s: float) -> None:
        self._left_s, self._last = limit_s, time.monotonic()

    @property
    def left(self) -> bool:
        now = time.monotonic()
        self._left_s -= (now - self._last) / crowd()
        self._last = now
        return self._left_s > 0


def crowd() -> float:
    """Processes that want to run for each core, at least 1."""
    try:
        running = int(LOAD.read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return 1.0
    return max(1.0, running / (os.cpu_count() or 1))


def wait_until(
    condition: Callable[[], object],
    limit_s: float,
    said: Callable[[], object] = lambda: "",
    *,
    progress: Callable[[], object] = lambda: None,
    factor: float = FACTOR,
    poll_s: float = 0.02,
) -> None:
    """Return once the condition holds. TimeoutError, with what was `said`, after so long without progress.

    A factor of 1 is for tests of how long something takes.
    """
    limit_s *= factor
    whole, patience, before = Patience(limit_s * MOST_PROGRESS), Patience(limit_s), progress()
    while not condition():
        if (now := progress()) != before:
            patience, before = Patience(limit_s), now
        if not (patience.left and whole.left):
            raise TimeoutError(f"nothing new in {limit_s:g} s, or more on a busy machine:\n{said()}")
        time.sleep(poll_s)
