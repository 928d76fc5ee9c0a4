"""Measuring, rows, table and chart of `kvoffload bench transfer`, on a GPU made of host memory."""

from __future__ import annotations

import dataclasses
import importlib
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import FakeVllm, fake_device
from kvoffload_rs.cli import main
from kvoffload_rs.cli.bench import baselines, chart, gemm, measure, transfer
from kvoffload_rs.cli.bench.cases import Geometry, make_plan
from kvoffload_rs.cli.bench.gemm import Pump, Slowdown, part_starts, slowdown, summary
from kvoffload_rs.cli.bench.measure import Board, CudaMover, Timing
from kvoffload_rs.cli.bench.options import TransferOptions
from kvoffload_rs.cli.bench.report import Row, print_rows
from kvoffload_rs.errors import TransferError, TransferTimeoutError
from rich.console import Console

KEYS = {
    "path",
    "direction",
    "fragment_bytes",
    "fragments",
    "gb_per_s",
    "one_dma_gb_per_s",
    "vllm_gb_per_s",
    "submit_us",
    "gemm_slowdown_percent",
    "adjacent",
    "event_gb_per_s",
    "vllm_used",
    "gemm_slowdown_q1_percent",
    "gemm_slowdown_q3_percent",
    "gemm_copy_gb_per_s",
    "vllm_gemm_slowdown_percent",
    "vllm_gemm_slowdown_q1_percent",
    "vllm_gemm_slowdown_q3_percent",
    "vllm_gemm_copy_gb_per_s",
}
SMALL = Geometry.of(64, 64 * 32 * 6, 64 * 32 * 40)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> TransferOptions:
    """Options of a run that takes a moment, on the pretended GPU."""
    monkeypatch.setattr(baselines.OneDma.__init__, "__defaults__", (1 << 16,))
    monkeypatch.setattr(gemm, "SIDE", 8)
    monkeypatch.setattr(transfer, "open_device", lambda index: fake_device())
    return TransferOptions(
        fragments=(64, 128),
        case_bytes=1 << 14,
        repeats=2,
        pool=1 << 18,
        adjacent=True,
        gemm=(64,),
        gemm_pairs=3,
        vllm=False,
    )


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


