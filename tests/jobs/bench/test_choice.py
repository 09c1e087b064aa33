"""Benchmark of the choice: replay of synthetic texts, and its overheads."""

import numpy as np
import pytest

from blockpilot.control.acceptance import UNTRAINED
from helpers.prices import price
from jobs.bench.choice import ChoiceConfig, ReplayedText, _replay, run

PRICE = price(launch_s=0.1, slot_s=0.01, token_s=0.01)
NUM, DEEPEST, WIDTH = 400, 4, 8


def text_of(rank: int) -> ReplayedText:
    """Text in which the draft's choice of this rank is always right, with a high probability; -1: none is."""
    log_probs = np.full((NUM, DEEPEST, WIDTH), -8.0, dtype=np.float32)
    log_probs[..., 0] = -0.01 if rank == 0 else -1.0
    needed = np.tile(np.arange(1, DEEPEST + 1), (NUM, 1)) if rank == 0 else np.full((NUM, DEEPEST), 255)
    return ReplayedText(np.full((NUM, DEEPEST), rank), log_probs, log_probs, needed, False)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_replay_accepts_what_is_right(num_rows: int) -> None:
    """Five tokens a step with a draft that is always right, about plain speed with one that never is."""
    good = _replay([text_of(0)] * 2 * num_rows, num_rows, PRICE, {"untrained": UNTRAINED})
    assert good["best fixed method"] == f"B={DEEPEST + 1}"
    assert float(good["untrained"]) == pytest.approx(float(good["its speed-up"]), rel=0.02)
    assert float(good["its speed-up"]) > 3.5
    poor = _replay([text_of(-1)] * 2 * num_rows, num_rows, PRICE, {"untrained": UNTRAINED})
    assert poor["best fixed method"] == "plain"
    assert 0.9 < float(poor["untrained"]) <= 1


def test_overheads_are_of_every_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(ChoiceConfig(rows=(1, 3), num_steps=2))
    assert report in capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in report.splitlines()[3:]] == ["1", "3"]
