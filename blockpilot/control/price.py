"""Price of a step: seconds by the rows, drafted slots and verified tokens that it takes in.

A step reads every weight once, and multiplies a tile of tokens by it in nearly the time of one. Beyond that it is
linear in what it takes in, to a few percent on CPUs and GPUs. So a handful of coefficients, fitted to a few timed
steps (evaluation/pricing.py), price every step that may be asked for, also those of ragged batches.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from blockpilot.storage import Place, read_bytes
from blockpilot.types import PairId

Array = NDArray[np.float64]

PRICE_FILE = "price.json"
COEFFICIENTS = ("base_s", "row_s", "launch_s", "slot_s", "token_s", "tile_s")
TILE = 16  # tokens that a product with the weights takes in nearly the time of one


class Load(NamedTuple):
    """Rows, drafted positions and verified tokens of a step without prompts."""

    rows: int
    num_drafted: int = 0
    """Positions that the draft proposes tokens for, of all rows."""
    num_verified: int = 0
    """Drafted tokens that the target scores, of all rows."""
    num_passes: int = 1
    """Passes of the draft, if anything is drafted (`passes`)."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the target scores, anchors included."""
        return self.rows + self.num_verified

    @property
    def terms(self) -> tuple[int, ...]:
        """Factors of the coefficients."""
        num_passes, more_tiles = self.num_passes if self.num_drafted else 0, (self.num_tokens - 1) // TILE
        return 1, self.rows, num_passes, self.num_drafted, self.num_verified, more_tiles


def passes(depths: Iterable[int], is_sequential: bool) -> int:
    """Passes, if any, of a draft that proposes tokens for depths[r] positions: a sequential one for each depth."""
    return max([1, *depths]) if is_sequential else 1


@dataclass(frozen=True)
class StepPrice:
    """Seconds of a step of a pair on a device: the sum of its coefficients times `Load.terms`.

    context: tokens of the rows that were timed; rows: how many at most. error: mean relative error on timed steps
    that the fit has not seen.
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
    """Seconds of every position that it proposes tokens for."""
    token_s: float
    """Seconds of every drafted token that is verified."""
    error: float
    is_sequential: bool = False
    """The draft proposes token by token, in a pass for each depth."""
    tile_s: float = 0.0
    """Seconds of every tile that the tokens of a step begin beyond the first."""

    @property
    def by_name(self) -> dict[str, float]:
        """The coefficients, by their names."""
        return {name: getattr(self, name) for name in COEFFICIENTS}

    @property
    def coefficients(self) -> Array:
        return np.array(list(self.by_name.values()))

    def seconds(self, load: Load) -> float:
        _, rows, num_passes, slots, tokens, more_tiles = load.terms
        plain_s = self.base_s + rows * self.row_s
        of_tokens = tokens * self.token_s + more_tiles * self.tile_s
        return plain_s + num_passes * self.launch_s + slots * self.slot_s + of_tokens

    def chains_s(self, block_size: int, rows: int) -> float:
        """Seconds of a step in which all rows verify chains of this block size."""
        num_drafted = rows * (block_size - 1)
        return self.seconds(Load(rows, num_drafted, num_drafted, passes([block_size - 1], self.is_sequential)))

    def relative(self, block_sizes: Sequence[int], rows: int) -> list[float]:
        """`chains_s` of each block size, in steps of plain decoding."""
        return [self.chains_s(size, rows) / self.chains_s(1, rows) for size in block_sizes]

    def with_coefficients(self, coefficients: Array) -> Self:
        return replace(self, **dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True)))

    def made_for(self, pair: PairId, dtype: str, device: str) -> bool:
        return (self.pair, self.dtype, self.device) == (pair, dtype, device)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self) | {"pair": self.pair._asdict()}) + "\n"

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> Self:
        """From what `to_json` writes, read as JSON. Raises ValueError, TypeError or KeyError for anything else."""
        unsaid = {"is_sequential": False, "tile_s": 0.0}  # in older files
        values = unsaid | dict(found) | {"pair": PairId(**found["pair"])}
        for name in (*COEFFICIENTS, "error"):
            if type(values[name]) not in (int, float) or not 0 <= values[name] < np.inf:
                raise ValueError(f"{name} {values[name]!r}: must be a number, at least 0")
        kinds = {"context": int, "rows": int, "dtype": str, "device": str, "is_sequential": bool}
        for name, kind in kinds.items():
            if type(values[name]) is not kind:
                raise ValueError(f"{name} {values[name]!r}: must be of type {kind.__name__}")
        price = cls(**values)
        if not price.base_s + price.row_s > 0:
            raise ValueError("base_s and row_s: a plain step must take some time")
        return price


def read_price(place: Place) -> StepPrice:
    """From a file of `to_json`; raises ValueError for anything else."""
    try:
        return StepPrice.from_fields(json.loads(read_bytes(place)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: not the step price of a pair ({error})") from None


def fit(loads: Sequence[Load], seconds: Sequence[float], names: Sequence[str] = COEFFICIENTS) -> Array:
    """Coefficients, none negative, with the least squares of relative errors on these steps; 0 but for `names`."""
    relative = np.array([load.terms for load in loads]) / np.array(seconds)[:, None]
    best, least = np.zeros(len(COEFFICIENTS)), np.inf
    # Of all subsets that may be above 0: exact, and there are 64.
    subsets = product(*([False, True] if name in names else [False] for name in COEFFICIENTS))
    for chosen in map(list, map(np.flatnonzero, subsets)):
        found = np.zeros(len(COEFFICIENTS))
        found[chosen] = np.linalg.lstsq(relative[:, chosen], np.ones(len(loads)))[0]
        error = float(np.square(relative @ found - 1).sum())
        if (found >= 0).all() and error < least - 1e-12:
            best, least = found, error
    return best


def relative_error(coefficients: Array, loads: Sequence[Load], seconds: Sequence[float]) -> float:
    """Mean of |expected / measured - 1|."""
    expected = np.array([load.terms for load in loads]) @ coefficients
    return float(np.abs(expected / np.array(seconds) - 1).mean())
