"""Step costs with given coefficients."""

import dataclasses
from typing import Any

from blockpilot.control.cost import StepPrice
from blockpilot.types import PairId

_FREE: dict[str, Any] = dict.fromkeys(("row_s", "launch_s", "slot_s", "token_s", "error"), 0.0)
_PRICE = StepPrice(
    PairId("t", "1", "d", "2"), "float32", device="cpu, 1 threads", context=50, rows=6, base_s=1.0, **_FREE
)


def price(**changes: Any) -> StepPrice:
    """Step cost of one second with these changes; all other coefficients are 0."""
    return dataclasses.replace(_PRICE, **changes)


def linear_price(per_token: float) -> StepPrice:
    """Step cost of one second, plus `per_token` for every token: half to draft it, half to verify it."""
    return price(slot_s=per_token / 2, token_s=per_token / 2)
