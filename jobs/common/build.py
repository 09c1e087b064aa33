"""The running code: its git commit, and the versions of Python and of the libraries that results depend on."""

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path


@cache
def git_commit() -> str:
    """Commit of the running code, with -dirty for uncommitted changes; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """Versions of Python, torch and transformers."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")}
