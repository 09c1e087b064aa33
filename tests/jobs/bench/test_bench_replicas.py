"""The bench of several replicas: figures of later turns, and the picture over time."""

import pytest

from jobs.bench.http_load import Received
from jobs.bench.replicas import AskedTurn, row_of
from jobs.common.figures import over_time


def answer(first_token_s: float, num_prompt: int, num_cached: int) -> Received:
    return Received(
        1.0, 200, [1.0 + first_token_s], 4, num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, text="yes"
    )


def test_later_turns_count_and_failures_of_any_turn() -> None:
    turns = [
        AskedTurn(0, answer(9.0, 100, 0)),
        AskedTurn(1, answer(0.1, 100, 60)),
        AskedTurn(2, answer(0.3, 300, 240)),
        AskedTurn(0, Received(1.0, 503, error="gone")),
    ]
    row = row_of("prefix", turns)
    assert (row["turns"], row["failed"]) == (2, 1)
    assert row["cached"] == pytest.approx(300 / 400)
    assert row["first_token_s"]["p50"] == pytest.approx(0.2)


def test_a_picture_has_a_panel_for_every_series() -> None:
    one_panel, two_panels = (over_time({str(i): [(0.0, 1.0), (2.0, 3.0)] for i in range(num)}) for num in (1, 2))
    assert one_panel.startswith(b"\x89PNG")
    heights = [int.from_bytes(png[20:24], "big") for png in (one_panel, two_panels)]
    assert heights[1] == 2 * heights[0]
