"""``kvoffload bench transfer``: every case, one fragment size after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from kvoffload_rs.cli.bench.baselines import OneDma
from kvoffload_rs.cli.bench.cases import Geometry, Plan, make_plan
from kvoffload_rs.cli.bench.chart import write_chart
from kvoffload_rs.cli.bench.device import Device, open_device
from kvoffload_rs.cli.bench.gemm import Products, Pump, Slowdown, part_starts, slowdown
from kvoffload_rs.cli.bench.measure import Board, CudaMover, Mover, Timing, measure
from kvoffload_rs.cli.bench.options import TransferOptions
from kvoffload_rs.cli.bench.report import Row
from kvoffload_rs.cli.bench.vllm import VllmCopies, VllmMover, VllmUnavailable, reason_of
from kvoffload_rs.cli.report import human_bytes


def run_transfer(options: TransferOptions, console: Console) -> list[Row]:
    """Measure everything that was asked for. Progress goes to `console`.

    Raises:
        CudaUnavailableError: there is no GPU, or no torch.
        TransferError: a copy failed, or its bytes were not the right ones.
    """
    geometries = [Geometry.of(size, options.case_bytes, options.pool) for size in options.sizes]
    device = open_device(options.device)
    with device.torch.cuda.device(options.device):
        device.torch.manual_seed(options.seed)
        rows = _Run(options, device, console).rows(geometries)
    if options.chart is not None:
        write_chart(rows, options.chart, device.name)
        console.print(f"chart: {options.chart}", soft_wrap=True, highlight=False, markup=False)
    return rows


@dataclass
class _Found:
    """What one mover did with one plan, by direction."""

    timings: dict[str, Timing] = field(default_factory=dict)
    slowdowns: dict[str, Slowdown] = field(default_factory=dict)
    used: dict[str, str | None] = field(default_factory=dict)


class _Run:
    def __init__(self, options: TransferOptions, device: Device, console: Console) -> None:
        self._options = options
        self._device = device
        self._say: Callable[[str], None] = lambda text: console.print(
            text, soft_wrap=True, highlight=False, markup=False
        )
        self._numbers = itertools.count(1)
        self._rng = random.Random(options.seed)
        self._say(f"{device.name}, torch {device.torch.__version__}")
        self._dma = OneDma(device)
        self._products = Products(device) if options.gemm else None
        self._vllm = self._open_vllm()

    def rows(self, geometries: Sequence[Geometry]) -> list[Row]:
        """The rows of all fragment sizes."""
        found: list[Row] = []
        for geometry in geometries:
            self._say(
                f"fragments of {human_bytes(geometry.fragment)}: jobs of {geometry.fragments}, "
                f"{human_bytes(geometry.job_bytes)}"
            )
            found += self._rows_of(geometry)
        return found

    def _rows_of(self, geometry: Geometry) -> list[Row]:
        options = self._options
        board = Board(self._device, geometry)
        plans = [make_plan(geometry, options.seed)]
        if options.adjacent:
            plans.append(make_plan(geometry, options.seed, adjacent=True))
        self._dma.sample()
        theirs = self._measure_vllm(board, plans)
        ours = {
            path: self._measure(CudaMover(self._device, board, path), board, plans)
            for path in options.paths
        }
        self._dma.sample()
        dma = self._dma.take_medians()
        rows: list[Row] = []
        for number, plan in enumerate(plans):
            for path, direction in itertools.product(options.paths, options.directions):
                row = Row(path, direction, geometry.fragment, geometry.fragments, plan.adjacent)
                row.one_dma_gb_per_s = round(dma[direction], 2)
                row.add_timing(ours[path][number].timings[direction])
                row.add_slowdown(ours[path][number].slowdowns.get(direction))
                if theirs is not None:
                    row.vllm_gb_per_s = round(theirs[number].timings[direction].gb_per_s, 2)
                    row.vllm_used = theirs[number].used[direction]
                    row.add_slowdown(theirs[number].slowdowns.get(direction), "vllm_")
                rows.append(row)
        return rows

    def _measure(self, mover: Mover, board: Board, plans: Sequence[Plan]) -> list[_Found]:
        """Measure one mover with each plan, then close it."""
        options = self._options
        results: list[_Found] = []
        try:
            for plan in plans:
                found = _Found()
                found.timings = measure(
                    mover, board, plan, options.directions, options.repeats, self._numbers
                )
                if board.geometry.fragment in options.gemm and not plan.adjacent:
                    found.slowdowns = self._slowdowns(mover, plan)
                    board.check(plan, mover.name)
                if isinstance(mover, VllmMover):
                    found.used = {name: mover.used(name) for name in options.directions}
                results.append(found)
        finally:
            mover.close()
        return results

    def _slowdowns(self, mover: Mover, plan: Plan) -> dict[str, Slowdown]:
        if self._products is None:
            return {}
        found: dict[str, Slowdown] = {}
        for direction in self._options.gemm_directions:
            pump = Pump(mover, part_starts(mover, plan, direction), self._numbers)
            pairs = self._options.gemm_pairs
            found[direction] = slowdown(self._products, pump, pairs, self._rng)
        return found

    def _open_vllm(self) -> VllmCopies | None:
        if not self._options.vllm:
            return None
        try:
            copies = VllmCopies(self._device, self._options.pool)
        except VllmUnavailable as error:
            self._say(f"vLLM's own copies are not measured: {error}")
            return None
        self._say(f"vLLM {copies.version}'s own copies are measured too")
        return copies

    def _measure_vllm(self, board: Board, plans: Sequence[Plan]) -> list[_Found] | None:
        if self._vllm is None:
            return None
        try:
            return self._measure(self._vllm.mover(board), board, plans)
        except Exception as error:
            # Theirs is a comparison: whatever goes wrong with it must not cost our own figures.
            self._say(f"vLLM's own copies are not measured: {reason_of(error)}")
            self._vllm = None
            return None
