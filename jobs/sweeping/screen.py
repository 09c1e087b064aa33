"""What the user sees of a finished sweep: a table, and what follows from it."""

from rich.console import Console
from rich.table import Table

from blockpilot.control.cost import StepPrice
from blockpilot.evaluation.tables import loads_up_to
from blockpilot.sweep.rows import Metadata
from blockpilot.sweep.summary import Summary

DISTANCES = {0: "the trained one", 1: "within 1 of it", 2: "within 2"}


def show(summary: Summary, metadata: Metadata, method: str, price: StepPrice | None) -> None:
    """Print the table of block sizes and what follows from it."""
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
    if price:
        print(
            f"times AR: tau over the price of a step at {price.context} tokens ({price.device}; "
            f"mean error on steps that the fit has not seen {price.error:.1%})"
        )
    near = ", ".join(f"{summary.share_within(d, metadata.block_size):.0%} {words}" for d, words in DISTANCES.items())
    print(f"best block size: {near}")
    if summary.ceiling is not None:
        print(f"tau of a choice that knows the best candidate at every step: {summary.ceiling:.3f}")
    if summary.num_disagreements:
        print(f"{summary.num_disagreements} prompts: texts differ between block sizes ({metadata.dtype} rounding)")
