"""Waits of tests, with time limits that adapt to the load of the machine.

A limit is in seconds of an idle machine, times a factor (BLOCKPILOT_TEST_PATIENCE, by default 3), since it only ends
what hangs. While more processes are runnable than there are cores, its time passes proportionally slower.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

FACTOR = float(os.environ.get("BLOCKPILOT_TEST_PATIENCE", "3"))
LOAD = Path("/proc/loadavg")
MOST_PROGRESS = 10  # longest wait, in limits: progress without an end is a hang, too


def patient(seconds: float) -> float:
    """Limit of a wait that cannot be polled, such as a client's timeout."""
    return seconds * FACTOR


class Patience:
    """Limit of a wait: `left` is False after it. Must be polled: time is counted between two polls."""

    def __init__(self, limit_s: float) -> None:
        self._left_s, self._last = limit_s, time.monotonic()

    @property
    def left(self) -> bool:
        now = time.monotonic()
        self._left_s -= (now - self._last) / crowd()
        self._last = now
        return self._left_s > 0


def crowd() -> float:
    """Runnable processes per core, at least 1."""
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
    """Return once the condition holds. TimeoutError, with `said()`, after the limit without progress.

    A factor of 1 is for tests of durations.
    """
    limit_s *= factor
    whole, patience, before = Patience(limit_s * MOST_PROGRESS), Patience(limit_s), progress()
    while not condition():
        if (now := progress()) != before:
            patience, before = Patience(limit_s), now
        if not (patience.left and whole.left):
            raise TimeoutError(f"nothing new in {limit_s:g} s, or more on a busy machine:\n{said()}")
        time.sleep(poll_s)
