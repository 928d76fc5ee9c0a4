"""Sections A and C on the worker: jobs, their order, their failures and their end.

The device is ordinary memory. The host backend reads a source when its copy runs, so a missing
ordering shows as wrong bytes here as it would on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from kvoffload_rs.errors import (
    InvalidJobError,
    TransferError,
    TransferTimeoutError,
    VerifyError,
)
from worker_kit import BLOCKS, SLOW, Device, ids

ODD_JOBS: dict[str, Callable[[Device], None]] = {
    "more slots than chunks": lambda d: d.store(1, [0, 1], [0, 1, 2]),
    "fewer slots than chunks": lambda d: d.store(1, [0, 1, 2], [0, 1]),
    "no slots": lambda d: d.store(1, [0], []),
    "slots without blocks": lambda d: d.store(1, [], [0]),
    "sizes do not add up": lambda d: d.store(1, [0, 1], [0, 1], group_sizes=[1]),
    "group that does not exist": lambda d: d.store(
        1, [0, 1], [0, 1], group_sizes=[1, 1], block_indices=[0, 0]
    ),
    "no index for the group": lambda d: d.store(1, [0], [0], block_indices=[]),
    "unknown block": lambda d: d.store(1, [BLOCKS], [0]),
    "negative block": lambda d: d.store(1, [-1], [0]),
    "unknown slot": lambda d: d.store(1, [0], [8]),
    "negative slot": lambda d: d.store(1, [0], [-1]),
    "one slot for two chunks": lambda d: d.store(1, [0, 1], [3, 3]),
    "load of an unknown slot": lambda d: d.load(1, [8], [0]),
    "load into an unknown block": lambda d: d.load(1, [0], [BLOCKS]),
    "load of more slots than chunks": lambda d: d.load(1, [0, 1], [0]),
    "one block for two chunks": lambda d: d.load(1, [0, 1], [3, 3]),
}


@pytest.mark.parametrize("odd", ODD_JOBS.values(), ids=ODD_JOBS)
def test_A2_job_whose_numbers_do_not_fit_is_refused_whole(odd: Callable[[Device], None]) -> None:
    """Key, block and slot counts disagree, or a number is outside: nothing is copied."""
    with Device() as device:
        device.store_now(9, range(8), range(8))
        before = [tensor.copy() for tensor in device.tensors]
        with pytest.raises(InvalidJobError) as caught:
            odd(device)
        assert caught.value.job == 1
        assert device.take() == ({}, [])  # what was never taken is never reported
        assert all(map(np.array_equal, before, device.tensors))
        device.store_now(1, [0], [0])  # and the id is free for a good job


def test_A2_64_bit_ids_are_checked_before_they_are_narrowed() -> None:
    """A block number that fits 64 bits but not 32 must not wrap into a valid one."""
    with Device() as device:
        wide = ids([1 << 32], "int64")
        with pytest.raises(InvalidJobError):
            device.worker.submit_store(1, wide, [1], [0], ids([0]))
        with pytest.raises(InvalidJobError):
            device.worker.submit_load(1, wide, ids([0]), [1], [0])
        device.worker.submit_store(1, ids([3], "int64"), [1], [0], ids([0], "int64"))
        device.finish(1)


def test_A9_job_does_what_its_submit_said() -> None:
    """The caller reuses its arrays right after the submit; the copy starts later."""
    with Device(max_delay_us=SLOW) as device:
        expected = device.content(2, 3)
        blocks, slots = ids([2, 3]), ids([4, 5])
        device.worker.submit_store(1, blocks, [2], [0], slots)
        blocks[:] = 0
        slots[:] = 0
        device.finish(1)
        device.load_now(2, [4, 5], [10, 11])
        assert device.content(10, 11) == expected


def test_A13_job_of_nothing_is_reported_once() -> None:
    """Every rank must report every job, also one that leaves it nothing to copy."""
    with Device(groups=2) as device:
        device.store(1, [], [])
        device.load(2, [], [])
        assert device.finish(1, 2) == ({1: 0, 2: 0}, [])
        assert device.take() == ({}, [])


def test_A15_block_that_two_groups_share_may_be_listed_twice() -> None:
    """Two KV groups own the same physical block, so one store names it twice."""
    with Device(groups=2) as device:
        expected = device.content(5)
        for job in (1, 2):  # the second one finds nothing left over from the first
            device.store(job, [5, 5], [0, 1], group_sizes=[1, 1])
            device.finish(job)
        device.load(3, [0, 1], [6, 7], group_sizes=[1, 1])
        device.finish(3)
        assert device.content(6) == device.content(7) == expected


def test_C1_store_reads_its_blocks_when_it_runs() -> None:
    """What makes a missing ordering visible: a block changed after the submit is stored new."""
    with Device(max_delay_us=SLOW, seed=3) as device:
        for job in range(5):
            device.store(job, [job], [job])
        new = device.fill(4, 77)
        device.finish(*range(5))
        device.load_now(9, [4], [20])
        assert device.content(20) == new


def test_C3_load_waits_for_the_store_that_reads_its_blocks() -> None:
    """A block is still being stored when it is given away and loaded into."""
    with Device(max_delay_us=SLOW) as device:
        old = device.content(9)
        device.store_now(0, [9], [7])
        expected = device.fill(1, 11)
        for round_ in range(10):
            device.store(10 + round_, [1], [0])
            device.load(30 + round_, [7], [1])
            device.finish(10 + round_, 30 + round_)
            assert device.content(1) == old
            device.load_now(50 + round_, [0], [2])
            assert device.content(2) == expected
            device.fill(1, 11)


def test_C3_store_waits_for_the_load_that_fills_its_blocks() -> None:
    """A block is stored right after it was loaded into."""
    with Device(max_delay_us=SLOW) as device:
        expected = device.content(9)
        device.store_now(0, [9], [7])
        for first in range(10, 60, 5):
            device.fill(1, first)
            device.load(first, [7], [1])
            device.store(first + 1, [1], [0])
            device.finish(first, first + 1)
            device.load_now(first + 2, [0], [2])
            assert device.content(2) == expected


def test_C3_load_waits_for_the_store_that_fills_its_slot() -> None:
    """A slot is loaded from before its store has ended: it must see the whole store."""
    with Device(max_delay_us=SLOW) as device:
        for round_ in range(10):
            expected = device.fill(1, round_)
            device.store(2 * round_, [1], [0])
            device.load(2 * round_ + 1, [0], [2])
            device.finish(2 * round_, 2 * round_ + 1)
            assert device.content(2) == expected


def test_top14_slot_that_is_reused_after_a_reset() -> None:
    """A reset gives a slot away while a store into it and a load from it are still queued."""
    with Device(max_delay_us=SLOW) as device:
        old, new = device.fill(1, 1), device.fill(2, 2)
        for round_ in range(10):
            first = 10 * round_
            device.store(first, [1], [0])  # before the reset
            device.load(first + 1, [0], [3])
            device.store(first + 2, [2], [0])  # after it
            device.load(first + 3, [0], [4])
            device.finish(first, first + 1, first + 2, first + 3)
            assert device.content(3) == old
            assert device.content(4) == new


def test_C6_only_what_was_submitted_is_ever_acknowledged() -> None:
    """Ids never submitted are waited for, and submits are refused: neither is reported."""
    with Device() as device:
        device.worker.wait([4, 5, 6])
        with pytest.raises(InvalidJobError):
            device.store(4, [0], [99])
        device.store(5, [0], [0])
        device.worker.wait([4, 5])
        assert set(device.take()[0]) == {5}
        assert device.take() == ({}, [])


def test_C6_id_in_use_is_refused_until_its_end_was_taken() -> None:
    """Two jobs with one id could not be told apart."""
    with Device() as device:
        device.store(1, [0], [0])
        device.worker.wait([1])
        with pytest.raises(InvalidJobError):
            device.load(1, [0], [1])
        assert set(device.take()[0]) == {1}
        device.load_now(1, [0], [1])


def test_C6_job_that_ended_in_a_wait_is_still_reported() -> None:
    """A flush waits for jobs; their completions must not be swallowed by it."""
    with Device(max_delay_us=SLOW) as device:
        jobs = range(6)
        for job in jobs:
            device.store(job, [job], [job])
        device.worker.wait(set(jobs))
        assert set(device.take()[0]) == set(jobs)


def test_C11_deadline_never_returns_as_if_done() -> None:
    """A copy hangs: the wait ends with an error, and the job is not among the finished."""
    with Device(wait_timeout_s=0.2, stall_job=1) as device:
        device.store(1, [0], [0])
        start = time.monotonic()
        with pytest.raises(TransferTimeoutError) as caught:
            device.worker.wait([1])
        assert 0.15 < time.monotonic() - start < 5
        assert caught.value.job == 1
        assert device.take() == ({}, [])


def test_C11_slot_of_an_overdue_copy_is_not_reused() -> None:
    """The hanging copy may still write: its slot is refused to everybody, other slots are not."""
    with Device(wait_timeout_s=0.2, stall_job=1) as device:
        device.store(1, [0], [0])
        with pytest.raises(TransferTimeoutError):
            device.worker.wait([1])
        for submit in (lambda: device.store(2, [1], [0]), lambda: device.load(2, [0], [1])):
            with pytest.raises(InvalidJobError) as caught:
                submit()
            assert caught.value.slot == 0
        assert device.worker.stats()["quarantined_slots"] == 1


def test_C11_late_copy_gives_its_slot_back_and_is_reported() -> None:
    """The copy was slow, not dead."""
    with Device(wait_timeout_s=0.01, max_delay_us=200_000, seed=1) as device:
        expected = device.content(0)
        device.store(1, [0], [0])
        with pytest.raises(TransferTimeoutError):
            device.worker.wait([1])
        assert set(device.finish(1)[0]) == {1}
        assert device.worker.stats()["quarantined_slots"] == 0
        device.load(2, [0], [1])
        device.finish(2)
        assert device.content(1) == expected


def test_top2_failed_store_is_reported_as_failed_once() -> None:
    """Every third store fails half-way: an error that names it, and nothing lost of the others."""
    with Device(fail_every_store=3) as device:
        for job in range(1, 7):
            device.store(job, [job], [job])
        done, failures = device.finish(*range(1, 7))
        assert set(done) == {1, 2, 4, 5}
        assert [error.job for error in failures] == [3, 6]
        assert [error.slot for error in failures] == [3, 6]
        assert all(type(error) is TransferError and str(error) for error in failures)
        assert device.take() == ({}, [])
        device.store_now(7, [3], [3])  # tried again, it works


def test_top2_failed_load_is_reported_as_failed_once() -> None:
    """Every second load fails half-way."""
    with Device(fail_every_load=2) as device:
        device.store_now(0, range(4), range(4))
        expected = device.content(0, 2)
        for job in range(4):
            device.load(10 + job, [job], [20 + job])
        done, failures = device.finish(10, 11, 12, 13)
        assert set(done) == {10, 12}
        assert [error.job for error in failures] == [11, 13]
        assert device.content(20, 22) == expected


def test_top2_slot_of_a_failed_store_cannot_be_loaded() -> None:
    """With verification on, the remains of a failed store are never loaded, whoever asks."""
    with Device(fail_every_store=2, verify="all") as device:
        device.store_now(1, [0], [0])
        device.store(2, [1], [0])
        assert device.finish(2)[0] == {}
        before = device.fill(5, 5)
        device.load(3, [0], [5])
        done, failures = device.finish(3)
        assert done == {}
        assert isinstance(failures[0], VerifyError)
        assert device.content(5) == before


def test_top11_changed_bytes_are_noticed_before_they_are_loaded() -> None:
    """A bit flips in the host memory after the store."""
    with Device(corrupt_every_store=2, verify="all") as device:
        for job in (1, 2):
            device.store_now(job, [job], [job])
        expected, before = device.content(1), device.fill(6, 6)
        device.load_now(3, [1], [5])
        assert device.content(5) == expected
        device.load(4, [2], [6])
        done, failures = device.finish(4)
        assert done == {}
        assert isinstance(failures[0], VerifyError)
        assert (failures[0].job, failures[0].slot) == (4, 2)
        assert device.content(6) == before


def test_top11_slot_that_was_never_stored_is_not_loaded() -> None:
    """The pool's memory is not KV until something was stored there."""
    with Device(verify="all") as device:
        device.load(1, [3], [0])
        assert isinstance(device.finish(1)[1][0], VerifyError)


@pytest.mark.parametrize("control", ["nothing", "neighbour"])
def test_loads_that_copy_the_wrong_bytes_are_noticed(control: str) -> None:
    """The control of every byte comparison: such loads succeed, and the bytes differ."""
    with Device(loads=control) as device:
        expected = device.content(0, 1)
        device.store_now(1, [0, 1], [0, 1])
        device.load_now(2, [0, 1], [10, 11])
        assert device.content(10, 11) != expected
