"""Progress of a job as lines of text, for terminals and logs alike."""

import time
from collections.abc import Iterator

LINE_INTERVAL_S = 5


class Progress:
    """Progress lines every few seconds and at the end: count, seconds left and rate."""

    def __init__(self, what: str, total: int, unit: str, done: int = 0) -> None:
        """done: units of `total` finished before; included in the count, but not in the rate."""
        self._what, self._total, self._unit = what, total, unit
        self._before = self._done = done
        self._started = self._last_line = time.monotonic()

    def advance(self, num: int = 1, words: str = "") -> None:
        """Count `num` finished units; `words` are appended to the line."""
        self._done += num
        now = time.monotonic()
        if now - self._last_line < LINE_INTERVAL_S and self._done < self._total:
            return
        self._last_line = now
        rate = (self._done - self._before) / max(now - self._started, 1e-9)
        left_s = (self._total - self._done) / rate if rate else 0.0
        parts = [f"{self._done}/{self._total} {self._unit}", f"{left_s:.0f} s left", f"{rate:.2f} a second", words]
        print(f"{self._what}: {', '.join(filter(None, parts))}", flush=True)


def show_progress(what: str, written: Iterator[int], num_shards: int, unit: str = "tokens") -> None:
    """Show the progress of writing shards until `written` ends, which yields the number of units of each shard."""
    progress, total, started = Progress(what, num_shards, "shards"), 0, time.monotonic()
    for count in written:
        total += count
        progress.advance(words=f"{total:,} {unit}, {total / (time.monotonic() - started):.0f} {unit}/s")
