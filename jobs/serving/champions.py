"""Watch of a registry's champion: a thread polls the registry and puts every new champion to use.

An error changes nothing: the policy in use stays when the registry does not answer, when files cannot be read, when
the champion is made for other models, and when it fails as it is tried. A copy of every champion in use stays on
disk, so that a replica can start while the registry is away. One that is refused is copied anew by the next look, for
it may be damaged; a champion that is refused as it has just come is tried again after the registry has named another.
"""

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from blockpilot.storage import without_secrets
from jobs.common.registry import Registry, Version

log = logging.getLogger("ray.serve.blockpilot")


class ChampionWatch:
    """The champion of a registered model in an MLflow store. Looks at once; after `follow`, every `every_s` seconds.

    `use` takes a new champion's directory and version number, and raises for one that it refuses. Copies
    lie below `folder`. `error` is what the last look met, "" for nothing; `number` is the version in use, 0 for none.
    """

    def __init__(self, name: str, store: str, folder: Path, every_s: float, use: Callable[[Path, int], None]) -> None:
        self.name, self.error, self.number = name, "", 0
        self._store, self._folder, self._every_s, self._use = store, folder, every_s, use
        self._registry: Registry | None = None
        self._leave = threading.Event()
        self._refused: tuple[Version, str] | None = None
        self._using = threading.Lock()  # held while a champion is put to use
        self.look()

    def follow(self) -> None:
        """Look again and again, on a thread of its own, until `stop`."""
        threading.Thread(target=self._run, name="champion", daemon=True).start()

    def stop(self) -> None:
        """Stop looking: no champion is put to use after this, not by a look that has begun either."""
        with self._using:
            self._leave.set()

    def _run(self) -> None:
        while not self._leave.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Put the champion to use if it has changed."""
        try:
            self._registry = self._registry or Registry.open(self._store)
            version = self._registry.champion(self.name)
            if self._refused is not None and _same(version, self._refused[0]):
                raise ValueError(self._refused[1])
            self._refused = None
            if version.number != self.number:
                self._put_to_use(version, self._registry)
            self.error = ""
        except Exception as error:  # whatever it is, the thread goes on
            self._registry = None
            if (message := without_secrets(str(error))) != self.error:
                log.warning("the policy stays as it is: %s", message)
            self.error = message

    def _put_to_use(self, version: Version, registry: Registry) -> None:
        is_new = not _directory(version, self._folder).exists()
        copy = copy_of(registry, version, self._folder)
        with self._using:
            if self._leave.is_set():
                return
            try:
                self._use(copy, version.number)
            except Exception as error:
                shutil.rmtree(copy, ignore_errors=True)  # it may be damaged
                if is_new and isinstance(error, ValueError):
                    self._refused = version, str(error)
                raise
            self.number = version.number
        log.info("new champion", extra={"policy": version.name, "version": version.number})

    def use_last_copy(self) -> bool:
        """Put the latest copied champion to use, without the registry; False if none can be used."""
        for directory in sorted(self._folder.glob(f"{self.name}-*-*"), key=_number, reverse=True):
            try:
                self._use(directory, _number(directory))
            except Exception as error:  # that of another pair, a damaged one
                log.warning("%s cannot be used: %s", directory, error)
                continue
            self.number = _number(directory)
            return True
        return False


def copy_of(registry: Registry, version: Version, folder: Path) -> Path:
    """Directory of a version's files below `folder`; copied on the first call."""
    directory = _directory(version, folder)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):  # replicas of one machine may share the folder
        return directory if directory.exists() else registry.download(version, directory)


def _directory(version: Version, folder: Path) -> Path:
    return folder.absolute() / f"{version.name}-{(version.run_id or 'none')[:8]}-{version.number}"


def _same(one: Version, other: Version) -> bool:
    """Tags aside: numbers begin anew where a model is deleted and registered again."""
    return one[:3] == other[:3]


def _number(directory: Path) -> int:
    number = directory.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
