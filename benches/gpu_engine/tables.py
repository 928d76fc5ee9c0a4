"""Medians, quartiles, and tables of plain text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float], digits: int = 1) -> dict[str, Any]:
    """Median and quartiles, and every value."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": round(statistics.median(values), digits),
        "q1": round(quartiles[0], digits),
        "q3": round(quartiles[2], digits),
        "values": [round(value, digits) for value in values],
    }


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they must be; None is a dash."""
    cells = [list(headings)] + [["-" if cell is None else str(cell) for cell in r] for r in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(r, widths, strict=True)) for r in cells
    ]
    return "\n".join(lines)
