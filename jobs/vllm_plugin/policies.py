"""Policy of the plug-in: a directory, none, one block size, or what is followed: the registry's champion, a file."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field

from blockpilot.control.controller import FixedPolicy
from blockpilot.control.cost import StepPrice, read_price
from blockpilot.pairs.table import split_revision
from blockpilot.policy.learned import LearnedPolicy
from blockpilot.policy.store import load_policy
from blockpilot.types import Prefill
from jobs.common.config import Config, Place
from jobs.common.registry import CHAMPION, UNTRAINED, model_name, tracking_uri
from jobs.serving.champions import ChampionWatch
from jobs.vllm_plugin.choice import Chooser

SETTINGS_KEY = "blockpilot"
log = logging.getLogger("vllm.blockpilot")


class PluginSettings(Config):
    """Settings of the plug-in: `additional_config["blockpilot"]` of vLLM."""

    policy: str = CHAMPION
    """What chooses: "champion" of the registry, the directory of a policy of kind `prompt`, "untrained" (running
    means at the price of a step), one block size, or a file that holds one of the last three: it is followed."""
    target: str | None = None
    """Name of the target that policies are made for; by default vLLM's model."""
    draft: str | None = None
    """Name of the draft; by default vLLM's."""
    store: str | None = None
    """MLflow store of the champion; by default MLFLOW_TRACKING_URI."""
    registry_every_s: float = Field(default=20.0, gt=0)
    """Seconds between two looks for a new champion."""
    copies: Path = Path("runs/vllm")
    """Folder for copies of champions."""
    price: Place | None = None
    """File of a price of a step (`price.json` of a sweep by vLLM): drafts are bought at the load of the moment, none
    where they do not pay. Without it a policy's block size holds at any load."""
    steps: Path | None = None
    """File that load and seconds of every step without prompts are added to, one JSON array a line."""
    reports: bool = False
    """Put into every output what its step drafted (`StepReport`), for jobs/serve.py."""


class ServedPair(NamedTuple):
    """What a policy must fit."""

    target: str
    draft: str
    vocab_size: int
    num_drafted: int
    """num_speculative_tokens of vLLM."""


class PolicyFile:
    """A file that holds the directory of a policy, "untrained" or one block size, read again when it has changed.

    `use` takes its text. What it raises for the first is raised; what it raises later is logged, and changes nothing.
    """

    def __init__(self, path: Path, use: Callable[[str], None]) -> None:
        self._path, self._use = path, use
        self._seen = self._state()
        use(self._path.read_text().strip())

    def look(self) -> None:
        """Read the file if it is another one than at the last look: some microseconds if not."""
        try:
            if (state := self._state()) != self._seen:
                self._seen = state
                self._use(self._path.read_text().strip())
        except Exception as error:  # requests go on
            log.warning("%s: the policy stays as it is: %s", self._path, error)

    def stop(self) -> None:
        """Nothing runs between looks."""

    def _state(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns


def follow_policy(
    settings: PluginSettings, pair: ServedPair, use: Callable[[Chooser], None]
) -> ChampionWatch | PolicyFile | None:
    """Put the policy to use, now and whenever it is another one; what watches the registry or the file, if any.

    Raises ValueError for a policy that cannot be used or had.
    """
    price = None if settings.price is None else read_price(settings.price)
    if settings.policy == CHAMPION:
        put = partial(_use_champion, price, pair, use)
        store, name = settings.store or tracking_uri(), model_name(pair.target)
        watch = ChampionWatch(name, store, settings.copies, settings.registry_every_s, put)
        if watch.error and not watch.use_last_copy():
            raise ValueError(watch.error)
        watch.follow()
        return watch
    if Path(settings.policy).is_file():
        return PolicyFile(Path(settings.policy), lambda policy: use(chooser(policy, price, pair)))
    use(chooser(settings.policy, price, pair))
    return None


def chooser(policy: str | Path, price: StepPrice | None, pair: ServedPair) -> Chooser:
    """Choice by a policy, which is its directory, "untrained", or one block size; ValueError for one that cannot be
    used.
    """
    if policy == UNTRAINED:
        if price is None:
            raise ValueError("policy 'untrained': chooses by the price of a step; `price` is needed")
        return Chooser.of(None, price, pair.num_drafted)
    if str(policy).isdecimal():
        return Chooser.of(FixedPolicy(int(str(policy))), None, pair.num_drafted)
    learned = load_policy(policy)
    _check(learned, pair)
    return Chooser.of(learned, price, pair.num_drafted)  # type: ignore[arg-type]


def _use_champion(
    price: StepPrice | None, pair: ServedPair, use: Callable[[Chooser], None], directory: Path, version: int
) -> None:
    use(chooser(directory, price, pair))
    log.info("champion: version %d of %s", version, model_name(pair.target))


def _check(policy: LearnedPolicy, pair: ServedPair) -> None:
    """Raise ValueError for a policy that does not fit vLLM's pair. vLLM tells names, not revisions."""
    info = policy.info
    if info.kind != "prompt":
        raise ValueError(
            f"policy of kind {info.kind!r}: reads the draft's context vectors, which no hook of vLLM shows; "
            "allowed: 'prompt'"
        )
    names = tuple(split_revision(name)[0] for name in (pair.target, pair.draft))
    if (info.pair.target, info.pair.draft) != names:
        raise ValueError(
            f"policy made for target {info.pair.target} with draft {info.pair.draft}; this is {names[0]} with "
            f"{names[1]} (`target` and `draft` name what vLLM loads from directories)"
        )
    if info.candidates[-1] - 1 > pair.num_drafted:
        raise ValueError(
            f"policy with block size {info.candidates[-1]}: num_speculative_tokens is {pair.num_drafted}; "
            f"needed: {info.candidates[-1] - 1}"
        )
    trial: Any = policy(Prefill(torch.zeros(pair.vocab_size), None, 1))  # ValueError for another vocabulary
    assert trial in info.candidates
