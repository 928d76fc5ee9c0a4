"""A device made of numpy arrays, and a `_core.HostWorker` that copies between it and host slots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from kvoffload_rs._core import HostWorker, slot_bytes
from kvoffload_rs.errors import TransferError

BLOCKS, PAGE = 32, 256
SLOW = 20_000  # microseconds: the longest pause before a job's first byte and again half-way


class Device:
    """Tensors with padded pages, KV groups over them, and the worker that serves them.

    Every group refers to every tensor, as layers do in vLLM's canonical caches.
    """

    def __init__(
        self,
        *,
        tensors: int = 2,
        groups: int = 1,
        blocks_per_chunk: int = 1,
        num_slots: int = 8,
        verify: str = "off",
        wait_timeout_s: float = 30.0,
        page: int = PAGE,
        **faults: object,
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.page = page
        rng = np.random.default_rng(5)
        stride = page + 64  # pages are padded
        self.tensors = [
            rng.integers(0, 256, (BLOCKS, stride), dtype=np.uint8) for _ in range(tensors)
        ]
        self.groups = [[(index, page) for index in range(tensors)] for _ in range(groups)]
        self.worker = HostWorker(
            [(t.ctypes.data, BLOCKS, stride, page) for t in self.tensors],
            self.groups,
            blocks_per_chunk=blocks_per_chunk,
            num_slots=num_slots,
            slot_bytes=slot_bytes(self.groups, blocks_per_chunk),
            keep_alive=self.tensors,
            verify=verify,
            wait_timeout_s=wait_timeout_s,
            faults=faults or None,
        )

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.worker.shutdown()

    # --- bytes ---

    def content(self, *blocks: int) -> bytes:
        """The bytes of some blocks, padding left out."""
        return b"".join(t[block, : self.page].tobytes() for block in blocks for t in self.tensors)

    def fill(self, block: int, value: int) -> bytes:
        """Overwrite a block with one value and answer its content."""
        for tensor in self.tensors:
            tensor[block, : self.page] = value
        return self.content(block)

    # --- jobs ---

    def store(self, job: int, blocks: Sequence[int], slots: Sequence[int], **geometry: Any) -> None:
        """Submit a store of one group's blocks (or of several, with `group_sizes`)."""
        sizes, indices = self._geometry(blocks, geometry)
        self.worker.submit_store(job, ids(blocks), sizes, indices, ids(slots))

    def load(self, job: int, slots: Sequence[int], blocks: Sequence[int], **geometry: Any) -> None:
        """Submit a load."""
        sizes, indices = self._geometry(blocks, geometry)
        self.worker.submit_load(job, ids(slots), ids(blocks), sizes, indices)

    def _geometry(
        self, blocks: Sequence[int], given: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        groups = len(self.groups)
        sizes = given.get("group_sizes", [len(blocks)] + [0] * (groups - 1))
        return sizes, given.get("block_indices", [0] * groups)

    def take(self) -> tuple[dict[int, int], list[TransferError]]:
        """Bytes of the jobs that ended well since the last call, and the errors of the others."""
        done: dict[int, int] = {}
        failures: list[TransferError] = []
        while True:
            try:
                finished = self.worker.take_finished()
            except TransferError as error:
                failures.append(error)
                continue
            for job, _, size, _ in finished:
                assert job not in done, f"job {job} was reported twice"
                done[job] = size
            return done, failures

    def finish(
        self, *jobs: int, within: float = 20.0
    ) -> tuple[dict[int, int], list[TransferError]]:
        """Take what ends until all these jobs are reported, once each."""
        done: dict[int, int] = {}
        failures: list[TransferError] = []
        deadline = time.monotonic() + 20
        while len(done) + len(failures) < len(jobs):
            assert time.monotonic() < deadline, f"{jobs} did not end: {done}, {failures}"
            more, failed = self.take()
            assert not done.keys() & more.keys(), "a job was reported twice"
            done.update(more)
            failures += failed
            time.sleep(0.001)
        assert {*done, *(error.job for error in failures)} == set(jobs)
        return done, failures

    def store_now(self, job: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Store and wait for the end."""
        self.store(job, blocks, slots)
        done, failures = self.finish(job)
        assert job in done, failures

    def load_now(self, job: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Load and wait for the end."""
        self.load(job, slots, blocks)
        done, failures = self.finish(job)
        assert job in done, failures


def ids(numbers: Sequence[int], dtype: str = "int32") -> np.ndarray:
    """Block or slot numbers as vLLM hands them over."""
    return np.asarray(list(numbers), dtype=dtype)
