"""Jobs as processes that a test can kill, and searches for their descendants."""

import atexit
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from helpers.patience import wait_until

# Importing torch, transformers and Ray takes longer than most tests: jobs are forked from one process that has
# imported them, and MLflow.
_FORKS = multiprocessing.get_context("forkserver")
_JOBS = "evaluate", "serve", "sweep", "train", "train_draft"
_FORKS.set_forkserver_preload([*(f"jobs.{job}" for job in _JOBS), "helpers.preloaded"])


class Job:
    """A Python program in a separate process, as `python script arguments` would run it.

    Standard output and errors go to the file `output`.
    """

    def __init__(self, arguments: Sequence[object], *, cwd: Path, env: Mapping[str, str], output: Path) -> None:
        self.output = output
        output.write_bytes(b"")
        command = [str(argument) for argument in arguments]
        self._process = _FORKS.Process(target=_run, args=(command, str(cwd), dict(env), str(output)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, limit_s: float) -> int:
        """The exit code. TimeoutError, with the program's output, after limit_s without new output."""
        wait_until(lambda: self.poll() is not None, limit_s, lambda: self.log, progress=self._size)
        code = self.poll()
        assert code is not None
        return code

    def wait_for(self, condition: Callable[[], object], limit_s: float = 300) -> None:
        """Return once the condition holds. Errors of `wait`; AssertionError if the program ends before that."""

        def holds() -> bool:
            ended = self.poll() is not None
            held = bool(condition())
            assert held or not ended, f"it ended before that:\n{self.log}"
            return held

        wait_until(holds, limit_s, lambda: self.log, progress=self._size)

    def _size(self) -> int:
        return self.output.stat().st_size

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.join()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    @property
    def log(self) -> str:
        """Output so far."""
        return self.output.read_text()


def _run(command: list[str], cwd: str, env: dict[str, str], output: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    written = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(written, stream)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process skips them; one of them ends Ray's cluster


def descendants(ancestor: int, name: str) -> list[int]:
    """Pids of descendants of `ancestor` whose command line contains `name`."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_text()
        except (OSError, IndexError):  # it has just ended
            continue

    def is_below(pid: int) -> bool:
        return pid in parents and (parents[pid] == ancestor or is_below(parents[pid]))

    return sorted(pid for pid, command in commands.items() if name in command and is_below(pid))


def is_running(pid: int) -> bool:
    """False once the process has ended, even as a zombie."""
    try:
        return bool((Path("/proc") / str(pid) / "cmdline").read_text())
    except OSError:
        return False


class Listener(NamedTuple):
    """A listening TCP socket."""

    command: str
    port: int
    on_loopback: bool


def listeners(ancestor: int) -> list[Listener]:
    """Listening sockets of all descendants of `ancestor`, once for each process that has them open (Linux)."""
    sockets = []
    for pid in descendants(ancestor, ""):
        folder = Path("/proc") / str(pid)
        try:
            links = [os.readlink(link) for link in (folder / "fd").iterdir()]
            command = (folder / "cmdline").read_text().replace("\0", " ").strip()
            tables = [(folder / "net" / name).read_text().splitlines() for name in ("tcp", "tcp6")]
        except OSError:  # it has just ended
            continue
        held = {link[8:-1] for link in links if link.startswith("socket:[")}
        for columns in map(str.split, chain.from_iterable(tables)):
            if columns[3] == "0A" and columns[9] in held:  # the state LISTEN
                address, port = columns[1].split(":")
                on_loopback = address in ("0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F")
                sockets.append(Listener(command, int(port, 16), on_loopback))
    return sockets
