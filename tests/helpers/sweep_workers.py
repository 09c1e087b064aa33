"""A worker of a sweep that starts at once, for tests of how workers are lost."""

import os
import time
from collections.abc import Mapping, Sequence

from blockpilot.prompts.files import Prompt
from blockpilot.sweep.rows import Metadata, Outcome, SweepRow


class KnownRows:
    """It knows its rows by prompt, and takes as long for each task; one prompt ends its process."""

    def __init__(self, metadata: Metadata, rows: Mapping[str, SweepRow], fatal: str) -> None:
        self._metadata, self._rows, self._fatal = metadata, rows, fatal

    def load(self) -> Metadata:
        return self._metadata

    def sweep(self, prompts: Sequence[Prompt]) -> Outcome:
        time.sleep(0.3)
        if any(prompt.text == self._fatal for prompt in prompts):
            os._exit(1)
        return Outcome([self._rows[prompt.text] for prompt in prompts], [])
