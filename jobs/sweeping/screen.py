"""Report of a finished sweep: printed tables, and pictures."""

from collections.abc import Mapping
from itertools import product

from rich.console import Console
from rich.table import Table

from blockpilot.control.cost import Load, StepPrice
from blockpilot.evaluation.tables import loads_up_to
from blockpilot.sweep.rows import Metadata
from blockpilot.sweep.summary import Summary

DISTANCES = {0: "the trained one", 1: "within 1 of it", 2: "within 2"}


def show(
    summary: Summary, by_set: Mapping[str, Summary], metadata: Metadata, method: str, price: StepPrice | None
) -> None:
    """Print tau by block size, over all prompts and by prompt set, and conclusions."""
    title = f"{metadata.pair.target} with {metadata.pair.draft}, {metadata.dtype}, {method}"
    loads = loads_up_to(price.rows) if price else []
    table = Table(
        "block size", "tau", "best for", "share", *(f"times AR, rows={rows}" for rows in loads), title=title
    )
    for size, tau in summary.tau_curve.items():
        best = summary.best_counts[size]
        trained = " (trained)" if size == metadata.block_size else ""
        gains = [tau / price.relative([size], rows)[0] for rows in loads] if price else []
        cells = f"{tau:.3f}", f"{best}", f"{best / summary.num_rows:.0%}", *(f"{gain:.2f}" for gain in gains)
        table.add_row(f"{size}{trained}", *cells)
    Console().print(table)
    if len(by_set) > 1:
        Console().print(_tau_by_set(summary, by_set))
    if summary.slot_accuracy:
        Console().print(_accuracy_by_slot(summary))
    if price:
        print(
            f"times AR: tau over the step cost at {price.context} tokens ({price.device}; "
            f"mean error on held-out steps {price.error:.1%})"
        )
    near = ", ".join(f"{summary.share_within(d, metadata.block_size):.0%} {words}" for d, words in DISTANCES.items())
    print(f"best block size: {near}")
    if summary.ceiling is not None:
        print(f"tau with the best candidate at every step (bound): {summary.ceiling:.3f}")
    if summary.num_disagreements:
        print(f"{summary.num_disagreements} prompts: texts differ between block sizes ({metadata.dtype} rounding)")


def _tau_by_set(summary: Summary, by_set: Mapping[str, Summary]) -> Table:
    names = sorted(by_set)
    table = Table("block size", *(f"{name} ({by_set[name].num_rows})" for name in names), title="tau by prompt set")
    for size in summary.tau_curve:
        table.add_row(str(size), *(f"{by_set[name].tau_curve[size]:.3f}" for name in names))
    return table


def _accuracy_by_slot(summary: Summary) -> Table:
    accuracy = summary.slot_accuracy
    table = Table("", *map(str, accuracy), title="draft's choices by slot, after the right token before it")
    for name, shares in zip(("first right", "any right"), zip(*accuracy.values(), strict=True), strict=True):
        table.add_row(name, *(f"{share:.2f}" for share in shares))
    return table


def pictures(
    summary: Summary, by_set: Mapping[str, Summary], trained: int, price: StepPrice | None
) -> dict[str, bytes]:
    """PNGs by file name: tau by block size, one line per prompt set; for a dense sweep also trees and chains."""
    from jobs.common import figures  # a second to import

    curves = {name: by_set[name].tau_curve for name in sorted(by_set)}
    images = {"tau_curves.png": figures.tau_curves(curves, trained)}
    if summary.num_places:
        taus = {"chain": summary.chain_curve, "tree": summary.tree_curve}
        images["trees.png"] = figures.tree_curves(taus, _tree_speeds(taus, price, trained - 1) if price else {})
    return images


def _tree_speeds(
    taus: Mapping[str, Mapping[int, float]], price: StepPrice, deepest: int
) -> dict[str, dict[int, float]]:
    """Speed-ups over plain decoding by layout and load: trees draft `deepest` slots, chains only the slots that they
    verify.
    """
    speeds = dict[str, dict[int, float]]()
    for rows, (layout, curve) in product(loads_up_to(price.rows), taus.items()):
        loads = {num: Load(rows, rows * (num if layout == "chain" else deepest), rows * num) for num in curve}
        cost = {num: price.seconds(load) / price.seconds(Load(rows)) for num, load in loads.items()}
        speeds[f"{layout}, {rows} row{'s' * (rows > 1)}"] = {num: tau / cost[num] for num, tau in curve.items()}
    return speeds
