"""Steps of mixed block sizes are measured beside their prediction."""

import json
from pathlib import Path

import pytest

from jobs.bench.steps import StepsConfig, parse, run
from jobs.common.config import PairConfig


def test_mixtures_are_measured_and_predicted(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = map(str, tiny_pair_dirs)
    config = StepsConfig(
        pair=PairConfig(target=target, draft=draft),
        mixtures=("4x1,1x2", "4,4,1", "2"),
        context=16,
        num_steps=2,
        output=tmp_path / "steps.json",
    )
    found = run(config)
    assert [step.mixture for step in found] == ["2", "4x1,1x2", "4,4,1"]  # by rows
    assert all(step.measured > 0 and step.predicted > 0 for step in found)
    assert json.loads(config.output.read_text()) == [step._asdict() for step in found]
    assert "| 4x1,1x2" in capsys.readouterr().out


def test_mixtures_are_read() -> None:
    assert parse("1, 4,2x3") == [4, 2, 2, 2, 1]


@pytest.mark.parametrize("mixture", ["", "0", "33", "4x", "x4", "a", "4,,1", "4x0", "-1"])
def test_bad_mixtures_are_refused(mixture: str) -> None:
    with pytest.raises(ValueError, match=r"must be a block size of 1 to 32, or NxM"):
        parse(mixture)
