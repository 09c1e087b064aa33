"""Watcher of a registry's champion: a thread polls the registry and applies every new champion.

The current policy stays after an error: the registry does not answer, files cannot be read, the champion is for other
models, or its smoke test fails. Copies of used champions stay on disk, so that a replica can start while the
registry is unreachable. A refused copy may be damaged, so the next poll downloads it again; if a fresh download is
refused, too, the champion is not tried again until the registry names another one.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from blockpilot.storage import without_secrets
from jobs.common.registry import Registry, Version, is_missing

log = logging.getLogger("ray.serve.blockpilot")


class ChampionWatch:
    """Watcher of the champion of a registered model. Polls once at construction, and every `every_s`
    seconds after `follow`.

    `use` takes a new champion's directory and version number, and raises to refuse it. Copies are in `folder`.
    `error` is the error of the last poll or ""; `number` is the version in use, 0 for none.
    """

    def __init__(self, name: str, store: str, folder: Path, every_s: float, use: Callable[[Path, int], None]) -> None:
        self.name, self.error, self.number = name, "", 0
        self.is_absent = False
        """True if there is neither a champion in use nor one in the registry."""
        self._store, self._folder, self._every_s, self._use = store, folder.absolute(), every_s, use
        self._used: Path | None = None  # the copy in use; numbers restart in a new store
        self._registry: Registry | None = None
        self._leave = threading.Event()
        self._refused: tuple[Version, str] | None = None
        self._using = threading.Lock()  # held while a champion is applied
        self.look()

    def follow(self) -> None:
        """Poll periodically on a separate thread, until `stop`."""
        threading.Thread(target=self._run, name="champion", daemon=True).start()

    def stop(self) -> None:
        """Stop polling; no champion is applied after this, not even by a running poll."""
        with self._using:
            self._leave.set()

    def _run(self) -> None:
        while not self._leave.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Poll the registry, and apply the champion if it has changed."""
        try:
            self.is_absent = False
            version = self._find()
            if self._refused is not None and _same(version, self._refused[0]):
                raise ValueError(self._refused[1])
            self._refused = None
            if self._used != _directory(version, self._folder):
                self._apply(version)
            self.error = ""
        except Exception as error:  # the thread must continue after any error
            self._registry = None
            if (message := without_secrets(str(error))) != self.error:
                log.warning("the policy stays as it is: %s", message)
            self.error = message

    def _find(self) -> Version:
        """The registry's champion; raises ValueError, and sets `is_absent`, if there is none."""
        if is_missing(self._store):  # importing MLflow and creating the store would take seconds
            self.is_absent = not self.number
            raise ValueError(f"MLflow store {self._store}: not there yet, so there is no champion")
        registry = self._registry = self._registry or Registry.open(self._store)
        try:
            return registry.champion(self.name)
        except ValueError:
            has_champion = registry.has_model(self.name) and registry.find_champion(self.name) is not None
            self.is_absent = not (has_champion or self.number)
            raise

    def _apply(self, version: Version) -> None:
        assert self._registry is not None
        is_new = not _directory(version, self._folder).exists()
        copy = copy_of(self._registry, version, self._folder)
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
            self.number, self._used = version.number, copy
            os.utime(copy)  # for `use_last_copy`
        log.info("new champion", extra={"policy": version.name, "version": version.number})

    def use_last_copy(self) -> bool:
        """Apply the last used local copy of a champion, without the registry; False if none can be used."""
        copies = [path for path in self._folder.glob(f"{self.name}-*-*") if path.is_dir()]
        for directory in sorted(copies, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                self._use(directory, _number(directory))
            except Exception as error:  # a damaged copy, or one for another pair
                log.warning("%s cannot be used: %s", directory, error)
                continue
            self.number, self._used, self.is_absent = _number(directory), directory, False
            return True
        return False


def copy_of(registry: Registry, version: Version, folder: Path) -> Path:
    """Directory of a version's files in `folder`; the first call downloads them."""
    directory = _directory(version, folder)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):  # replicas on one machine may share the folder
        return directory if directory.exists() else registry.download(version, directory)


def _directory(version: Version, folder: Path) -> Path:
    return folder.absolute() / f"{version.name}-{(version.run_id or 'none')[:8]}-{version.number}"


def _same(version: Version, refused: Version) -> bool:
    """True for the same version; compares run ids, since numbers restart if a model is registered again."""
    return version[:3] == refused[:3]


def _number(directory: Path) -> int:
    number = directory.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
