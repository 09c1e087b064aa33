"""Figures of decoding runs as Markdown."""

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
    """Rows with the same keys as a Markdown table that is also aligned as plain text."""
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def with_range(interval: Interval, digits: int) -> str:
    """A figure with its interval, as text: 1.23 (1.10 to 1.35); alone if it has none."""
    value, low, high = (_number(end, digits) for end in interval)
    return value if math.isnan(interval.low) else f"{value} ({low} to {high})"


def loads_up_to(rows: int) -> list[int]:
    """1, 4, 16, ... rows, and so many: loads to show figures for."""
    return sorted({rows, *(4**i for i in range(rows.bit_length()) if 4**i < rows)})
