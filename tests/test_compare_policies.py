"""What a policy's call costs: both forms choose alike, and their memory is counted as it is."""

import json
from pathlib import Path

import pytest

from jobs import compare_policies
from jobs.compare_policies import ComparePoliciesConfig, run


def test_both_forms_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ComparePoliciesConfig(
        vocab_size=3000, hidden=(8, 32), max_support=100, num_probable=20, num_calls=4, output=tmp_path / "costs.json"
    )
    costs = run(config)
    assert [(cost.hidden, cost.form) for cost in costs] == [
        (8, "sparse"),
        (8, "dense"),
        (32, "sparse"),
        (32, "dense"),
    ]
    assert json.loads(config.output.read_text()) == [cost._asdict() for cost in costs]
    assert all(0 < cost.median_ms <= cost.p95_ms for cost in costs)
    # Floats: first layer, its bias, one hidden layer, and five outputs with shift and scale; ids: int64 and int32.
    hidden = 8
    layers = hidden + hidden * (hidden + 1) + 5 * (hidden + 1)
    assert costs[0].megabytes == pytest.approx((4 * (100 * hidden + layers + 10) + 8 * 100 + 4 * 3000) / 1e6)
    assert costs[1].megabytes == pytest.approx(4 * (3000 * hidden + layers) / 1e6)
    assert "| 32     | dense       |" in capsys.readouterr().out


def test_forms_that_choose_differently_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(compare_policies.DensePolicy):
        def forward(self, probs):  # type: ignore[no-untyped-def]
            return -super().forward(probs)

    monkeypatch.setattr(compare_policies, "DensePolicy", Wrong)
    config = ComparePoliciesConfig(
        vocab_size=300, hidden=(8,), max_support=50, num_probable=20, output=tmp_path / "x"
    )
    with pytest.raises(RuntimeError, match="hidden 8: the sparse form chooses"):
        run(config)
    assert not config.output.exists()
