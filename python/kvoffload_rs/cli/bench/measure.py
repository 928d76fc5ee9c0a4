"""Timing of copies: anything that starts jobs and says which are over can be measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvoffload_rs.cli.bench.cases import LAYERS, Geometry, Ids, Plan
from kvoffload_rs.cli.bench.device import Device
from kvoffload_rs.errors import TransferError, TransferTimeoutError

DEADLINE_S = 60.0
"""Longest wait for jobs, and for the pool's registration."""

Start = Callable[[int], None]
"""Starts a job under a given number."""

Finished = tuple[int, int, float]
"""A job that is over, its bytes, and its seconds by CUDA events."""


class Mover(Protocol):
    """Moves blocks between the GPU and a host pool."""

    name: str

    def store(self, job: int, blocks: Ids[int], slots: Ids[int]) -> None:
        """Start copying blocks to slots."""

    def load(self, job: int, slots: Ids[int], blocks: Ids[int]) -> None:
        """Start copying slots to blocks."""

    def take(self) -> list[Finished]:
        """The jobs that ended since the last call."""

    def close(self) -> None:
        """Give memory and threads back."""


class Board:
    """The GPU tensors of one fragment size, filled with random bytes."""

    def __init__(self, device: Device, geometry: Geometry) -> None:
        self._device = device
        self.geometry = geometry
        torch = device.torch
        shape = (geometry.num_blocks, geometry.fragment)
        self.tensors = [
            torch.empty(shape, dtype=torch.uint8, device="cuda").random_() for _ in range(LAYERS)
        ]

    def clear(self, blocks: Ids[int]) -> None:
        """Zero blocks, and wait until they are."""
        index = self._index(blocks)
        for tensor in self.tensors:
            tensor.index_fill_(0, index, 0)
        self._device.torch.cuda.synchronize()

    def check(self, plan: Plan, who: str) -> None:
        """Compare the loaded blocks with those that were stored.

        Raises:
            TransferError: a byte differs.
        """
        self._device.torch.cuda.synchronize()
        source, target = self._index(plan.source), self._index(plan.target)
        for layer, tensor in enumerate(self.tensors):
            if not self._device.torch.equal(tensor[source], tensor[target]):
                raise TransferError(
                    f"{who} returned other bytes than were stored (layer {layer}, fragments of "
                    f"{self.geometry.fragment} bytes)",
                    hint="No speed is reported for wrong bytes: report this.",
                )

    def _index(self, blocks: Ids[int]) -> Any:
        torch = self._device.torch
        return torch.tensor(list(blocks), dtype=torch.int64, device="cuda")


