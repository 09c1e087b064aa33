"""Draws speedup.svg from the evaluations in workflows/evaluations: python docs/images/speedup.py"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
EVALUATIONS = HERE.parents[1] / "workflows" / "evaluations"
METHODS = {
    "B=2": ("#c6dbef", "B=2"),
    "B=4": ("#9ecae1", "B=4"),
    "B=8": ("#4292c6", "B=8"),
    "policy-class": ("#fdae6b", "paper's policy (once an answer)"),
    "untrained": ("#2a9d4e", "BlockPilot (trees by price)"),
}
LOADS = [(0, 1), (1, 1), (0, 4), (1, 4), (0, 16), (1, 16)]


def figures(temperature: int, rows: int) -> dict[str, dict[str, float]]:
    file = EVALUATIONS / f"evaluate-T{temperature}-load{rows}" / "evaluation.json"
    return {row["method"]: row["speedup"] for row in json.loads(file.read_text())["figures"]}


plt.rcParams.update({"font.size": 10, "svg.hashsalt": "blockpilot", "svg.fonttype": "none"})
figure, axes = plt.subplots(figsize=(9, 3.4))
width = 0.8 / len(METHODS)
for i, (method, (colour, label)) in enumerate(METHODS.items()):
    found = [figures(*load)[method] for load in LOADS]
    gains = [speed["value"] - 1 for speed in found]
    errors = [[s["value"] - s["low"] for s in found], [s["high"] - s["value"] for s in found]]
    places = [load + (i - len(METHODS) / 2 + 0.5) * width for load in range(len(LOADS))]
    axes.bar(places, gains, width, bottom=1, color=colour, label=label, yerr=errors, error_kw={"elinewidth": 0.8})
axes.axhline(1, color="#333", linewidth=0.8)
axes.set_xticks(range(len(LOADS)), [f"{rows} at a time\nT={temperature}" for temperature, rows in LOADS])
axes.set_ylim(0.7, 2.2)
axes.set_ylabel("speed over plain decoding")
axes.legend(ncol=len(METHODS), frameon=False, loc="upper center", fontsize=9, columnspacing=1.2, handlelength=1)
axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
figure.savefig(HERE / "speedup.svg", metadata={"Date": None})
