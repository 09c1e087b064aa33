"""Policy of a replica: a small file beside the models, which another one replaces in place.

Serve's `user_config`, or a new champion of the registry, names it; the models and the requests in flight stay.
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
from blockpilot.evaluation.pricing import holds_here, measure_price
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy, StepPolicy
from blockpilot.policy.store import load_policy
from jobs.common.registry import AUTO, CHAMPION, UNTRAINED, model_name
from jobs.serving.champions import ChampionWatch
from jobs.serving.engine_loop import EngineLoop, on_passing_thread
from jobs.serving.models import check_without_draft

TRIAL_TOKENS = 8
PRICE_CONTEXT, PRICE_ROWS = 256, 4  # tokens, and rows at most, of the steps timed at the start: requests wait for it
PolicySource = int | str | Path
"""A block size, "untrained", or the directory of a policy."""


class PolicyInUse:
    """The policy of an engine loop that decodes with `pair`, and the watch of the registry that may replace it."""

    def __init__(self, pair: Pair, loop: EngineLoop) -> None:
        self.watch: ChampionWatch | None = None
        self._pair, self._loop = pair, loop
        self._named: Mapping[str, object] | None = None
        self._price: StepPrice | None = None  # of this device

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
        A champion that the registry cannot give at the start is its last copy. With "auto" and no champion it is
        "untrained": a champion has beaten that. A pair without a draft has no other policies but block size 1.
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
        if watch.error and self._named is None and not watch.use_last_copy():
            if policy == CHAMPION:
                raise ValueError(watch.error)
            self._use(UNTRAINED)
        self.watch = watch
        watch.follow()

    def _use(self, policy: PolicySource, version: int = 0) -> None:
        """Put a policy to use; called on the thread that watches the registry, too."""
        on_passing_thread(partial(self._put_to_use, policy))
        name = f"block size {policy}" if isinstance(policy, int) else str(policy)
        self._named = {"name": name, "version": version or None}

    def _put_to_use(self, policy: PolicySource) -> None:
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

    def _price_for(self, own: StepPrice | None) -> StepPrice | None:
        """A policy's own price where that was measured on such a device, or else the one that is known of this.

        It is measured for the first policy only, before any request: timing beside requests would slow them and be
        wrong.
        """
        if own is not None and holds_here(own, self._pair):
            self._price = own
        elif self._price is None and self._named is None:
            rows = min(self._loop.engine.num_slots, PRICE_ROWS)
            self._price = measure_price(self._pair, rows, PRICE_CONTEXT)
        return self._price or own


def try_out(pair: Pair, policy: LearnedPolicy) -> None:
    """Smoke test: decode 8 tokens with a policy; ValueError for one that fails where it decides."""
    try:
        for _ in generate(pair, (0, 1), policy=policy, max_new_tokens=TRIAL_TOKENS, stop_token_ids=frozenset()):
            pass
    except Exception as error:
        raise ValueError(f"policy that fails when it is tried ({type(error).__name__}: {error})") from error
