"""Controller of an engine: one object decides who drafts and how much, asked before a step and told after it.

The engine knows nothing of costs, back-offs or track records. A controller holds the policy and all adaptive state:
another policy, or a fresh start, is another controller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockpilot.control.choose import choose
from blockpilot.control.price import StepCosts
from blockpilot.types import CandidateSet, Forecast, Policy, Prefill, StepShape


class Controller:
    """Block sizes by a policy; forecasts are weighed with fixed step costs.

    Costs are by default those that the policy carries; without any, every step is taken to cost the same.
    """

    def __init__(self, policy: Policy, costs: StepCosts | None = None) -> None:
        self.policy = policy
        self.costs: StepCosts | None = getattr(policy, "costs", None) if costs is None else costs
        self.factors: Mapping[str, float] = {}
        """Seconds of the next step over its measured costs, by kind of step; may be read by any thread."""

    @property
    def speculates(self) -> bool:
        """True if rows may draft in the next step. Those that meet a False decode plainly to their end."""
        return True

    def begin(self) -> None:
        """Called when a step begins."""

    def decide(self, prefill: Prefill) -> int | Forecast:
        """The block size of a request, or the forecast that every step's is chosen from."""
        return self.policy(prefill)

    def sizes(self, forecasts: Sequence[Forecast], others: Sequence[int]) -> list[int]:
        """Block sizes of the next step for the rows with forecasts; `others` are those of the other rows."""
        return choose(forecasts, self.costs, others)

    def finish(self, shape: StepShape, num_tokens: int, num_rows: int) -> None:
        """Called when a step ends: what it took in, the tokens that it emitted, and the rows of the next one."""


@dataclass(frozen=True)
class FixedPolicy:
    """The same block size for every request."""

    block_size: int

    def __post_init__(self) -> None:
        CandidateSet((self.block_size,))

    def __call__(self, prefill: Prefill) -> int:
        return self.block_size
