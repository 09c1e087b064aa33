"""Markdown tables of decoding runs' figures."""

import math
from collections.abc import Mapping, Sequence

from blockpilot.evaluation.statistics import Figures, Interval


def cells(row: Figures) -> dict[str, str]:
    """A method's figures by column, as text."""
    return {
        "method": row.method,
        "B": _number(row.mean_block_size, 2).removesuffix(".00"),
        "tau": with_range(row.tau, 2),
        "tokens/s": with_range(row.tokens_per_s, 1),
        "decode only": _number(row.decode_tokens_per_s.value, 1),
        "speed-up": with_range(row.speedup, 2),
        "same text": f"{math.floor(row.share_equal * 1000) / 10:g}%",  # 100% only if all are
    }


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Markdown table of rows with the same keys, also aligned as plain text."""
    columns = list(rows[0])
    lines = [columns, *([row[name] for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def with_range(interval: Interval, digits: int) -> str:
    """A figure with its interval as text, 1.23 (1.10 to 1.35), or the figure alone if it has no interval."""
    value, low, high = (_number(end, digits) for end in interval)
    return value if math.isnan(interval.low) else f"{value} ({low} to {high})"


def loads_up_to(rows: int) -> list[int]:
    """Batch sizes to show figures for: 1, 4, 16, ... below `rows`, and `rows`."""
    return sorted({rows, *(4**i for i in range(rows.bit_length()) if 4**i < rows)})
