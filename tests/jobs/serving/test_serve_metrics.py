"""The dashboard and the metrics know the same names, and accepted tokens are counted by what proposed them."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blockpilot.pairs.loading import Pair
from blockpilot.types import DRAFTED, LOOKED_UP, Step, Tree
from helpers.api import replica_of
from jobs.serving import metrics

SERVING = Path(__file__).parents[3] / "jobs/serving"
SUFFIX = {"Counter": "_total", "Gauge": "", "Histogram": "_bucket"}


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    """Under the names that Ray exports, in panels side by side."""
    metric = r'(Counter|Gauge|Histogram)\(\s*"(blockpilot_\w+)"'
    exported = re.findall(metric, (SERVING / "metrics.py").read_text())
    panels = json.loads((SERVING / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"ray_blockpilot_\w+", query)}
    assert len(exported) >= 14
    assert shown == {f"ray_{name}{SUFFIX[kind]}" for kind, name in exported}
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(corners) == len(panels) == len({panel["id"] for panel in panels})


def test_accepted_tokens_are_counted_by_what_proposed_them(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counter[tuple[str, str]]()

    class Recorded(metrics.Counter):
        def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
            counted[str(self.info["name"]), (tags or {}).get("source", "")] += int(value)
            super().inc(value, tags)

    monkeypatch.setattr(metrics, "Counter", Recorded)
    tree = Tree((7, 8, 9, 10), (0, 1, 2, 3), (DRAFTED, LOOKED_UP, DRAFTED + LOOKED_UP, 0))
    side = Tree((5, 7), (0, 0), (LOOKED_UP, DRAFTED))
    steps = [
        Step(0, (3,), 0, 0, None),  # a prefill
        Step(0, (7, 8, 9, 10, 1), 5, 4, None, tree=tree),
        Step(1, (7, 8, 2), 5, 2, None, tree=tree),
        Step(2, (7, 2), 3, 1, None, tree=side),
        Step(3, (1,), 5, 0, None, tree=tree),
    ]
    with replica_of(tiny_pair, max_length=64) as replica:
        on_step: Any = replica.loop.on_step
        on_step(steps, 0.01)
    accepted = {source: num for (name, source), num in counted.items() if name == "blockpilot_accepted_tokens"}
    assert accepted == {"draft": 3, "lookup": 2, "both": 1, "constraint": 1}
