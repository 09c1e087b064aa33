"""The benchmark of headroom: foresight verifies right nodes only, drafts no deeper than they reach, and wins."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from blockpilot.native.growing import Nodes
from helpers.prices import price
from jobs.bench.headroom import HeadroomConfig, _num_right, _order_right_first, run
from jobs.common.config import ConfigError, PairConfig


def test_foresight_is_no_slower_than_the_choice(
    pair_config: PairConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts that copy: lookup and draft are right now and then. Both kinds of foresight together are the best."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say {i} {i} {i} {i} {i} {i}\n" for i in range(6)))
    step_cost = asdict(price(launch_s=0.05, slot_s=0.01, token_s=0.05))
    step_cost["pair"] = step_cost["pair"]._asdict()
    settings = {"concurrency": 2, "temperature": 1.0, "seed": 1, "prompts": [str(prompts)]}
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text(json.dumps({"config": settings, "setting": {"price": step_cost}}))
    config = HeadroomConfig(pair=pair_config, evaluation=tmp_path, tree_sizes=(3,), max_new_tokens=30)
    rates = run(config)
    assert list(rates)[:3] == ["plain", "tree 3 with lookup", "choice"]
    assert rates["plain"] == 1
    assert rates["perfect nodes and depths"] > rates["choice"]
    assert rates["perfect nodes and depths"] > 1
    assert "| perfect depths " in capsys.readouterr().out

    evaluation.write_text("{}")
    with pytest.raises((ValueError, ConfigError), match="not an evaluation with a step cost"):
        run(config)


def test_right_nodes_come_first_and_keep_their_parents() -> None:
    """Tree of 7 below 5; 8 and 9 below 7; 4 below 9. The text is 7, 9, 4."""
    zeros, tokens = np.zeros((1, 5), dtype=int), np.array([[6, 7, 8, 9, 4]])
    parents, depths = np.array([[0, 0, 2, 2, 4]]), np.array([[1, 1, 2, 2, 3]])
    chances = np.array([[0.5, 0.4, 0.3, 0.2, 0.1]])
    others = [zeros.copy() for _ in range(4)]
    nodes = Nodes(tokens, parents, chances, depths, *others, np.array([5]))
    _order_right_first(nodes, 0, [7, 9, 4, 1])
    assert nodes.tokens.tolist() == [[7, 9, 4, 6, 8]]
    assert nodes.parents.tolist() == [[0, 1, 2, 0, 1]]
    assert nodes.chances.tolist() == [[1, 1, 1, 0, 0]]
    assert nodes.depths.tolist() == [[1, 2, 3, 1, 2]]


def test_right_positions_are_those_before_the_first_error() -> None:
    assert _num_right([{1, 2}, {3}, {4}], [2, 3, 5]) == 2
    assert _num_right([{1, 2}, {3}], [1]) == 1
    assert _num_right([], [1]) == 0
