"""Plots of sweeps, trainings and evaluations, as PNG in memory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from blockpilot.control.cost import StepPrice
from blockpilot.evaluation.statistics import Interval
from blockpilot.evaluation.tables import loads_up_to
from blockpilot.policy.reliability import Bin
from blockpilot.types import MAX_BLOCK_SIZE

DOTTED: dict[str, Any] = {"marker": "o", "markersize": 4}

Array = NDArray[np.float64]


def tau_curves(curves: Mapping[str, Mapping[int, float]], trained: int) -> bytes:
    """tau by block size: one line per prompt set."""
    figure, axes = _new("block size", "tau (tokens a step)")
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), **DOTTED, label=name)
    sizes = sorted({size for curve in curves.values() for size in curve})
    axes.set_xticks(sizes)
    if trained in sizes:
        axes.axvline(trained, linestyle="--", color="gray", linewidth=1)
    axes.legend(fontsize="small")
    return _png(figure)


def tree_curves(taus: Mapping[str, Mapping[int, float]], speeds: Mapping[str, Mapping[int, float]]) -> bytes:
    """tau and speed-up over plain decoding by verified tokens per step: a chain (dashed) and the tree after it share
    a colour.
    """
    shown = {"tau (tokens a step)": taus} | ({"speed-up over plain decoding": speeds} if speeds else {})
    figure = Figure(figsize=(4.5 * len(shown), 3.4), layout="constrained")
    for axes, (ylabel, curves) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        for i, (name, curve) in enumerate(curves.items()):
            line = "o--" if name.startswith("chain") else "-"
            axes.plot(list(curve), list(curve.values()), line, color=f"C{i // 2}", markersize=3, label=name)
        axes.set(xscale="log", xlabel="drafted tokens that a step verifies", ylabel=ylabel)
        ticks = [2**i for i in range(7)]
        axes.set_xticks(ticks, map(str, ticks))
        axes.legend(fontsize="small")
    return _png(figure)


def speed_ups(groups: Mapping[str, Mapping[str, Interval]]) -> bytes:
    """Bar charts of speed-ups over plain decoding: a panel per group, three in a row, and a bar per method."""
    columns = min(len(groups), 3)
    lines = math.ceil(len(groups) / columns)
    width = max(3.2, 1 + 0.25 * max(map(len, groups.values())))
    figure = Figure(figsize=(width * columns, 3.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for unused in panels.flat[len(groups) :]:
        unused.remove()
    for axes, (title, methods) in zip(panels.flat, groups.items(), strict=False):
        heights, errors = _with_errors(methods.values())
        axes.bar(range(len(methods)), heights, yerr=errors, capsize=2, color=list(map(_colour, methods)))
        axes.set_xticks(range(len(methods)), list(methods), rotation=60, ha="right", fontsize="small")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(title, fontsize="small")
    for first in panels[:, 0]:
        first.set_ylabel("speed-up over plain decoding")
    return _png(figure)


def over_best_fixed(rows: Mapping[str, Mapping[str, Interval]], methods: Sequence[str]) -> bytes:
    """Speed relative to the best fixed block size: for every row one point with its interval per method."""
    figure = Figure(figsize=(7, 1.4 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlabel="speed over that of the best fixed block size")
    for i, method in enumerate(methods):
        shown = {y: row[method] for y, row in enumerate(rows.values()) if method in row}
        heights = [y + (i - (len(methods) - 1) / 2) * 0.2 for y in shown]
        values, errors = _with_errors(shown.values())
        axes.errorbar(values, heights, xerr=errors, fmt="o", markersize=4, capsize=2, label=method, color=f"C{i}")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize="small")
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    return _png(figure)


def cost_curves(price: StepPrice) -> bytes:
    """Step cost by the block size of chains, relative to a plain step: one line per batch size."""
    figure, axes = _new("block size", "cost of a step, plain = 1")
    sizes = range(1, MAX_BLOCK_SIZE + 1)
    for rows in loads_up_to(price.rows):
        axes.plot(sizes, price.relative(sizes, rows), label=f"{rows} row{'s' * (rows > 1)}")
    axes.legend(fontsize="small", title=price.device, title_fontsize="small")
    return _png(figure)


def reliability(curves: Mapping[str, Sequence[Bin]]) -> bytes:
    """Observed acceptance of draft-tree nodes by expected acceptance probability: one line per source."""
    figure, axes = _new("expected acceptance probability", "observed acceptance")
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
    for name, bins in curves.items():
        axes.plot([b.expected for b in bins], [b.accepted for b in bins], **DOTTED, label=name)
    axes.legend(fontsize="small")
    return _png(figure)


def _with_errors(intervals: Iterable[Interval]) -> tuple[Array, Array]:
    """Values [n], and the distances of their interval ends below and above them [2, n]."""
    values, low, high = np.array(list(intervals)).T
    return values, np.maximum([values - low, high - values], 0)


def _new(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    return figure, figure.add_subplot(xlabel=xlabel, ylabel=ylabel)


def _colour(method: str) -> str:
    if "bound" in method:
        return "lightgray"
    return "tab:orange" if method == "policy" else "tab:blue"


def _png(figure: Figure) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()
