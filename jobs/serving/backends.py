"""Backends that decode for a replica: this project's engine here, vLLM in jobs/vllm_plugin/served.py."""

from pathlib import Path
from typing import NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from blockpilot.control.controller import FixedPolicy
from blockpilot.control.forecasts import RunningMeans
from blockpilot.control.price import StepPrice
from blockpilot.device import device_name, dtype_name
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.evaluation.pricing import holds_here, measure_price
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy
from blockpilot.policy.store import load_policy
from blockpilot.types import PairId
from jobs.common.registry import UNTRAINED
from jobs.serving.engine_loop import EngineLoop, ServedEngine
from jobs.serving.memory import check_memory

COMMITTED = Path(__file__).parents[2] / "workflows" / "policies" / "policy-step"
TRIAL_TOKENS = 8
PRICE_CONTEXT, PRICE_ROWS = 256, 4  # tokens, and rows at most, of the steps timed at the start: requests wait for it
PolicySource = int | str | Path
"""A block size, "untrained", or the directory of a policy."""


class PairFacts(Protocol):
    """Facts of a pair that a replica needs; `Pair` holds the models, too."""

    @property
    def id(self) -> PairId: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...


class EngineSizes(NamedTuple):
    """Requests decoded together, tokens of each, of prompts in a step, and kept for prompts to come (None: as many as
    the slots hold).
    """

    num_slots: int
    max_length: int
    max_prefill_tokens: int
    prefix_tokens: int | None


class Backend(Protocol):
    """An engine, and how a policy is put to its use."""

    @property
    def engine(self) -> ServedEngine: ...

    @property
    def without_registry(self) -> tuple[PolicySource, ...]:
        """Policies in place of the registry's champion, the first that can be used; the last one always can."""
        ...

    @property
    def healthy(self) -> bool:
        """False once the engine cannot decode any more."""
        ...

    @property
    def exactness(self) -> str:
        """What holds of texts beside those of plain decoding, and why."""
        ...

    @property
    def status(self) -> dict[str, object]:
        """Its entries in /health."""
        ...

    def put(self, policy: PolicySource, loop: EngineLoop) -> None:
        """Use a policy for requests to come; ValueError for one that cannot be used."""

    def close(self) -> None:
        """End what it has started."""


class OwnBackend:
    """This project's engine on a pair; ValueError where its caches do not fit into the memory."""

    healthy = True

    def __init__(self, pair: Pair, sizes: EngineSizes) -> None:
        slots, length, prefill, kept = sizes
        kept = slots * length if kept is None else kept
        check_memory(pair, slots, length, kept)
        self._pair = pair
        self.engine = Engine(pair, num_slots=slots, max_length=length, max_prefill_tokens=prefill, prefix_tokens=kept)
        self.without_registry: tuple[PolicySource, ...] = (COMMITTED, UNTRAINED)
        self._price: StepPrice | None = None  # of this device
        self._has_policy = False

    @property
    def exactness(self) -> str:
        return self.engine.exactness

    @property
    def status(self) -> dict[str, object]:
        controller, target = self.engine.controller, self._pair.target
        policy = controller.policy
        return {
            "device": device_name(target.device),
            "dtype": dtype_name(target.dtype),
            "step_price_s": controller.price.by_name,
            "accepted_over_expected": policy.record.ratio if isinstance(policy, LearnedPolicy) else None,
        }

    def put(self, policy: PolicySource, loop: EngineLoop) -> None:
        if isinstance(policy, int):
            loop.set_policy(FixedPolicy(policy))
        elif policy == UNTRAINED:
            loop.set_policy(RunningMeans(self._pair.block_size - 1), self._price_for(None))
        else:
            learned = load_policy(policy)
            learned.check(self._pair)
            try_out(self._pair, learned)
            loop.set_policy(learned, self._price_for(learned.price))
        self._has_policy = True

    def close(self) -> None:
        pass

    def _price_for(self, own: StepPrice | None) -> StepPrice | None:
        """A policy's own price where that was measured on such a device, or else the one that is known of this.

        It is measured for the first policy only, before any request: timing beside requests would slow them and be
        wrong.
        """
        if own is not None and holds_here(own, self._pair):
            self._price = own
        elif self._price is None and not self._has_policy:
            self._price = measure_price(self._pair, min(self.engine.num_slots, PRICE_ROWS), PRICE_CONTEXT)
        return self._price or own


def try_out(pair: Pair, policy: LearnedPolicy) -> None:
    """Raise ValueError for a policy that fails where it decides: one answer is decoded by it, for nobody."""
    try:
        for _ in generate(pair, (0, 1), policy=policy, max_new_tokens=TRIAL_TOKENS, stop_token_ids=frozenset()):
            pass
    except Exception as error:
        raise ValueError(f"policy that fails when it is tried ({type(error).__name__}: {error})") from error
    policy.forget()
