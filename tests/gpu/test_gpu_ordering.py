"""Copies wait for the engine's kernels and the engine's kernels for copies, never the host.

Each test has a control that takes one wait away: the same check must then fail, or it would not
have seen the mistake.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import gpu_kit
import pytest
from gpu_kit import SLEEP_CYCLES, Rig, ids, torch

pytestmark = pytest.mark.gpu

SOURCE = list(range(0, 40, 2))
TARGET = list(range(41, 80, 2))
SLOTS = list(range(0, 40, 2))
OLD, NEW, LATER = 0x11, 0x55, 0xEE


@pytest.fixture
def streams() -> Iterator[list[object]]:
    """Two streams that do not wait for each other or for the default stream."""
    yield [torch.cuda.Stream(), torch.cuda.Stream()]


def make(path: str, fault: str | None = None) -> Rig:
    """Two layers of 64 KiB pages, so that a job takes a moment."""
    faults: dict[str, object] | None = {fault: 1} if fault else None
    rig = Rig([[65536, 65536]], blocks=80, slots=40, path=path, model=False, faults=faults)
    # Everything that is made on first use is made before a test counts on time.
    rig.done(rig.store(SOURCE, SLOTS))
    rig.done(rig.load(SLOTS, TARGET))
    gpu_kit.synchronize()
    return rig


def fill(rig: Rig, blocks: list[int], value: int) -> None:
    """Overwrite blocks on the current stream, without waiting for it."""
    for tensor in rig.tensors:
        tensor[blocks[0] : blocks[-1] + 1 : 2].fill_(value)


def holds(rig: Rig, blocks: list[int], value: int) -> bool:
    """Whether blocks have one value everywhere."""
    gpu_kit.synchronize()
    return all(
        bool((tensor[blocks[0] : blocks[-1] + 1 : 2] == value).all()) for tensor in rig.tensors
    )


def stored_value(rig: Rig, value: int) -> bool:
    """Whether the slots hold one value, seen through a load."""
    fill(rig, TARGET, 0)
    gpu_kit.synchronize()
    rig.done(rig.load(SLOTS, TARGET))
    return holds(rig, TARGET, value)


def prepare_slots(rig: Rig, value: int) -> None:
    """Store one value in the slots and wait."""
    fill(rig, SOURCE, value)
    gpu_kit.synchronize()
    rig.done(rig.store(SOURCE, SLOTS))


def store_after_a_kernel(rig: Rig, stream: object) -> bool:
    """A kernel that runs long writes the blocks right before the submit."""
    fill(rig, SOURCE, OLD)
    gpu_kit.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        fill(rig, SOURCE, NEW)
        job = rig.store(SOURCE, SLOTS)
    rig.done(job)
    gpu_kit.synchronize()
    return stored_value(rig, NEW)


def load_after_a_kernel(rig: Rig, stream: object) -> bool:
    """A kernel that runs long reads the blocks right before the submit."""
    prepare_slots(rig, NEW)
    fill(rig, TARGET, OLD)
    seen = [torch.empty_like(tensor) for tensor in rig.tensors]
    gpu_kit.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        for copy, tensor in zip(seen, rig.tensors, strict=True):
            copy.copy_(tensor)
        job = rig.load(SLOTS, TARGET)
    rig.done(job)
    assert holds(rig, TARGET, NEW)
    rows = slice(TARGET[0], TARGET[-1] + 1, 2)
    return all(bool((copy[rows] == OLD).all()) for copy in seen)


def kernel_after_a_load(rig: Rig, first: object, second: object) -> tuple[bool, float]:
    """A load waits behind a long kernel; work on another stream waits for the load."""
    prepare_slots(rig, NEW)
    fill(rig, TARGET, OLD)
    seen = [torch.empty_like(tensor) for tensor in rig.tensors]
    gpu_kit.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(SLEEP_CYCLES)
        job = rig.load(SLOTS, TARGET)
    begin = time.perf_counter()
    with torch.cuda.stream(second):
        rig.core.wait([job], gpu_kit.current_stream())
        waited = time.perf_counter() - begin
        for copy, tensor in zip(seen, rig.tensors, strict=True):
            copy.copy_(tensor)
    rig.done(job)
    gpu_kit.synchronize()
    rows = slice(TARGET[0], TARGET[-1] + 1, 2)
    return all(bool((copy[rows] == NEW).all()) for copy in seen), waited


def kernel_after_a_store(rig: Rig, first: object, second: object) -> tuple[bool, float]:
    """A store waits behind a long kernel; work on another stream may then overwrite the blocks."""
    fill(rig, SOURCE, OLD)
    gpu_kit.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(SLEEP_CYCLES)
        job = rig.store(SOURCE, SLOTS)
    begin = time.perf_counter()
    with torch.cuda.stream(second):
        rig.core.wait([job], gpu_kit.current_stream())
        waited = time.perf_counter() - begin
        fill(rig, SOURCE, LATER)
    rig.done(job)
    gpu_kit.synchronize()
    return stored_value(rig, OLD), waited


# --- stores and loads wait for what was launched before them ---


def test_a_store_sees_what_was_just_written(path: str, streams: list[object]) -> None:
    with make(path) as rig:
        for _ in range(3):
            assert store_after_a_kernel(rig, streams[0])


def test_a_load_does_not_overwrite_what_is_still_read(path: str, streams: list[object]) -> None:
    with make(path) as rig:
        for _ in range(3):
            assert load_after_a_kernel(rig, streams[0])


def test_control_without_the_wait_for_compute(path: str, streams: list[object]) -> None:
    with make(path, "skip_compute_wait") as rig:
        assert not store_after_a_kernel(rig, streams[0])
        assert not load_after_a_kernel(rig, streams[0])


# --- `wait(jobs, stream)` makes a stream wait, and not the caller ---


def test_work_after_a_wait_sees_the_loaded_bytes(path: str, streams: list[object]) -> None:
    with make(path) as rig:
        for _ in range(3):
            right, waited = kernel_after_a_load(rig, *streams)
            assert right
            assert waited < 0.05, "the caller waited for the copy and not only for its submit"


def test_work_after_a_wait_may_overwrite_stored_blocks(path: str, streams: list[object]) -> None:
    with make(path) as rig:
        for _ in range(3):
            right, waited = kernel_after_a_store(rig, *streams)
            assert right
            assert waited < 0.05, "the caller waited for the copy and not only for its submit"


def test_control_without_the_wait_of_the_stream(path: str, streams: list[object]) -> None:
    with make(path, "skip_stream_wait") as rig:
        assert not kernel_after_a_load(rig, *streams)[0]
        assert not kernel_after_a_store(rig, *streams)[0]


def test_a_wait_without_a_stream_blocks_until_the_copy_is_over(
    path: str, streams: list[object]
) -> None:
    with make(path) as rig:
        prepare_slots(rig, NEW)
        fill(rig, TARGET, OLD)
        gpu_kit.synchronize()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(SLEEP_CYCLES)
            job = rig.load(SLOTS, TARGET)
        begin = time.perf_counter()
        rig.core.wait([job], None)
        assert time.perf_counter() - begin > 0.02, "the kernel was too short to tell"
        # Nothing else is waited for: what is read now are the loaded bytes.
        with torch.cuda.stream(streams[1]):
            right = [
                bool((tensor[TARGET[0] : TARGET[-1] + 1 : 2] == NEW).all())
                for tensor in rig.tensors
            ]
        assert all(right)
        rig.done(job)


def test_waiting_for_unknown_and_finished_jobs(path: str, streams: list[object]) -> None:
    with make(path) as rig:
        job = rig.store(SOURCE, SLOTS)
        rig.done(job)
        rig.core.wait([job, 999_999], gpu_kit.current_stream())
        rig.core.wait([job, 999_999], None)


# --- inside the staged path ---


def staged_round_trip(rig: Rig, rounds: int) -> bool:
    """Many chunks of the staging ring each way; False as soon as a byte is wrong."""
    half = rig.slots
    for _ in range(rounds):
        for tensor in rig.tensors:
            tensor[:half].random_()
            tensor[half:].zero_()
        gpu_kit.synchronize()
        rig.done(rig.store(range(half), range(half)))
        rig.done(rig.load(range(half), range(half, 2 * half)))
        if not rig.same(range(half), range(half, 2 * half)):
            return False
    return True


def staged(**faults: object) -> Rig:
    """256 MiB in fragments of 4 KiB through a small ring."""
    return Rig(
        [[4096] * 16],
        blocks=8192,
        slots=4096,
        path="staged",
        model=False,
        staging_bytes=16 << 20,
        faults=faults or None,
    )


def test_both_steps_of_the_staged_path_wait_for_each_other() -> None:
    with staged() as rig:
        assert staged_round_trip(rig, 5)


def test_control_without_the_wait_between_the_steps() -> None:
    with staged(skip_staging_wait=1) as rig:
        assert not staged_round_trip(rig, 5)


def rushed_round_trip(rig: Rig, times: int) -> bool:
    """As `staged_round_trip`, but all pieces are in the queues at once, through a small ring."""
    half = rig.blocks // 2
    stream = gpu_kit.current_stream()
    for turn in range(times):
        torch.manual_seed(turn)
        for tensor in rig.tensors:
            tensor.random_()
        for job in (
            rig.store(range(half), range(half)),
            rig.load(range(half), range(half, 2 * half)),
        ):
            rig.core.wait([job], stream)
            rig.done(job)
        if not rig.same(range(half), range(half, 2 * half)):
            return False
    return True


def test_the_staging_ring_is_never_reused_too_early() -> None:
    with staged() as rig:
        assert rushed_round_trip(rig, 5)


def test_control_without_the_waits_of_the_staging_ring() -> None:
    with staged(skip_ring_wait=1) as rig:
        assert not rushed_round_trip(rig, 5)


def test_jobs_of_the_driver_stream(path: str) -> None:
    """torch's default stream has the handle 0, and is waited for like any other."""
    with make(path) as rig:
        assert gpu_kit.current_stream() == 0
        torch.cuda._sleep(SLEEP_CYCLES)
        fill(rig, SOURCE, NEW)
        sizes = [len(SOURCE)]
        rig.core.submit_store(10_001, ids(SOURCE), sizes, [0], ids(SLOTS), 0)
        rig.core.wait([10_001], None)
        assert rig.core.take_finished()[0][0] == 10_001
        gpu_kit.synchronize()
        assert stored_value(rig, NEW)
