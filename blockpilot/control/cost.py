"""Step cost: seconds of a step by its rows, drafted positions and verified tokens.

A step reads every weight once, and multiplies a first tile of tokens by it in nearly the time of one token. With AMX,
further tiles have as many tokens; with vector products, every further token takes additional time. Otherwise a step's
time is linear in the load, to a few percent on CPUs and GPUs. A mixture of experts reads only the experts that tokens
choose: more tokens choose more of them. So seven coefficients, fitted to a few timed steps (evaluation/pricing.py),
give the cost of every step, including ragged batches.

The timed steps run alone on the machine. In a server, event loops, clients and tokenizers run at the same time, texts
grow, and the machine's speed varies, which scales all steps equally: LiveCost estimates the current coefficients.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from blockpilot.storage import Place, read_bytes
from blockpilot.types import PairId

Array = NDArray[np.float64]

PRICE_FILE = "price.json"
COEFFICIENTS = ("base_s", "row_s", "launch_s", "slot_s", "token_s", "tile_s", "experts_s")

LEVEL, SLOPES = 0.5, 0.2  # initial standard deviations of the coefficients, relative to them
NOMINAL_SLOPES = 1.0  # SLOPES of a cost that was not measured
LEVEL_STEP, SLOPE_STEP = 0.03, 0.002  # standard deviations of their drift per step
NUM_STEPS = 16  # steps per update
NOISE = 0.12  # relative standard deviation of a step's seconds
OUTLIER = 3.0  # standard deviations at which a step's error is clipped
LEAST = 0.1  # lower bound of a coefficient, relative to the measured one


class Tiles(NamedTuple):
    """Tokens of the first tile, multiplied in nearly the time of one token, and of each further tile."""

    first: int
    further: int

    def beyond(self, num_tokens: Any) -> Any:
        """Number of tiles, full or not, of `num_tokens` tokens beyond the first tile. Tiles of one token are not
        rounded up: expected numbers of tokens are fractional.
        """
        more = np.maximum(num_tokens - self.first, 0)
        return more if self.further == 1 else -(-more // self.further)


TILE = 16
DEFAULT_TILES = Tiles(TILE, TILE)
TILES = DEFAULT_TILES, Tiles(32, 32)  # candidates for products by tiles; AMX's are the last
VECTORS = Tiles(4, 1), Tiles(16, 1), Tiles(8, 1)  # candidates for products by vectors


class Load(NamedTuple):
    """Load of a step: rows, drafted positions, verified tokens, and prompt tokens in the same step."""

    rows: int
    num_drafted: int = 0
    """Positions that the draft proposes tokens for, in all rows."""
    num_verified: int = 0
    """Drafted tokens that the target scores, in all rows."""
    num_passes: int = 1
    """Passes of the draft, if anything is drafted (`passes`)."""
    num_prompt_tokens: int = 0
    """Prompt tokens in the same step. Their time is not part of the cost, but they fill tiles."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the target scores, anchors included."""
        return self.rows + self.num_verified + self.num_prompt_tokens

    def terms(self, expert_share: float = 0.0, tiles: Tiles = DEFAULT_TILES) -> tuple[float, ...]:
        """Factors of COEFFICIENTS, for a target of which each token chooses this share of the experts."""
        num_passes, chosen = self.num_passes if self.num_drafted else 0, chosen_experts(expert_share, self.num_tokens)
        num_tiles = tiles.beyond(self.num_tokens)
        return 1, self.rows, num_passes, self.num_drafted, self.num_verified, num_tiles, chosen


def chosen_experts(expert_share: float, num_tokens: Any) -> Any:
    """Expected share of the experts that tokens choose together, if each chooses independently of the others."""
    return 1 - (1 - expert_share) ** num_tokens


def passes(depths: Iterable[int], is_sequential: bool) -> int:
    """Passes of a draft that proposes depths[r] positions: the largest depth if it is sequential, else one."""
    return max([1, *depths]) if is_sequential else 1


