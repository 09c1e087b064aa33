"""Track records: what came of what was expected."""

import pytest

from blockpilot.control.calibration import TrackRecord


def test_a_record_weighs_evidence_against_doubt() -> None:
    record = TrackRecord(doubt=10)
    assert record.ratio == 1
    record.add(5, 2)
    assert record.ratio == pytest.approx(12 / 15)
    record.add(5, 6)
    assert record.ratio == pytest.approx(18 / 20)


def test_a_record_fades_step_by_step() -> None:
    """Also by steps that draft nothing: what was given up for its record is tried anew some day."""
    record = TrackRecord(doubt=1, memory=4)
    record.add(8, 0)
    for num in range(1, 30):
        record.add(0, 0)
        assert record.ratio == pytest.approx(1 / (1 + 8 * 0.75**num))
    assert record.ratio > 0.99


def test_a_record_begins_where_its_prior_is_and_tells_it() -> None:
    of_all = TrackRecord(doubt=4)
    first = TrackRecord(doubt=6, prior=of_all)
    first.add(4, 0)
    assert of_all.ratio == pytest.approx(4 / 8)
    assert first.ratio == pytest.approx(6 * (4 / 8) / 10)
    second = TrackRecord(doubt=6, prior=of_all)
    assert second.ratio == of_all.ratio
    second.add(2, 2)
    assert of_all.ratio == pytest.approx(6 / 10)
    assert first.ratio == pytest.approx(6 * (6 / 10) / 10)  # it hears of the others by the prior


def test_a_prior_may_be_a_number() -> None:
    record = TrackRecord(doubt=3, prior=0.5)
    assert record.ratio == 0.5
    record.add(1, 1)
    assert record.ratio == pytest.approx(2.5 / 4)
