"""Draws speedup.svg from the evaluations in workflows/evaluations: python docs/images/speedup.py"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
EVALUATIONS = HERE.parents[1] / "workflows" / "evaluations"
LOADS = {
    "T0-load1": "1 at a time\nT=0",
    "T1-load1": "1 at a time\nT=1",
    "T0-load4": "4 at a time\nT=0",
    "T1-load4": "4 at a time\nT=1",
    "T0-load16": "16 at a time\nT=0",
    "T1-load16": "16 at a time\nT=1",
    "copying-T0-load1": "1, copying\nT=0",
    "copying-T1-load1": "1, copying\nT=1",
}
METHODS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "best fixed block size": ("#9ecae1", lambda method: method == "AR" or method.startswith("B=")),
    "best fixed tree": ("#4292c6", lambda method: method.startswith("tree") and "lookup" not in method),
    "tree with lookup": ("#08519c", lambda method: method.startswith("tree") and "lookup" in method),
    "lookup alone": ("#fdae6b", lambda method: method == "lookup alone"),
    "BlockPilot": ("#2a9d4e", lambda method: method == "untrained"),
}


def best(load: str, fits: Callable[[str], bool]) -> dict[str, float]:
    """Speed-up of the fastest method that fits, with its interval."""
    evaluation: dict[str, Any] = json.loads((EVALUATIONS / f"lookup-{load}" / "evaluation.json").read_text())
    speedups: list[dict[str, float]] = [row["speedup"] for row in evaluation["figures"] if fits(row["method"])]
    return max(speedups, key=lambda speedup: speedup["value"])


plt.rcParams.update({"font.size": 10, "svg.hashsalt": "blockpilot", "svg.fonttype": "none"})
figure, axes = plt.subplots(figsize=(9, 3.4))
width = 0.8 / len(METHODS)
for i, (label, (colour, fits)) in enumerate(METHODS.items()):
    found = [best(load, fits) for load in LOADS]
    gains = [speedup["value"] - 1 for speedup in found]
    errors = [[s["value"] - s["low"] for s in found], [s["high"] - s["value"] for s in found]]
    places = [load + (i - len(METHODS) / 2 + 0.5) * width for load in range(len(LOADS))]
    axes.bar(places, gains, width, bottom=1, color=colour, label=label, yerr=errors, error_kw={"elinewidth": 0.8})
axes.axhline(1, color="#333", linewidth=0.8)
axes.set_xticks(range(len(LOADS)), LOADS.values(), fontsize=9)
axes.set_ylim(0.8, 4.2)
axes.set_ylabel("speed over plain decoding")
axes.legend(ncol=len(METHODS), frameon=False, loc="upper left", fontsize=9, columnspacing=1.2, handlelength=1)
axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
figure.savefig(HERE / "speedup.svg", metadata={"Date": None})
