"""The dashboard and the metrics know the same names."""

import json
import re
from pathlib import Path

SERVING = Path(__file__).parents[3] / "jobs/serving"
SUFFIX = {"Counter": "_total", "Gauge": "", "Histogram": "_bucket"}


def exported() -> set[str]:
    """As Ray exports them."""
    source = (SERVING / "metrics.py").read_text()
    found = re.findall(r'(Counter|Gauge|Histogram)\(\s*"(blockpilot_\w+)"', source)
    return {f"ray_{name}{SUFFIX[kind]}" for kind, name in found}


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((SERVING / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"ray_blockpilot_\w+", query)}
    assert len(exported()) >= 14
    assert shown == exported()


def test_panels_lie_side_by_side() -> None:
    panels = json.loads((SERVING / "grafana.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