def text_of(rows: list[Row]) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_rows(rows, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_whole_run(small: TransferOptions) -> None:
    rows = transfer.run_transfer(small, quiet())
    cases = [(r.fragment_bytes, r.adjacent, r.path, r.direction) for r in rows]
    assert cases == list(itertools.product((64, 128), (False, True), small.paths, small.directions))
    for row in rows:
        assert row.gb_per_s is not None and row.one_dma_gb_per_s is not None
        assert row.submit_us is not None and row.submit_us > 0
        assert row.vllm_gb_per_s is None and row.vllm_used is None
        measured = row.fragment_bytes == 64 and not row.adjacent and row.direction in ("d2h", "h2d")
        assert (row.gemm_slowdown_percent is not None) == measured
        assert row.vllm_gemm_slowdown_percent is None
    assert "Matrix products" in text_of(rows)


def test_json_rows_have_the_promised_keys(
    small: TransferOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--fragments", "64", "--bytes", "16KiB", "--pool", "256KiB", "--no-vllm"]
    assert main(["bench", "transfer", "--json", "--repeats", "1", *arguments]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert len(rows) == 9 and all(set(row) == KEYS for row in rows)
    assert rows[0]["fragment_bytes"] == 64 and rows[0]["gemm_slowdown_percent"] is None
    assert "pretended GPU 0" in err


@pytest.mark.parametrize("faults", [{"loads": "nothing"}, {"loads": "neighbour"}])
@pytest.mark.parametrize("direction", ["d2h", "h2d", "both"])
def test_wrong_bytes_are_no_result(faults: dict[str, object], direction: str) -> None:
    device = fake_device(**faults)
    board = Board(device, SMALL)
    mover = CudaMover(device, board, "direct")
    with pytest.raises(TransferError, match="other bytes than were stored"):
        measure.measure(mover, board, make_plan(SMALL, 0), [direction], 1, itertools.count())
    mover.close()


def test_a_timing_counts_every_job() -> None:
    device = fake_device()
    board = Board(device, SMALL)
    mover = CudaMover(device, board, "auto")
    numbers = itertools.count()
    found = measure.measure(mover, board, make_plan(SMALL, 0), ["both"], 3, numbers)
    mover.close()
    assert set(found) == {"both"}
    assert found["both"].size == 2 * SMALL.job_bytes
    assert next(numbers) == 2 + 2 * 4 + 1  # store, load, four pairs, the load of the second check


def test_a_job_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        name = "never"

        def take(self) -> list[Any]:
            return []

    monkeypatch.setattr(measure, "DEADLINE_S", 0.01)
    with pytest.raises(TransferTimeoutError, match="never: job 5") as caught:
        measure.finish(Never(), [5])  # type: ignore[arg-type]
    assert caught.value.job == 5


def test_speed_of_a_timing() -> None:
    assert Timing(10**9, 0.5, 0.25, 1.0).gb_per_s == 2.0
    assert Timing(10**9, 0.5, 0.25, 1.0).event_gb_per_s == 4.0
    assert Timing(10**9, 0.5, 0.0, 1.0).event_gb_per_s is None


# --- matrix products ---


def test_slowdown_is_the_median_over_pairs() -> None:
    class Products:
        beside = iter([11.0, 12.0, 13.0, 14.0, 30.0])

        def milliseconds(self, meanwhile: Any = None) -> float:
            if meanwhile is None:
                return 10.0
            for _ in range(50):
                meanwhile()
            return next(self.beside)

    device = fake_device()
    board = Board(device, SMALL)
    mover = CudaMover(device, board, "staged")
    plan = make_plan(SMALL, 0)
    pump = Pump(mover, part_starts(mover, plan, "d2h"), itertools.count())
    found = slowdown(Products(), pump, 5, random.Random(0))  # type: ignore[arg-type]
    assert found.median == pytest.approx(30)
    assert (found.first_quartile, found.third_quartile) == (pytest.approx(20), pytest.approx(40))
    assert found.copy_gb_per_s > 0
    pump.drain()
    mover.close()


def test_one_pair_is_its_own_quartiles() -> None:
    assert summary([4.0], 1.0) == Slowdown(4.0, 4.0, 4.0, 1.0)


# --- rows ---


def row(**values: Any) -> Row:
    return Row("auto", "d2h", 4096, 100, False, **values)


def test_the_table_shows_every_figure() -> None:
    full = row(
        gb_per_s=40.0,
        event_gb_per_s=41.0,
        one_dma_gb_per_s=50.0,
        vllm_gb_per_s=8.6,
        vllm_used="dma",
        submit_us=6.5,
    )
    full.add_slowdown(Slowdown(1.5, 1.0, 2.0, 39.0))
    full.add_slowdown(Slowdown(7.5, 7.0, 8.0, 8.5), "vllm_")
    text = text_of([full, row()])
    for words in ("4.0 KiB", "40.0", "41.0", "80%", "8.6 (dma)", "6.5", "1.5 (1.0 to 2.0)"):
        assert words in text
    assert "7.5 (7.0 to 8.0)" in text and "39.0" in text


def test_rows_without_products_have_one_table() -> None:
    assert "Matrix products" not in text_of([row(gb_per_s=1.0)])


def test_lines_of_the_chart() -> None:
    rows = [
        Row("direct", "d2h", 8192, 1, False, gb_per_s=2.0, one_dma_gb_per_s=50.0),
        Row("direct", "d2h", 4096, 1, False, gb_per_s=1.0, one_dma_gb_per_s=51.0),
        Row("direct", "d2h", 4096, 1, True, gb_per_s=9.0),
        Row("direct", "h2d", 4096, 1, False, gb_per_s=8.0, vllm_gb_per_s=3.0),
    ]
    assert chart.lines(rows, "d2h") == {
        "direct": [(4096, 1.0), (8192, 2.0)],
        "one DMA": [(4096, 51.0), (8192, 50.0)],
    }
    assert chart.lines(rows, "h2d")["vLLM"] == [(4096, 3.0)]


def test_chart_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(gb_per_s=2.0), Row("auto", "h2d", 8192, 1, False, gb_per_s=3.0)]
    chart.write_chart(rows, tmp_path / "chart.png", "pretended GPU")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


# --- vLLM ---


def install_vllm(monkeypatch: pytest.MonkeyPatch, found: FakeVllm | None) -> None:
    """Let the benchmark find this vLLM, or none."""
    real = importlib.import_module

    def load(name: str) -> Any:
        if not name.startswith("vllm"):
            return real(name)
        if found is None:
            raise ImportError("No module named 'vllm'")
        return found

    monkeypatch.setattr("kvoffload_rs.cli.bench.vllm.importlib.import_module", load)


def run_with_vllm(options: TransferOptions) -> tuple[list[Row], str]:
    console = Console(file=io.StringIO(), width=200)
    rows = transfer.run_transfer(dataclasses.replace(options, vllm=True), console)
    return rows, console.file.getvalue()  # type: ignore[attr-defined]


def test_vllm_is_measured_with_the_same_ids(
    small: TransferOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = FakeVllm()
    install_vllm(monkeypatch, vllm)
    rows, said = run_with_vllm(small)
    assert "vLLM 0.26.0's own copies are measured too" in said
    for row in rows:
        assert row.vllm_gb_per_s is not None
        assert row.vllm_used == ("dma" if row.direction == "d2h" else "kernel")
        assert (row.vllm_gemm_slowdown_percent is None) == (row.gemm_slowdown_percent is None)
    geometry = Geometry.of(64, small.case_bytes, small.pool)
    plan = make_plan(geometry, small.seed)
    assert vllm.ids[:2] == [list(plan.source), list(plan.target)]


@pytest.mark.parametrize(
    ("vllm", "reason"),
    [
        (None, "ImportError: No module named 'vllm'"),
        (FakeVllm(fails="unexpected argument"), "TypeError: unexpected argument"),
        (FakeVllm(wrong=True), "TransferError: vllm returned other bytes than were stored"),
    ],
)
def test_without_a_usable_vllm_one_line_says_why(
    small: TransferOptions,
    monkeypatch: pytest.MonkeyPatch,
    vllm: FakeVllm | None,
    reason: str,
) -> None:
    install_vllm(monkeypatch, vllm)
    rows, said = run_with_vllm(small)
    assert all(row.vllm_gb_per_s is None and row.gb_per_s is not None for row in rows)
    assert said.count(reason) == said.count("not measured") == 1
