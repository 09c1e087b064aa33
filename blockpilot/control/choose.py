"""The choice of block sizes: of all rows together those that make the most tokens a second at the present load.

A forecast says how many tokens a request is expected to emit a step with each candidate. Nothing has to be predicted
again when the load changes: the seconds of a step do, and with them the best choice.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockpilot.control.price import StepCosts
from blockpilot.control.ratio import largest_ratio
from blockpilot.types import Forecast

Array = NDArray[np.float64]
_NEVER = 1e5  # tokens: what no row emits


def choose(forecasts: Sequence[Forecast], costs: StepCosts | None, others: Sequence[int] = ()) -> list[int]:
    """The block sizes of a step that are expected to make the most tokens a second of the whole batch.

    Of equals the smallest. `others` are the sizes of rows that do not choose; they are taken to emit one token.
    Prompts that the step takes in do not matter: their seconds are spent anyway, and a token saves what it would
    save in another step. Without costs every step is taken to cost the same.
    """
    if not forecasts:
        return []
    if costs is None:
        return [f.candidates[max(range(len(f.taus)), key=lambda k: (f.taus[k], -k))] for f in forecasts]
    options = [dict(zip(f.candidates, f.taus, strict=True)) for f in forecasts] + [{size: 1.0} for size in others]
    sizes = sorted({1}.union(*options))
    tokens = np.array([[of_row.get(size, -math.inf) for size in sizes] for of_row in options]).clip(min=-_NEVER)
    alike = tokens.sum(axis=0) / costs.alike_s(sizes, len(options))
    best = int(alike.argmax())
    chosen = [best] * len(options)
    if len(options) > 1:
        mixing_s = costs.mixing_s(sizes, len(options))
        chosen = _most_a_second(tokens, np.array(sizes) - 1, *mixing_s, rate=float(alike[best])) or chosen
    return [sizes[k] for k in chosen[: len(forecasts)]]


def _most_a_second(
    tokens: Array, drafted: NDArray[np.int64], first_s: Array, each_s: Array, rate: float
) -> list[int] | None:
    """Which option of every row [R] makes the most tokens in all over seconds in all; None if less than `rate`.

    tokens [R, K] are those of every row's options, which draft drafted[k] tokens, ascending. A step whose widest
    option is k takes first_s[k] if one row takes it, and each_s[k] for every further token drafted.
    """
    widest, rows = np.arange(len(drafted)), np.arange(len(tokens))
    token_s, too_wide = each_s[:, None] * drafted, drafted > drafted[:, None]  # [widest, option]

    def maximise(rate: float) -> tuple[list[int], float]:
        # For a given rate and widest option rows choose apart; if none takes that option, the one that loses least.
        worth = np.where(too_wide, -(_NEVER**2), tokens[:, None] - rate * token_s)  # [row, widest, option]
        options: NDArray[np.int64] = worth.argmax(axis=2)
        nobody = widest[(options != widest).all(axis=0)]
        loss = worth.max(axis=2) - worth[:, widest, widest]
        options[loss.argmin(axis=0)[nobody], nobody] = nobody
        emitted = tokens[rows[:, None], options].sum(axis=0)
        seconds = first_s + each_s * (drafted[options].sum(axis=0) - drafted)
        best = (emitted - rate * seconds).argmax()
        return options[:, best].tolist(), float(emitted[best] / seconds[best])

    chosen, reached = largest_ratio(maximise, rate)
    return chosen if reached >= rate else None
