"""Errors of jobs about invalid arguments."""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
import ray

from jobs.common.config import ConfigT, main


def error_of(config: type[ConfigT], run: Callable[[ConfigT], object], arguments: str) -> str:
    """Error on stderr about invalid arguments; asserts one line, exit status 2, and that Ray has not started."""
    stderr = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["job.py", *arguments.split()])
        with pytest.raises(SystemExit) as exited:
            main(config, run)
    error = stderr.getvalue()
    assert exited.value.code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not ray.is_initialized()
    return error
