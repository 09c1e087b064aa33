"""Another driver that takes an output over."""

import json
from pathlib import Path

from jobs.common.lease import LEASE_FILE


def take_over(output: Path) -> None:
    """What a driver elsewhere writes that found lease 1 not renewed."""
    lease = {"holder": "x", "host": "elsewhere", "pid": 7, "beat": 0}
    (output / f"{LEASE_FILE}.2").write_text(json.dumps(lease))
    (output / LEASE_FILE).unlink()
