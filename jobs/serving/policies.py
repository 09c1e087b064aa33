"""Policy of a replica, which can be replaced without reloading models or interrupting requests.

Serve's `user_config`, or a new champion of the registry, selects it.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from blockpilot.control.acceptance import UNTRAINED as UNTRAINED_PRIOR
from blockpilot.control.acceptance import AcceptanceModel, Prior
from blockpilot.control.controller import Controller, FixedPolicy
from blockpilot.control.cost import StepPrice
from blockpilot.engine.generate import generate
from blockpilot.evaluation.pricing import holds_here
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy, StepPolicy
from blockpilot.policy.store import load_policy
from jobs.common.prices import kept_price
from jobs.common.registry import AUTO, CHAMPION, UNTRAINED, model_name
from jobs.serving.champions import ChampionWatch
from jobs.serving.engine_loop import EngineLoop, on_passing_thread
from jobs.serving.models import check_without_draft

TRIAL_TOKENS = 8
PRICE_CONTEXT, PRICE_ROWS = 256, 4  # of the steps timed at the start; few, since requests wait for it
PolicySource = int | str | Path
"""A block size, "untrained", or the directory of a policy."""


class PolicyInUse:
    """Policy of an engine loop that decodes with `pair`, and the watcher of the registry that may replace it."""

    def __init__(self, pair: Pair, loop: EngineLoop) -> None:
        self.watch: ChampionWatch | None = None
        self._pair, self._loop = pair, loop
        self._named: Mapping[str, object] | None = None
        self._price: StepPrice | None = None  # of this device

    def stop(self) -> None:
        """Stop watching the registry; the policy stays."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None

    @property
    def status(self) -> dict[str, object]:
        """Name and version of the policy, and the registered model and last error of the watcher."""
        followed = {} if self.watch is None else {"follows": self.watch.name, "error": self.watch.error or None}
        return dict(self._named or {"name": "none"}) | followed

    def champion(self) -> tuple[int, bool]:
        """Version of the champion in use (0 for none), and True if the registry's champion cannot be used."""
        watch = self.watch
        return (0, False) if watch is None else (watch.number, bool(watch.error) and not watch.is_absent)

    def configure(self, user_config: Mapping[str, Any]) -> None:
        """Use another policy from the next prefill on; raises ValueError if it does not exist or cannot be used.

        user_config: `policy` is a block size, a directory, "untrained", "champion" or "auto". The last two also need
        `store` (the MLflow store), `follow_s` (seconds between polls) and `folder` (for copies). If the registry is
        unreachable and no champion is in use, the last copy of one is used. "auto" without a champion is "untrained",
        which every champion has beaten. A pair without a draft has only "untrained" and block size 1.
        """
        self.stop()
        policy = user_config["policy"]
        if not self._pair.has_draft:
            check_without_draft(self._pair.id.target, policy)
            policy = UNTRAINED if policy == AUTO else policy
        if policy not in (AUTO, CHAMPION):
            self._use(policy)
            return
        name, folder = model_name(self._pair.id.target), Path(user_config["folder"])
        watch = ChampionWatch(name, user_config["store"], folder, user_config["follow_s"], use=self._use)
        has_champion = self._named is not None and self._named["version"] is not None
        if watch.error and not has_champion and not watch.use_last_copy():
            if policy == AUTO:
                self._use(UNTRAINED)
            elif self._named is None:
                raise ValueError(watch.error)
        self.watch = watch
        watch.follow()

    def _use(self, policy: PolicySource, version: int = 0) -> None:
        """Apply a policy; also called on the thread of the registry watcher."""
        on_passing_thread(partial(self._apply, policy))
        name = f"block size {policy}" if isinstance(policy, int) else str(policy)
        self._named = {"name": name, "version": version or None}

    def _apply(self, policy: PolicySource) -> None:
        if isinstance(policy, int):
            self._loop.use(FixedPolicy(policy), self._controller(None))
        elif policy == UNTRAINED:
            self._loop.use(None, self._controller(self._price_for(None)))
        else:
            learned = load_policy(policy)
            learned.check(self._pair)
            try_out(self._pair, learned)
            price = self._price_for(learned.price)
            if isinstance(learned, StepPolicy):
                self._loop.use(None, self._controller(price, learned))
            else:
                self._loop.use(learned, self._controller(price))

    def _controller(self, price: StepPrice | None, prior: Prior = UNTRAINED_PRIOR) -> Controller:
        return Controller(AcceptanceModel(self._pair.block_size - 1, prior), price)

    def _price_for(self, price: StepPrice | None) -> StepPrice | None:
        """Step cost: the policy's if it holds on this device, otherwise the one used so far, otherwise the policy's.

        Steps are timed only for the first policy, before any request: timing during requests would slow them and
        would be inaccurate.
        """
        if price is not None and holds_here(price, self._pair):
            self._price = price
        elif self._price is None and self._named is None:
            rows = min(self._loop.engine.num_slots, PRICE_ROWS)
            self._price = kept_price(self._pair, rows, PRICE_CONTEXT)
        return self._price or price


def try_out(pair: Pair, policy: LearnedPolicy) -> None:
    """Smoke test: decode 8 tokens with a policy; raises ValueError if it fails."""
    try:
        for _ in generate(pair, (0, 1), policy=policy, max_new_tokens=TRIAL_TOKENS, stop_token_ids=frozenset()):
            pass
    except Exception as error:
        raise ValueError(f"policy that fails when it is tried ({type(error).__name__}: {error})") from error
