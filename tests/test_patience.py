"""Waits of the tests: what they count as time, and as progress."""

import itertools
import time
from pathlib import Path

import pytest

from helpers import patience
from helpers.patience import crowd, wait_until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves when somebody sleeps."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.mark.parametrize(("running", "times"), [(1, 1), (2, 1), (8, 4)])
def test_time_passes_slower_where_more_processes_run_than_there_are_cores(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, running: int, times: int
) -> None:
    load = tmp_path / "loadavg"
    load.write_text(f"0.50 0.40 0.30 {running}/400 1234\n")
    monkeypatch.setattr(patience, "LOAD", load)
    monkeypatch.setattr(patience.os, "cpu_count", lambda: 2)
    assert crowd() == times
    with pytest.raises(TimeoutError, match=r"nothing new in 30 s, or more on a busy machine:\nits log"):
        wait_until(lambda: False, 10, lambda: "its log", factor=3, poll_s=0.1)
    assert clock[0] == pytest.approx(30 * times, abs=0.5)


def test_progress_starts_the_limit_anew_but_not_for_ever(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "crowd", lambda: 1.0)
    wait_until(lambda: clock[0] > 45, 10, progress=lambda: clock[0] // 9, factor=1, poll_s=0.5)
    numbers = itertools.count()
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, 10, progress=lambda: next(numbers), factor=1, poll_s=0.5)
    assert clock[0] == pytest.approx(45 + 10 * patience.MOST_PROGRESS, abs=2)
