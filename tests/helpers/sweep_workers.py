"""A sweep worker that starts immediately, for tests of lost workers."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from blockpilot.prompts.files import Prompt
from blockpilot.sweep.rows import Metadata, Outcome, SweepRow


class KnownRows:
    """Returns given rows by prompt, after the same time for each task; the prompt `fatal` ends its process."""

    def __init__(self, metadata: Metadata, rows: Mapping[str, SweepRow], fatal: str) -> None:
        self._metadata, self._rows, self._fatal = metadata, rows, fatal

    def load(self) -> Metadata:
        return self._metadata

    def sweep(self, prompts: Sequence[Prompt]) -> Outcome:
        time.sleep(0.3)
        if any(prompt.text == self._fatal for prompt in prompts):
            os._exit(1)
        return Outcome([self._rows[prompt.text] for prompt in prompts], [])


class StickyError(KnownRows):
    """After the prompt `fatal` every call of the process fails, as after an error of CUDA."""

    _is_broken = False

    def sweep(self, prompts: Sequence[Prompt]) -> Outcome:
        self._is_broken |= any(prompt.text == self._fatal for prompt in prompts)
        if self._is_broken:
            raise RuntimeError("device-side assert")
        return Outcome([self._rows[prompt.text] for prompt in prompts], [])


class FailsToLoad(KnownRows):
    """Fails to load until `num_failures` workers have, which are counted in a file."""

    def __init__(self, metadata: Metadata, rows: Mapping[str, SweepRow], count: Path, num_failures: int) -> None:
        super().__init__(metadata, rows, "")
        self._count, self._num_failures = count, num_failures

    def load(self) -> Metadata:
        num = len(self._count.read_text()) if self._count.exists() else 0
        if num < self._num_failures:
            self._count.write_text("x" * (num + 1))
            raise MemoryError("of the device")
        return self._metadata
