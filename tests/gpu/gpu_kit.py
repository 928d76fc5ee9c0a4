"""KV tensors on a GPU, a worker that copies between them and host slots, and a model of both.

Every job is applied to the model when it is submitted, in order. `check` then compares every byte:
all GPU tensors, padding and untouched blocks too, and the host region where it can be seen.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from kvoffload_rs import _core
from kvoffload_rs.errors import TransferError

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

DEVICE = "cuda"
PATHS = ("auto", "direct", "staged")
SLEEP_CYCLES = 200_000_000
"""About 100 ms of a GPU of 2 GHz."""


def unavailable() -> str | None:
    """Why no test here can run; None if they can."""
    if torch is None:
        return "torch is not installed"
    if not hasattr(_core, "CudaWorker"):
        return "this build of kvoffload-rs has no CUDA backend"
    if not _core.cuda_available():
        return f"no CUDA: {_core.cuda_unavailable_reason()}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no usable GPU"
    return None


def synchronize() -> None:
    """Wait until the GPU has nothing to do."""
    torch.cuda.synchronize()


def current_stream() -> int:
    """Handle of torch's current stream."""
    handle: int = torch.cuda.current_stream().cuda_stream
    return handle


def makes_rows(page: int) -> bool:
    """Whether neighbouring pages of this size are rows of one copy on the direct path."""
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return page <= 65536 and version.value >= 12080


def ids(numbers: Sequence[int]) -> np.ndarray:
    """Block or slot numbers as the worker takes them."""
    return np.asarray(numbers, dtype=np.int32)


