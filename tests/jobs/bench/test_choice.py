"""Benchmark of the choice: its overheads."""

import pytest

from jobs.bench.choice import ChoiceConfig, run


def test_overheads_are_of_every_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(ChoiceConfig(rows=(1, 3), num_steps=2))
    assert report in capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in report.splitlines()[3:]] == ["1", "3"]