@dataclass(frozen=True)
class StepPrice:
    """Step cost of a pair on a device: seconds are the sum of the coefficients times `Load.terms`.

    context: tokens of the timed rows; rows: maximum number of timed rows. error: mean relative error on the timed
    steps, or on held-out ones, not used in the fit, if it is larger there.
    """

    pair: PairId
    dtype: str
    device: str
    context: int
    rows: int
    base_s: float
    row_s: float
    launch_s: float
    """Seconds of each pass of the draft."""
    slot_s: float
    """Seconds of every position that the draft proposes tokens for."""
    token_s: float
    """Seconds of every drafted token that is verified."""
    error: float
    is_sequential: bool = False
    """The draft is autoregressive: one pass for each depth."""
    tile_s: float = 0.0
    """Seconds of every tile of tokens beyond the first, full or not."""
    experts_s: float = 0.0
    """Seconds of all experts of a mixture; a step takes the share that its tokens choose."""
    expert_share: float = 0.0
    """Share of the experts that a token chooses; 0 without experts."""
    tile: int = TILE
    """Tokens of the first tile."""
    next_tile: int = TILE
    """Tokens of each further tile."""

    @property
    def is_measured(self) -> bool:
        """False for NOMINAL, also after its coefficients were updated."""
        return self.rows > 0

    @property
    def tiles(self) -> Tiles:
        return Tiles(self.tile, self.next_tile)

    @property
    def by_name(self) -> dict[str, float]:
        """Coefficients by name."""
        return {name: getattr(self, name) for name in COEFFICIENTS}

    @property
    def coefficients(self) -> Array:
        return np.array(list(self.by_name.values()))

    def seconds(self, load: Load) -> float:
        _, rows, num_passes, slots, tokens, num_tiles, chosen = load.terms(self.expert_share, self.tiles)
        plain_s = self.base_s + rows * self.row_s
        verified_s = tokens * self.token_s + num_tiles * self.tile_s + chosen * self.experts_s
        return plain_s + num_passes * self.launch_s + slots * self.slot_s + verified_s

    def more_experts_s(self, num_tokens: int, more: Any) -> Any:
        """Seconds of the experts that `more` tokens choose in addition to those of `num_tokens` tokens."""
        first_chosen, all_chosen = (chosen_experts(self.expert_share, num) for num in (num_tokens, num_tokens + more))
        return self.experts_s * (all_chosen - first_chosen)

    def mean_token_s(self, load: Load) -> float:
        """Seconds of a further verified token, with its share of a tile if the first one is full."""
        return self.token_s + self.tile_s / self.tiles.further * (load.num_tokens >= self.tiles.first)

    def chains_s(self, block_size: int, rows: int) -> float:
        """Cost in seconds of a step in which all rows verify chains of this block size."""
        num_drafted = rows * (block_size - 1)
        return self.seconds(Load(rows, num_drafted, num_drafted, passes([block_size - 1], self.is_sequential)))

    def relative(self, block_sizes: Sequence[int], rows: int) -> list[float]:
        """`chains_s` of each block size, relative to plain decoding."""
        return [self.chains_s(size, rows) / self.chains_s(1, rows) for size in block_sizes]

    def with_coefficients(self, coefficients: Array) -> Self:
        return replace(self, **dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True)))

    def made_for(self, pair: PairId, dtype: str, device: str) -> bool:
        return (self.pair, self.dtype, self.device) == (pair, dtype, device)

    def to_json(self) -> str:
        """JSON in one line."""
        return json.dumps(asdict(self) | {"pair": self.pair._asdict()}) + "\n"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Step cost from the parsed JSON of `to_json`. Raises ValueError, TypeError or KeyError for anything else."""
        in_older_files = {"is_sequential": False, "tile_s": 0.0, "experts_s": 0.0, "expert_share": 0.0, "tile": TILE}
        values = in_older_files | dict(fields) | {"pair": PairId(**fields["pair"])}
        values.setdefault("next_tile", values["tile"])
        for name in (*COEFFICIENTS, "error", "expert_share"):
            if type(values[name]) not in (int, float) or not 0 <= values[name] < np.inf:
                raise ValueError(f"{name} {values[name]!r}: must be a number, at least 0")
        sizes = dict.fromkeys(("context", "rows", "tile", "next_tile"), int)
        kinds = sizes | {"dtype": str, "device": str, "is_sequential": bool}
        for name, kind in kinds.items():
            if type(values[name]) is not kind:
                raise ValueError(f"{name} {values[name]!r}: must be of type {kind.__name__}")
        price = cls(**values)
        for name, size in (("tile", price.tile), ("next_tile", price.next_tile)):
            if size < 1:
                raise ValueError(f"{name} {size}: must be at least 1")
        if not price.base_s + price.row_s > 0:
            raise ValueError("base_s and row_s: a plain step must take some time")
        return price


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
"""Default without a measurement, in units of a plain step of one row, most of which is spent reading the weights."""


def read_price(place: Place) -> StepPrice:
    """Step cost from a file that `to_json` wrote; raises ValueError for anything else."""
    try:
        return StepPrice.from_fields(json.loads(read_bytes(place)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: not the step price of a pair ({error})") from None


def fit(
    loads: Sequence[Load],
    seconds: Sequence[float],
    names: Sequence[str] = COEFFICIENTS,
    *,
    expert_share: float = 0.0,
    tiles: Tiles = DEFAULT_TILES,
) -> Array:
    """Coefficients by non-negative least squares of relative errors on timed steps; those not in `names` are 0."""
    from scipy.optimize import nnls  # the import takes 0.3 s, and only measurements need it

    relative = np.array([load.terms(expert_share, tiles) for load in loads]) / np.array(seconds)[:, None]
    columns = [COEFFICIENTS.index(name) for name in names]
    coefficients = np.zeros(len(COEFFICIENTS))
    coefficients[columns] = nnls(relative[:, columns], np.ones(len(loads)))[0]
    return coefficients


def relative_error(
    coefficients: Array,
    loads: Sequence[Load],
    seconds: Sequence[float],
    *,
    expert_share: float = 0.0,
    tiles: Tiles = DEFAULT_TILES,
) -> float:
    """Mean of |expected / measured - 1|."""
    expected = np.array([load.terms(expert_share, tiles) for load in loads]) @ coefficients
    return float(np.abs(expected / np.array(seconds) - 1).mean())


class LiveCost:
    """Kalman filter (1960) over the coefficients of a step cost: a level that all share, and a slope for each.

    Plain and drafting steps at different times also differ by the level, so level and slopes are estimated together.
    An update processes `num_steps` steps together, because the engine waits for it.
    """

    def __init__(self, price: StepPrice, num_steps: int = NUM_STEPS) -> None:
        self.price, self._num_steps = price, num_steps
        self._is_scaled = price.is_measured
        self._seen: list[tuple[Load, float]] = []
        self._start()

    def _start(self) -> None:
        """Prior at `price`."""
        mean, slope = self.price.coefficients, SLOPES if self.price.is_measured else NOMINAL_SLOPES
        self._least = LEAST * mean
        scale = np.maximum(mean, 1e-3 * mean.max())
        # 0 without experts, whose term is always 0
        scale[COEFFICIENTS.index("experts_s")] *= self.price.expert_share > 0
        level, slopes = np.outer(scale, scale), np.diag(scale**2)
        self._mean = mean
        self._covariance = LEVEL**2 * level + slope**2 * slopes
        self._drift = LEVEL_STEP**2 * level + SLOPE_STEP**2 * slopes

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a step without prefill."""
        self._seen.append((load, seconds))
        if len(self._seen) >= self._num_steps:
            self._update()

    def _update(self) -> None:
        """Update with the observed steps; the error of an outlier is clipped."""
        loads, seconds = zip(*self._seen, strict=True)
        terms = np.array([load.terms(self.price.expert_share, self.price.tiles) for load in loads], dtype=float)
        if not self._is_scaled:  # a nominal cost has no unit
            unit = np.median(np.array(seconds) / (terms @ self._mean))
            self.price, self._is_scaled = self.price.with_coefficients(unit * self._mean), True
            self._start()
        self._covariance += len(loads) * self._drift
        self._seen = []
        expected, with_steps = terms @ self._mean, terms @ self._covariance
        covariance = with_steps @ terms.T + np.diag((NOISE * expected) ** 2)
        limits = OUTLIER * np.sqrt(covariance.diagonal())
        gains = np.linalg.solve(covariance, with_steps)
        self._mean = self._mean + np.clip(np.array(seconds) - expected, -limits, limits) @ gains
        self._mean = np.maximum(self._mean, self._least)
        self._covariance -= with_steps.T @ gains
        self.price = self.price.with_coefficients(self._mean)
