"""Step prices that are known in advance."""

import dataclasses
from typing import Any

from blockpilot.control.cost import StepPrice
from blockpilot.types import PairId

_FREE: dict[str, Any] = dict.fromkeys(("row_s", "launch_s", "slot_s", "token_s", "error"), 0.0)
_PRICE = StepPrice(
    PairId("t", "1", "d", "2"), "float32", device="cpu, 1 threads", context=50, rows=6, base_s=1.0, **_FREE
)


def price(**changes: Any) -> StepPrice:
    """A second for every step, unless told; what is not named is free."""
    return dataclasses.replace(_PRICE, **changes)


def linear_price(per_token: float) -> StepPrice:
    """A second, and so many for every drafted token, half of it where it is verified."""
    return price(slot_s=per_token / 2, token_s=per_token / 2)
