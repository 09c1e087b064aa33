"""Step costs saved by a server: read and checked at the next start, measured again if damaged, outdated or wrong."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from blockpilot.control.cost import read_price
from blockpilot.evaluation.pricing import measure_price
from blockpilot.pairs.loading import Pair
from jobs.common import prices
from jobs.common.prices import LONGEST_AGE_S, kept_price

ROWS, CONTEXT = 2, 10


@pytest.fixture(scope="module")
def first(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Price file written by a first start."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prices, "MOST_ERROR", np.inf)
        kept_price(tiny_pair, ROWS, CONTEXT, folder)
    [file] = folder.iterdir()
    return file


@pytest.fixture
def file(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of `first`, with looser limits: step times of the tiny pair vary more than those of a real one."""
    monkeypatch.setattr(prices, "TOLERANCE", 4.0)
    monkeypatch.setattr(prices, "MOST_ERROR", np.inf)
    return Path(shutil.copy(first, tmp_path))


def test_a_second_start_keeps_the_ratios_of_the_first(
    file: Path, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices, "measure_price", lambda *_: pytest.fail("measured"))
    first, second = read_price(str(file)), kept_price(tiny_pair, ROWS, CONTEXT, file.parent)
    assert second.pair == tiny_pair.id
    np.testing.assert_allclose(
        second.coefficients / second.coefficients.sum(), first.coefficients / first.coefficients.sum()
    )


@pytest.mark.parametrize("how", ["damaged", "old", "of another device", "not today's"])
def test_another_one_is_measured(how: str, file: Path, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    price = read_price(str(file))
    if how == "damaged":
        file.write_text(file.read_text()[:40])
    elif how == "old":
        long_ago = time.time() - LONGEST_AGE_S - 60
        os.utime(file, (long_ago, long_ago))
    elif how == "of another device":
        file.write_text(file.read_text().replace(price.device, "abacus"))
    else:  # drafting would take hundreds of plain steps
        file.write_text(price.with_coefficients(price.coefficients * [1, 1, 1000, 1000, 1000, 1, 1]).to_json())
    measured = []

    def counted(*arguments: object) -> object:
        measured.append(arguments)
        return measure_price(tiny_pair, ROWS, CONTEXT, num_steps=1)

    monkeypatch.setattr(prices, "measure_price", counted)
    assert kept_price(tiny_pair, ROWS, CONTEXT, file.parent).device == price.device
    assert len(measured) == 1
    assert read_price(str(file)).device == price.device


def test_a_folder_that_cannot_be_written_costs_only_time(tiny_pair: Pair, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert kept_price(tiny_pair, ROWS, CONTEXT, taken).pair == tiny_pair.id


def test_an_uncertain_one_serves_but_is_not_kept(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prices, "MOST_ERROR", -1.0)  # as next to a busy process
    assert kept_price(tiny_pair, ROWS, CONTEXT, tmp_path).pair == tiny_pair.id
    assert list(tmp_path.iterdir()) == []
    assert "the step cost is uncertain" in caplog.text