class Rig:
    """Tensors, one for every layer of every group, and the worker that serves them.

    Args:
        groups: for each KV group, the page bytes of its layers.
        blocks: blocks of each tensor.
        padding: bytes between the pages of a tensor.
        slots: slots of the host region.
        path: copy path.
        register: wait until the region is registered.
        faults: faults to inject.
        one_allocation: all tensors, which then have pages of one size, are parts of one.
        options: passed on to the worker.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        *,
        blocks: int = 64,
        padding: int = 0,
        blocks_per_chunk: int = 1,
        slots: int = 16,
        path: str = "auto",
        register: bool = True,
        faults: dict[str, object] | None = None,
        model: bool = True,
        one_allocation: bool = False,
        **options: Any,
    ) -> None:
        self.blocks, self.slots, self.per_chunk = blocks, slots, blocks_per_chunk
        pages = [page for group in groups for page in group]
        generator = torch.Generator(DEVICE).manual_seed(7)
        self.tensors = [
            torch.randint(
                *(0, 256, (blocks, page + padding)),
                dtype=torch.uint8,
                device=DEVICE,
                generator=generator,
            )
            for page in pages
        ]
        if one_allocation:
            self.tensors = list(torch.stack(self.tensors))
        numbers = itertools.count()
        self.groups = [[(next(numbers), page) for page in group] for group in groups]
        self.slot_bytes = _core.slot_bytes(self.groups, blocks_per_chunk)
        synchronize()
        self.core = _core.CudaWorker(
            [
                (tensor.data_ptr(), blocks, page + padding, page)
                for tensor, page in zip(self.tensors, pages, strict=True)
            ],
            self.groups,
            device=0,
            blocks_per_chunk=blocks_per_chunk,
            num_slots=slots,
            slot_bytes=self.slot_bytes,
            keep_alive=self.tensors,
            copy_path=path,
            faults=faults,
            **options,
        )
        self.window = _window(self.core.region_address, slots * self.slot_bytes)
        self._numbers = itertools.count(1)
        self._expected: dict[int, int] = {}
        self._has_model = model
        if model:
            self.model = [tensor.cpu().numpy().copy() for tensor in self.tensors]
            self.region = np.zeros((slots, self.slot_bytes), np.uint8)
        if register:
            self.wait_registered()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.core.shutdown()

    def wait_registered(self, within: float = 120.0) -> None:
        """Wait until the driver has the whole region, if it is to be registered at all."""
        deadline = time.monotonic() + within
        while True:
            stats = self.core.stats()
            if stats["registered_bytes"] >= stats["region_bytes"]:
                return
            assert time.monotonic() < deadline, stats
            time.sleep(0.002)

    # --- jobs ---

    def store(self, blocks: Sequence[int], slots: Sequence[int], *geometry: Sequence[int]) -> int:
        """Submit a store of one group's blocks, or of several: then sizes and indices follow."""
        sizes, indices = geometry or self._one_group(blocks)
        job = self._next(sizes)
        stream = current_stream()
        self.core.submit_store(job, ids(blocks), list(sizes), list(indices), ids(slots), stream)
        if self._has_model:
            for layer, page, block, slot, at in self._pages(blocks, slots, sizes, indices):
                self.region[slot, at : at + page] = self.model[layer][block, :page]
        return job

    def load(self, slots: Sequence[int], blocks: Sequence[int], *geometry: Sequence[int]) -> int:
        """Submit a load."""
        sizes, indices = geometry or self._one_group(blocks)
        job = self._next(sizes)
        stream = current_stream()
        self.core.submit_load(job, ids(slots), ids(blocks), list(sizes), list(indices), stream)
        if self._has_model:
            for layer, page, block, slot, at in self._pages(blocks, slots, sizes, indices):
                self.model[layer][block, :page] = self.region[slot, at : at + page]
        return job

    def take(self) -> tuple[dict[int, int], list[TransferError]]:
        """Bytes of the jobs that ended well since the last call, and the errors of the others."""
        done: dict[int, int] = {}
        failures: list[TransferError] = []
        while True:
            try:
                finished = self.core.take_finished()
            except TransferError as error:
                failures.append(error)
                continue
            for job, _, size, seconds in finished:
                assert job not in done, f"job {job} was reported twice"
                assert size == self._expected.pop(job), f"job {job} has other bytes"
                assert 0 <= seconds < 60
                done[job] = size
            return done, failures

    def finish(self, *jobs: int, within: float = 60.0) -> list[TransferError]:
        """Take what ends until all these jobs are reported, once each. Answers the failures."""
        missing = set(jobs)
        failures: list[TransferError] = []
        deadline = time.monotonic() + within
        while missing:
            done, failed = self.take()
            missing -= done.keys()
            for error in failed:
                assert error.job is not None
                missing.discard(error.job)
                self._expected.pop(error.job)
            failures += failed
            assert time.monotonic() < deadline, f"{sorted(missing)[:10]} did not end"
            time.sleep(0.0002)
        return failures

    def done(self, *jobs: int) -> None:
        """Wait until jobs have ended well."""
        assert self.finish(*jobs) == []

    def chunks(self, sizes: Sequence[int], indices: Sequence[int]) -> int:
        """Slots that a job of this shape needs."""
        return sum(
            -(-(size + index % self.per_chunk) // self.per_chunk)
            for size, index in zip(sizes, indices, strict=True)
            if size
        )

    # --- bytes ---

    def check(self) -> None:
        """Compare every byte of the GPU tensors and of the region with the model."""
        synchronize()
        for layer, (tensor, model) in enumerate(zip(self.tensors, self.model, strict=True)):
            found = tensor.cpu().numpy()
            if not np.array_equal(found, model):
                block, at = (int(axis[0]) for axis in np.nonzero(found != model))
                wrong = int((found != model).sum())
                raise AssertionError(
                    f"layer {layer}: {wrong} wrong bytes, the first in block {block} at {at} "
                    f"of a page of {found.shape[1]}"
                )
        if self.window is not None:  # None: its bytes are elsewhere
            found = self.window.reshape(self.slots, self.slot_bytes)
            if not np.array_equal(found, self.region):
                slot, at = (int(axis[0]) for axis in np.nonzero(found != self.region))
                raise AssertionError(f"the region differs first in slot {slot} at {at}")

    def same(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether blocks have the same bytes, compared on the GPU."""
        synchronize()
        a, b = (torch.tensor(list(numbers), device=DEVICE) for numbers in (source, target))
        return all(bool(torch.equal(tensor[a], tensor[b])) for tensor in self.tensors)

    # --- inside ---

    def _one_group(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        rest = len(self.groups) - 1
        return [len(blocks)] + [0] * rest, [0] * (rest + 1)

    def _next(self, sizes: Sequence[int]) -> int:
        job = next(self._numbers)
        self._expected[job] = sum(
            size * sum(page for _, page in group)
            for size, group in zip(sizes, self.groups, strict=True)
        )
        return job

    def _pages(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        sizes: Sequence[int],
        indices: Sequence[int],
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Layer, page bytes, block, slot and place in the slot of every fragment."""
        first_block = first_slot = 0
        for group, size, index in zip(self.groups, sizes, indices, strict=True):
            skip = index % self.per_chunk if size else 0
            start = 0
            for layer, page in group:
                for number in range(size):
                    chunk, sub = divmod(skip + number, self.per_chunk)
                    block, slot = blocks[first_block + number], slots[first_slot + chunk]
                    yield layer, page, block, slot, start + sub * page
                start += page * self.per_chunk
            first_block += size
            first_slot += -(-(size + skip) // self.per_chunk)


def _window(address: int, size: int) -> np.ndarray:
    """The bytes of a region."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def run_script(code: str, within: float = 120.0) -> dict[str, Any]:
    """Run code in a process of its own; its last line of output is a JSON object."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=within,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
