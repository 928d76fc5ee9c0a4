"""Rows of the transfer benchmark, as JSON or as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvoffload_rs.cli.bench.gemm import Slowdown
from kvoffload_rs.cli.bench.measure import Timing
from kvoffload_rs.cli.report import human_bytes


@dataclass
class Row:
    """One case. None where something was not measured; GB are 10^9 bytes."""

    path: str
    direction: str
    fragment_bytes: int
    fragments: int
    """Fragments that one job moves."""
    adjacent: bool
    gb_per_s: float | None = None
    event_gb_per_s: float | None = None
    one_dma_gb_per_s: float | None = None
    vllm_gb_per_s: float | None = None
    vllm_used: str | None = None
    submit_us: float | None = None
    gemm_slowdown_percent: float | None = None
    gemm_slowdown_q1_percent: float | None = None
    gemm_slowdown_q3_percent: float | None = None
    gemm_copy_gb_per_s: float | None = None
    vllm_gemm_slowdown_percent: float | None = None
    vllm_gemm_slowdown_q1_percent: float | None = None
    vllm_gemm_slowdown_q3_percent: float | None = None
    vllm_gemm_copy_gb_per_s: float | None = None

    def add_timing(self, timing: Timing) -> None:
        """Fill in what our own copies took."""
        self.gb_per_s = round(timing.gb_per_s, 2)
        event = timing.event_gb_per_s
        self.event_gb_per_s = None if event is None else round(event, 2)
        self.submit_us = round(timing.submit_us, 1)

    def add_slowdown(self, found: Slowdown | None, prefix: str = "") -> None:
        """Fill in the effect on matrix products; `prefix` is empty or `vllm_`."""
        if found is not None:
            setattr(self, f"{prefix}gemm_slowdown_percent", round(found.median, 2))
            setattr(self, f"{prefix}gemm_slowdown_q1_percent", round(found.first_quartile, 2))
            setattr(self, f"{prefix}gemm_slowdown_q3_percent", round(found.third_quartile, 2))
            setattr(self, f"{prefix}gemm_copy_gb_per_s", round(found.copy_gb_per_s, 2))

    def as_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print the table, and one of the matrix products if they were measured."""
    table = Table(
        title="Copies between GPU and host, GB/s (10^9 bytes a second)", title_justify="left"
    )
    for name in ("fragment", "path", "direction"):
        table.add_column(name)
    for name in ("GB/s", "by events", "one DMA", "of it", "vLLM", "submit µs"):
        table.add_column(name, justify="right")
    previous = None
    for row in rows:
        if previous is not None and previous != (row.fragment_bytes, row.adjacent):
            table.add_section()
        previous = (row.fragment_bytes, row.adjacent)
        vllm = _number(row.vllm_gb_per_s)
        table.add_row(
            human_bytes(row.fragment_bytes) + (" adjacent" if row.adjacent else ""),
            row.path,
            row.direction,
            _number(row.gb_per_s),
            _number(row.event_gb_per_s),
            _number(row.one_dma_gb_per_s),
            _share(row.gb_per_s, row.one_dma_gb_per_s),
            f"{vllm} ({row.vllm_used})" if row.vllm_used else vllm,
            _number(row.submit_us),
        )
    console.print(table)
    _print_slowdowns([row for row in rows if row.gemm_slowdown_percent is not None], console)


def _print_slowdowns(rows: Sequence[Row], console: Console) -> None:
    if not rows:
        return
    table = Table(
        title="Matrix products beside copies: percent slower, median (quartiles)",
        title_justify="left",
    )
    for name in ("fragment", "path", "direction"):
        table.add_column(name)
    for name in ("slower by", "copies GB/s", "vLLM: slower by", "vLLM: copies GB/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            human_bytes(row.fragment_bytes),
            row.path,
            row.direction,
            _quartiles(
                row.gemm_slowdown_percent,
                row.gemm_slowdown_q1_percent,
                row.gemm_slowdown_q3_percent,
            ),
            _number(row.gemm_copy_gb_per_s),
            _quartiles(
                row.vllm_gemm_slowdown_percent,
                row.vllm_gemm_slowdown_q1_percent,
                row.vllm_gemm_slowdown_q3_percent,
            ),
            _number(row.vllm_gemm_copy_gb_per_s),
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _share(value: float | None, whole: float | None) -> str:
    return "-" if value is None or not whole else f"{value / whole:.0%}"


def _quartiles(middle: float | None, first: float | None, third: float | None) -> str:
    return "-" if middle is None else f"{middle:.1f} ({_number(first)} to {_number(third)})"
