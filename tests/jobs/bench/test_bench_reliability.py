"""The benchmark of reliability: what it counts, and its table on the tiny pair."""

from pathlib import Path

import numpy as np
import pytest
import torch

from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import StepOutcome, VerifiedNodes
from blockpilot.control.cost import NOMINAL, Load
from blockpilot.types import Candidates
from helpers.prices import price
from jobs.bench import reliability
from jobs.bench.reliability import RecordingController, ReliabilityConfig, run
from jobs.common.config import PairConfig

NO_PATHS = np.zeros((0, 9)), np.zeros(0, dtype=int), np.zeros(0, dtype=bool)


def test_a_token_counts_in_the_decile_of_its_probability_in_its_step() -> None:
    """Counts of two first choices, one of them accepted, and a second choice; a step without a draft adds nothing."""
    controller = RecordingController(AcceptanceModel(2), NOMINAL)
    log_probs = torch.tensor([[0.85, 0.1], [0.85, 0.1]]).log()
    candidates = Candidates(torch.tensor([[0, 1], [0, 1]]), log_probs, log_probs, torch.zeros(2, dtype=torch.bool))
    proposal = controller.propose(np.ones(2, dtype=bool), candidates, np.arange(2))
    first, second = proposal.chances[0, 0]
    nodes = VerifiedNodes(np.array([0, 2, 1]), np.array([0, 0, 0]), np.array([True, False, False]), *NO_PATHS)
    outcome = StepOutcome(Load(1, 2, 3), proposal=proposal, verified=lambda: nodes)
    controller.learn(outcome, 0.1)
    low, high = controller.bins
    assert (low.num_nodes, low.expected, low.accepted) == (1, pytest.approx(second), 0)
    assert (high.num_nodes, high.accepted) == (2, 0.5)
    assert high.expected == pytest.approx((first + proposal.chances[0, 1, 0]) / 2)
    controller.learn(outcome._replace(proposal=None), 0.1)
    assert controller.bins == [low, high]


def test_a_row_for_every_temperature(
    pair_config: PairConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table with a row per temperature, at a step cost at which drafting pays (for so small a target it may not)."""
    monkeypatch.setattr(reliability, "measure_price", lambda *_: price(token_s=0.01, launch_s=0.01))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say the number {i}\n" for i in range(6)))
    bins = run(ReliabilityConfig(pair=pair_config, prompts=(str(prompts),), max_new_tokens=12, rows=2))
    assert list(bins) == ["untrained, T=0", "untrained, T=1"]
    lines = capsys.readouterr().out.splitlines()[-2:]
    for (name, deciles), line in zip(bins.items(), lines, strict=True):
        total = sum(b.num_nodes for b in deciles)
        assert total > 0
        assert all(0 <= b.accepted <= 1 for b in deciles)
        assert line.startswith(f"| {name} ")
        assert f"| {total} " in line
