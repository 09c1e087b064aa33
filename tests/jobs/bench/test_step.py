"""The benchmark of steps, on the tiny pair."""

import pytest
import torch

from blockpilot.control.cost import Load
from blockpilot.evaluation.pricing import TimedStep
from blockpilot.pairs.loading import Pair
from jobs.bench import step
from jobs.bench.step import StepConfig, bytes_read, read_speed, run, step_costs
from jobs.common.config import PairConfig


def test_costs_are_in_plain_steps() -> None:
    """Costs for two rows: a plain step takes 10 ms, a draft 1 ms more, a slot 0.5 ms and a verified token 0.25 ms."""
    loads = [Load(2), Load(2, 2, 2), Load(2, 6, 6), Load(2, 6, 14)]
    timed = [
        TimedStep(a, 0.01 + 0.001 * (a.num_drafted > 0) + 5e-4 * a.num_drafted + 2.5e-4 * a.num_verified)
        for a in loads
    ]
    costs = step_costs(timed, 2)
    assert list(costs) == ["plain, ms", "2", "4", "8", "draft"]
    assert list(costs.values()) == pytest.approx([10, 1.25, 1.55, 1.75, 0.4])


def test_a_plain_step_reads_all_weights_but_the_embeddings(tiny_pair: Pair) -> None:
    model = tiny_pair.target
    products = sum(m.weight.nbytes for m in model.modules() if hasattr(m, "out_features"))
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    assert bytes_read(tiny_pair) == products + norms


def test_a_table_for_every_number_of_threads(
    pair_config: PairConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "READ_BYTES", 1 << 20)
    assert read_speed(torch.device("cpu")) > 0
    run(StepConfig(pair=pair_config, threads=(1, 1), rows=(1, 2), tokens=(2, 4), context=8, num_steps=1))
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| rows")]
    assert [head.replace(" ", "") for head in heads] == ["|rows|plain,ms|2|4|draft|shareofmemorybandwidth|"] * 2
