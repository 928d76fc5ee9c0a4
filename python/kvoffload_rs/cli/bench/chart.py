"""A chart of the rows; needs matplotlib, which is optional."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload_rs.cli.bench.report import Row
from kvoffload_rs.cli.report import human_bytes

_TITLES = {"d2h": "store (GPU to host)", "h2d": "load (host to GPU)", "both": "both at once"}


def lines(rows: Sequence[Row], direction: str) -> dict[str, list[tuple[int, float]]]:
    """Points (fragment bytes, GB/s) of every line of one panel; scattered ids only."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.direction != direction or row.adjacent:
            continue
        for name, value in (
            (row.path, row.gb_per_s),
            ("vLLM", row.vllm_gb_per_s),
            ("one DMA", row.one_dma_gb_per_s),
        ):
            if value is not None:
                found.setdefault(name, {})[row.fragment_bytes] = value
    return {name: sorted(points.items()) for name, points in found.items()}


def write_chart(rows: Sequence[Row], file: Path, title: str) -> None:
    """Write a PNG with a panel for each direction."""
    importlib.import_module("matplotlib").use("Agg")
    plot: Any = importlib.import_module("matplotlib.pyplot")
    directions = [name for name in _TITLES if any(row.direction == name for row in rows)]
    figure, panels = plot.subplots(
        1, len(directions), figsize=(5 * len(directions), 4.2), squeeze=False
    )
    for panel, direction in zip(panels[0], directions, strict=True):
        sizes: set[int] = set()
        for name, points in lines(rows, direction).items():
            at, height = [size for size, _ in points], [value for _, value in points]
            sizes |= set(at)
            panel.plot(at, height, "k--" if name == "one DMA" else "o-", label=name)
        panel.set_xscale("log", base=2)
        ticks = sorted(sizes)
        panel.set_xticks(
            ticks, [human_bytes(size).replace(".0", "") for size in ticks], rotation=45
        )
        panel.set_ylim(bottom=0)
        panel.set_title(_TITLES[direction])
        panel.set_xlabel("fragment")
        panel.set_ylabel("GB/s")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=150, format="png")
    plot.close(figure)
