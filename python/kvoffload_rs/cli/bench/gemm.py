"""How much copies slow matrix products down that run at the same time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload_rs.cli.bench.cases import Plan
from kvoffload_rs.cli.bench.device import Device
from kvoffload_rs.cli.bench.measure import Mover, Start, finish

PRODUCTS = 16
"""Matrix products of one timed region: some 20 ms on an H200."""

SIDE = 8192
JOBS_IN_FLIGHT = 4


@dataclass(frozen=True)
class Slowdown:
    """Percent by which products take longer beside copies, over all pairs."""

    median: float
    first_quartile: float
    third_quartile: float
    copy_gb_per_s: float
    """What the copies moved meanwhile: a slow copy disturbs little."""


class Pump:
    """Keeps copies running: a job that is over is started again."""

    def __init__(self, mover: Mover, starts: Sequence[Start], numbers: Iterator[int]) -> None:
        self._mover = mover
        self._idle = list(starts)
        self._running: dict[int, Start] = {}
        self._numbers = numbers
        self.moved = 0
        """Bytes of all jobs that are over."""

    def turn(self) -> None:
        """Take what is over and start what is idle."""
        for job, size, _ in self._mover.take():
            self.moved += size
            self._idle.append(self._running.pop(job))
        while self._idle:
            start, job = self._idle.pop(0), next(self._numbers)
            start(job)
            self._running[job] = start

    def fill(self) -> None:
        """Start everything and wait for the first job's end, so that copies are under way."""
        before, deadline = self.moved, time.monotonic() + 60
        while self.moved == before and time.monotonic() < deadline:
            self.turn()

    def drain(self) -> None:
        """Wait until nothing runs."""
        finish(self._mover, self._running)
        self._idle += self._running.values()
        self._running.clear()


class Products:
    """bf16 products of square matrices on a stream of their own."""

    def __init__(self, device: Device) -> None:
        torch = device.torch
        self._torch = torch
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        self._a = torch.randn(SIDE, SIDE, **kind)
        self._b = torch.randn(SIDE, SIDE, **kind)
        self._c = torch.empty(SIDE, SIDE, **kind)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self.milliseconds(40 * PRODUCTS)  # until the clocks have settled

    def milliseconds(
        self, count: int = PRODUCTS, meanwhile: Callable[[], None] | None = None
    ) -> Any:
        """Time `count` products by CUDA events, calling `meanwhile` until they are over."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(count):
                self._torch.matmul(self._a, self._b, out=self._c)
            end.record()
        while not end.query():
            if meanwhile is not None:
                meanwhile()
        return begin.elapsed_time(end)


def part_starts(mover: Mover, plan: Plan, direction: str) -> list[Start]:
    """Jobs that may run at the same time, because they share no block and no slot."""

    def start(part: Plan) -> Start:
        if direction == "d2h":
            return lambda job: mover.store(job, part.source, part.slots)
        return lambda job: mover.load(job, part.slots, part.target)

    return [start(part) for part in plan.parts(JOBS_IN_FLIGHT)]


def slowdown(products: Products, pump: Pump, pairs: int, rng: random.Random) -> Slowdown:
    """Pairs of timed regions, one alone and one beside copies, in random order."""
    percents: list[float] = []
    moved, seconds = 0, 0.0
    for _ in range(pairs):
        alone = products.milliseconds() if rng.random() < 0.5 else None
        pump.fill()
        before, begin = pump.moved, time.perf_counter()
        beside = products.milliseconds(meanwhile=pump.turn)
        seconds += time.perf_counter() - begin
        moved += pump.moved - before
        pump.drain()
        if alone is None:
            alone = products.milliseconds()
        percents.append((beside / alone - 1) * 100)
    return summary(percents, moved / seconds / 1e9)


def summary(percents: Sequence[float], copy_gb_per_s: float) -> Slowdown:
    """Median and quartiles."""
    if len(percents) == 1:
        return Slowdown(percents[0], percents[0], percents[0], copy_gb_per_s)
    first, middle, third = statistics.quantiles(percents, n=4, method="inclusive")
    return Slowdown(middle, first, third, copy_gb_per_s)
