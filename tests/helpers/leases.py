"""A second driver that takes over an output."""

import json
from pathlib import Path

from jobs.common.lease import LEASE_FILE


def take_over(output: Path) -> None:
    """Write lease 2 of a driver on another host, as if lease 1 had not been renewed."""
    lease = {"holder": "x", "host": "elsewhere", "pid": 7, "beat": 0}
    (output / f"{LEASE_FILE}.2").write_text(json.dumps(lease))
    (output / LEASE_FILE).unlink()
