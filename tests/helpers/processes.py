"""Finding the processes of a job, for tests that kill them."""

from pathlib import Path


def descendants(ancestor: int, name: str) -> list[int]:
    """Pids below `ancestor` whose command line holds `name`."""
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
