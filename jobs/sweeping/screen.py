"""What the user sees of a finished sweep: a table, and what follows from it."""

from rich.console import Console
from rich.table import Table

from blockpilot.control.price import StepCosts
from blockpilot.evaluation.step_costs import relative_costs
from blockpilot.sweep.rows import Metadata
from blockpilot.sweep.summary import Summary

DISTANCES = {0: "the trained one", 1: "within 1 of it", 2: "within 2"}


def show(summary: Summary, metadata: Metadata, method: str, costs: StepCosts | None) -> None:
    """Print the table of block sizes and what follows from it."""
    title = f"{metadata.pair.target} with {metadata.pair.draft}, {metadata.dtype}, {method}"
    loads = [f"times AR, rows={rows}" for rows in costs.rows] if costs else []
    table = Table("block size", "tau", "best for", "share", *loads, title=title)
    for size, tau in summary.tau_curve.items():
        best = summary.best_counts[size]
        trained = " (trained)" if size == metadata.block_size else ""
        gains = [tau / relative_costs(costs, [size], rows)[0] for rows in costs.rows] if costs else []
        cells = f"{tau:.3f}", f"{best}", f"{best / summary.num_rows:.0%}", *(f"{gain:.2f}" for gain in gains)
        table.add_row(f"{size}{trained}", *cells)
    Console().print(table)
    if costs:
        print(f"times AR: tau over the measured cost of a step at {costs.context} tokens ({costs.device})")
    near = ", ".join(f"{summary.share_within(d, metadata.block_size):.0%} {words}" for d, words in DISTANCES.items())
    print(f"best block size: {near}")
    if summary.ceiling is not None:
        print(f"tau of a choice that knows the best candidate at every step: {summary.ceiling:.3f}")
    if summary.num_disagreements:
        print(f"{summary.num_disagreements} prompts: texts differ between block sizes ({metadata.dtype} rounding)")
