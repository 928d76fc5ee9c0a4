"""Sections J, K and the bad starts: how workers begin and end, and who waits for whom."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from kvoffload_rs._core import HostWorker, slot_bytes
from kvoffload_rs.errors import ConfigError, EngineClosedError, KvOffloadError
from worker_kit import BLOCKS, PAGE, SLOW, Device


@pytest.mark.parametrize("faulty", [False, True])
def test_top10_every_rank_reports_every_job_once(faulty: bool) -> None:
    """Four ranks with delays of their own; one of them fails some jobs."""
    jobs = range(1, 41)
    ranks = [
        Device(max_delay_us=500, seed=rank, fail_every_store=4 if faulty and rank == 2 else 0)
        for rank in range(4)
    ]
    try:
        for job in jobs:
            for rank in ranks:
                rank.store(job, [job % BLOCKS], [job % 8])
        for number, rank in enumerate(ranks):
            done, failures = rank.finish(*jobs)
            failed = [job for job in jobs if job % 4 == 0] if faulty and number == 2 else []
            assert sorted(error.job for error in failures) == failed
            assert sorted(done) == sorted(set(jobs) - set(failed))
            assert rank.take() == ({}, [])
    finally:
        for rank in ranks:
            rank.worker.shutdown()


def test_J7_load_does_not_queue_behind_stores() -> None:
    """Many stores are queued when a load comes; it uses none of their blocks and slots."""
    with Device(max_delay_us=SLOW, num_slots=32) as device:
        device.store_now(0, [31], [31])
        stores = range(1, 31)
        for job in stores:
            device.store(job, [job], [job])
        device.load(99, [31], [0])
        device.worker.wait([99])
        done, _ = device.take()
        assert 99 in done
        assert len(done) < len(stores) // 2
        device.finish(*(job for job in stores if job not in done))


def test_top14_shutdown_drains_what_was_submitted() -> None:
    """A shutdown comes with copies queued: they end first, then the memory goes."""
    device = Device(max_delay_us=SLOW)
    for job in range(6):
        device.store(job, [job], [job])
    start = time.monotonic()
    device.worker.shutdown()
    assert time.monotonic() - start < 10
    device.worker.shutdown()  # twice is fine
    assert set(device.take()[0]) == set(range(6))
    for submit in (lambda: device.store(7, [0], [0]), lambda: device.load(7, [0], [0])):
        with pytest.raises(EngineClosedError):
            submit()


def test_top14_shutdown_with_a_hanging_copy_ends() -> None:
    """A copy never ends: the shutdown gives it up at its deadline, and says so by failing it."""
    device = Device(wait_timeout_s=0.3, stall_job=2)
    for job in (1, 2, 3):
        device.store(job, [job], [job])
    start = time.monotonic()
    device.worker.shutdown()
    assert time.monotonic() - start < 10
    done, failures = device.take()
    assert 1 in done
    assert 2 in [error.job for error in failures]


def test_K1_process_with_a_hanging_copy_exits() -> None:
    """Nobody shuts the worker down, and a copy hangs: the interpreter must still end."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from worker_kit import Device\n"
        "device = Device(stall_job=1, wait_timeout_s=1.0)\n"
        "device.store(1, [0], [0])\n"
        "print('submitted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, __file__.rpartition("/")[0]],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "submitted\n"


BAD_WORKERS = {
    "no slots": {"num_slots": 0},
    "slots smaller than a chunk": {"slot_bytes": 64},
    "more memory than there is": {"num_slots": 1 << 31, "slot_bytes": 1 << 30},
    "no blocks in a chunk": {"blocks_per_chunk": 0},
    "unknown verification": {"verify": "sometimes"},
    "unknown fault": {"faults": {"explode": 1}},
    "tensor that does not exist": {"groups": [[(5, PAGE)]]},
    "page larger than its tensor's": {"groups": [[(0, 4 * PAGE)]]},
}


@pytest.mark.parametrize("change", BAD_WORKERS.values(), ids=BAD_WORKERS)
def test_top13_worker_that_cannot_work_is_refused_and_leaves_nothing(change: dict) -> None:
    """Sizes that do not fit each other or the machine: a typed error, and a good worker starts."""
    memory = np.zeros((BLOCKS, PAGE), dtype=np.uint8)
    good: dict = {
        "groups": [[(0, PAGE)]],
        "blocks_per_chunk": 1,
        "num_slots": 4,
        "slot_bytes": slot_bytes([[(0, PAGE)]], 1),
        "verify": "off",
        "faults": None,
    }

    def make(**options: object) -> HostWorker:
        settings = good | options
        groups = settings.pop("groups")
        tensors = [(memory.ctypes.data, BLOCKS, PAGE, PAGE)]
        return HostWorker(tensors, groups, keep_alive=memory, **settings)

    with pytest.raises(KvOffloadError) as caught:
        make(**change)
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value)
    make().shutdown()
