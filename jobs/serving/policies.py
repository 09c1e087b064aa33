"""Policy of a replica: a small file beside the models, which another one replaces in place.

Serve's `user_config`, or a new champion of the registry, names it; the models and the requests in flight stay.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.common.registry import AUTO, CHAMPION, model_name
from jobs.serving.backends import Backend, PolicySource
from jobs.serving.champions import ChampionWatch
from jobs.serving.engine_loop import EngineLoop

log = logging.getLogger("ray.serve.blockpilot")


class PolicyInUse:
    """The policy of an engine loop, and the watch of the registry that may replace it. `target` is its pair's."""

    def __init__(self, target: str, backend: Backend, loop: EngineLoop) -> None:
        self.watch: ChampionWatch | None = None
        self._target, self._backend, self._loop = target, backend, loop
        self._named: Mapping[str, object] | None = None

    def stop(self) -> None:
        """Stop asking the registry; the policy stays."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None

    @property
    def status(self) -> dict[str, object]:
        """Its name and version, and what the watch follows and last met."""
        followed = {} if self.watch is None else {"follows": self.watch.name, "error": self.watch.error or None}
        return dict(self._named or {"name": "none"}) | followed

    def champion(self) -> tuple[int, bool]:
        """Version of the champion in use, 0 for none, and whether the registry's cannot be used."""
        return (0, False) if self.watch is None else (self.watch.number, bool(self.watch.error))

    def configure(self, user_config: Mapping[str, Any]) -> None:
        """Use another policy from the next prefill on; ValueError for one that is not there or cannot be used.

        user_config: `policy`, a block size, a directory, "untrained", "champion" or "auto"; of the last two also
        `store`, the MLflow store, `follow_s`, how often to look for another one, and `folder`, where it is copied to.
        A champion that the registry cannot give at the start is its last copy; with "auto" also what the backend
        decodes by until there is a champion.
        """
        self.stop()
        policy = user_config["policy"]
        if policy not in (AUTO, CHAMPION):
            self._use(policy)
            return
        name, folder = model_name(self._target), Path(user_config["folder"])
        watch = ChampionWatch(name, user_config["store"], folder, user_config["follow_s"], use=self._use)
        if watch.error and self._named is None and not watch.use_last_copy():
            if policy == CHAMPION:
                raise ValueError(watch.error)
            self._use_without_registry()
        self.watch = watch
        watch.follow()

    def _use_without_registry(self) -> None:
        *others, last = self._backend.without_registry
        for policy in others:
            try:
                return self._use(policy)
            except (ValueError, OSError) as error:
                log.info("%s", error)
        return self._use(last)

    def _use(self, policy: PolicySource, version: int = 0) -> None:
        """Put a policy to use; called on the thread that watches the registry, too."""
        self._backend.put(policy, self._loop)
        name = f"block size {policy}" if isinstance(policy, int) else str(policy)
        self._named = {"name": name, "version": version or None}
