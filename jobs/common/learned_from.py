"""Training prompts of a policy, in a file next to it: evaluations can check held-out prompts without the sweep."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from blockpilot.storage import write_text

LEARNED_FROM_FILE = "learned_from.json"


class LearnedFrom(NamedTuple):
    """Training prompts, and the taus of fixed block sizes on them."""

    prompts: frozenset[str] = frozenset()
    """`prompt_key` of their texts."""
    taus: Mapping[float, Mapping[int, float]] = {}
    """tau over all of these prompts, by temperature and block size."""

    def write(self, folder: Path) -> None:
        """Write the file atomically."""
        content = {"prompts": sorted(self.prompts), "taus": self.taus}
        write_text(folder / LEARNED_FROM_FILE, json.dumps(content) + "\n")

    @staticmethod
    def read(folder: Path) -> "LearnedFrom":
        """The inverse of `write`; empty if there is no such file. Raises ValueError for a damaged file."""
        file = folder / LEARNED_FROM_FILE
        if not file.exists():
            return LearnedFrom()
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            taus = {
                float(temperature): {int(size): float(tau) for size, tau in curve.items()}
                for temperature, curve in content["taus"].items()
            }
            return LearnedFrom(frozenset(map(str, content["prompts"])), taus)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{file}: not a record of a policy's training data ({reason})") from None
