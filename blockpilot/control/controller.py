"""Controller of an engine: one object decides who drafts, how deep, and what is verified of it.

The engine knows nothing of prices, back-offs or track records. It asks before a step, after the draft, and tells what
came of it. A controller holds the policy and all adaptive state: another policy, or a fresh start, is another
controller.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockpilot.control.calibration import TrackRecord
from blockpilot.control.choose import Offered, buy, choose_depths
from blockpilot.control.price import TILE, Load, StepPrice
from blockpilot.types import MAX_BLOCK_SIZE, CandidateSet, Forecast, PairId, Policy, Prefill

NOMINAL = StepPrice(
    PairId("any", "", "any", ""),
    dtype="",
    device="",
    context=0,
    rows=0,
    base_s=1.0,
    row_s=0.02,
    launch_s=0.15,
    slot_s=0.02,
    token_s=0.04,
    error=0.0,
)
"""In plain steps: the price where none was measured, of one row where reading the weights is most of a step."""

DOUBT, MEMORY = 100.0, 2000.0  # expected tokens, steps; of accepted over expected
SLOTS_DOUBT, SLOTS_MEMORY = 20.0, 500.0  # slots, steps; of tokens verified over positions drafted at a depth


class StepOutcome(NamedTuple):
    """Load and results of a step."""

    load: Load
    num_prompt_tokens: int
    num_chosen: int
    """Rows that the controller chose for."""
    num_accepted: int
    """Drafted tokens accepted of those rows."""
    num_tokens: int
    """Emitted, of all rows."""
    next_rows: int
    """That decode in the next step."""
    has_captured: bool = False
    """A CUDA graph was captured in it, which takes longer than the step."""


class Controller:
    """Depths and drafted tokens by a policy's forecasts, bought at a fixed price.

    The price is by default the one that the policy carries, or else `NOMINAL`.
    """

    def __init__(self, policy: Policy, price: StepPrice | None = None) -> None:
        self.policy = policy
        self.price: StepPrice = price or getattr(policy, "price", None) or NOMINAL
        """May be read by any thread."""
        self._calibration = TrackRecord(DOUBT, MEMORY)
        self._tokens_a_slot = [TrackRecord(SLOTS_DOUBT, SLOTS_MEMORY) for _ in range(MAX_BLOCK_SIZE)]
        self._depths: list[int] = []
        self._num_free = 0  # tokens that fit into the tile that the next step begins anyway
        self._rate = self._expected = 0.0

    @property
    def speculates(self) -> bool:
        """True if rows may draft in the next step. Those that meet a False decode plainly to their end."""
        return True

    @property
    def calibration(self) -> float:
        """Drafted tokens accepted over those that were expected."""
        return self._calibration.ratio

    def begin(self) -> None:
        """Called when a step begins."""

    def decide(self, prefill: Prefill) -> int | Forecast:
        """The block size of a request, or the forecast that every step's drafts are bought by."""
        return self.policy(prefill)

    def depths(self, reaches: Sequence[Sequence[float]], beside: Load) -> list[int]:
        """Positions that the next step's draft proposes tokens for, of every row with a forecast.

        reaches[r] is row r's `Forecast.reach` as far as it may draft; `beside` is what the other rows take in.
        """
        tokens_a_slot = [record.ratio for record in self._tokens_a_slot[: max(map(len, reaches))]]
        self._depths, self._rate = choose_depths(reaches, self.price, beside, tokens_a_slot)
        self._num_free = -(len(reaches) + beside.num_tokens) % TILE
        return self._depths

    def buy(self, offered: Sequence[Iterable[Offered]], most: int) -> list[list[Offered]]:
        """Tokens to verify of those that each row's draft offers by falling chance, so many a row at most."""
        price, rate = self.price, self._rate / self.calibration
        bought = buy(offered, rate * price.token_s, rate * price.tile_s, self._num_free, most)
        tokens = [token for of_row in bought for token in of_row]
        self._expected = sum(token.chance for token in tokens)
        at_depth = Counter(token.depth for token in tokens)
        for depth in range(max(self._depths, default=0)):
            self._tokens_a_slot[depth].add(sum(d > depth for d in self._depths), at_depth[depth + 1])
        return bought

    def finish(self, outcome: StepOutcome) -> None:
        """Called when a step ends."""
        self._calibration.add(self._expected, outcome.num_accepted)
        self._expected = 0.0


@dataclass(frozen=True)
class FixedPolicy:
    """The same block size for every request."""

    block_size: int

    def __post_init__(self) -> None:
        CandidateSet((self.block_size,))

    def __call__(self, prefill: Prefill) -> int:
        return self.block_size