class CudaMover:
    """This package's worker on one copy path; its pool is registered when this returns."""

    def __init__(self, device: Device, board: Board, path: str) -> None:
        geometry = board.geometry
        groups = [[(layer, geometry.fragment) for layer in range(LAYERS)]]
        self.name = path
        # Jobs wait for what this stream has been given: nothing, so that they start at once.
        self._stream = device.torch.cuda.Stream()
        self._core = device.core.CudaWorker(
            [
                (tensor.data_ptr(), geometry.num_blocks, geometry.fragment, geometry.fragment)
                for tensor in board.tensors
            ],
            groups,
            device=device.number,
            blocks_per_chunk=1,
            num_slots=geometry.num_slots,
            slot_bytes=device.core.slot_bytes(groups, 1),
            keep_alive=board.tensors,
            copy_path=path,
        )
        try:
            self._wait_until_registered()
        except BaseException:
            self.close()
            raise

    def store(self, job: int, blocks: Ids[int], slots: Ids[int]) -> None:
        stream = self._stream.cuda_stream
        self._core.submit_store(job, blocks, [len(blocks)], [0], slots, stream)

    def load(self, job: int, slots: Ids[int], blocks: Ids[int]) -> None:
        stream = self._stream.cuda_stream
        self._core.submit_load(job, slots, blocks, [len(blocks)], [0], stream)

    def take(self) -> list[Finished]:
        return [(job, size, seconds) for job, _, size, seconds in self._core.take_finished()]

    def close(self) -> None:
        self._core.shutdown()

    def _wait_until_registered(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            stats = self._core.stats()
            if stats["registered_bytes"] >= stats["region_bytes"]:
                return
            if time.monotonic() > deadline:
                raise TransferTimeoutError(
                    f"{stats['registered_bytes']} of {stats['region_bytes']} bytes of the pool "
                    f"were registered after {DEADLINE_S:.0f} s",
                    hint="Use a smaller --pool.",
                )
            time.sleep(0.005)


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats of one case."""

    size: int
    """Bytes moved by all jobs of a repeat."""
    seconds: float
    """From the first submit until all jobs were seen to be over."""
    event_seconds: float
    """The longest job by its CUDA events."""
    submit_us: float
    """Of one submit call, in microseconds."""

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.size / self.seconds / 1e9

    @property
    def event_gb_per_s(self) -> float | None:
        """The same by CUDA events; None where the mover gives none."""
        return self.size / self.event_seconds / 1e9 if self.event_seconds > 0 else None


def time_jobs(
    mover: Mover, starts: Sequence[Start], repeats: int, numbers: Iterator[int]
) -> Timing:
    """Run jobs together, once to warm up and then `repeats` times."""
    walls: list[float] = []
    events: list[float] = []
    submits: list[float] = []
    size = 0
    for repeat in range(repeats + 1):
        jobs = [(next(numbers), start) for start in starts]
        begin = time.perf_counter()
        calls: list[float] = []
        for job, start in jobs:
            before = time.perf_counter()
            start(job)
            calls.append(time.perf_counter() - before)
        finished = finish(mover, (job for job, _ in jobs))
        wall = time.perf_counter() - begin
        if repeat:
            walls.append(wall)
            submits += calls
            events.append(max(seconds for _, _, seconds in finished))
            size = sum(size for _, size, _ in finished)
    return Timing(
        size, statistics.median(walls), statistics.median(events), statistics.median(submits) * 1e6
    )


def finish(mover: Mover, jobs: Iterable[int]) -> list[Finished]:
    """Poll without a pause until jobs are over.

    Raises:
        TransferTimeoutError: they are not over after `DEADLINE_S`.
    """
    missing = set(jobs)
    finished: list[Finished] = []
    deadline = time.monotonic() + DEADLINE_S
    while missing:
        for done in mover.take():
            missing.discard(done[0])
            finished.append(done)
        if missing and time.monotonic() > deadline:
            job = min(missing)
            raise TransferTimeoutError(
                f"{mover.name}: job {job} was not over after {DEADLINE_S:.0f} s", job=job
            )
    return finished


def measure(
    mover: Mover,
    board: Board,
    plan: Plan,
    directions: Sequence[str],
    repeats: int,
    numbers: Iterator[int],
) -> dict[str, Timing]:
    """Time each direction, and check after each that the right bytes arrived.

    A direction that is not asked for runs once where the check of another needs it.
    """

    def store(job: int) -> None:
        mover.store(job, plan.source, plan.slots)

    def load(job: int) -> None:
        mover.load(job, plan.slots, plan.target)

    def store_beside(job: int) -> None:
        mover.store(job, plan.source, plan.other_slots)

    def load_beside(job: int) -> None:
        mover.load(job, plan.other_slots, plan.target)

    def run(starts: Sequence[Start], direction: str) -> None:
        if direction in directions:
            timings[direction] = time_jobs(mover, starts, repeats, numbers)
        else:
            once(*starts)

    def once(*starts: Start) -> None:
        for start in starts:
            job = next(numbers)
            start(job)
            finish(mover, [job])

    timings: dict[str, Timing] = {}
    board.clear(plan.target)
    run([store], "d2h")
    run([load], "h2d")
    board.check(plan, mover.name)
    if "both" in directions:
        board.clear(plan.target)
        run([store_beside, load], "both")
        board.check(plan, mover.name)
        board.clear(plan.target)
        once(load_beside)
        board.check(plan, mover.name)
    return timings
