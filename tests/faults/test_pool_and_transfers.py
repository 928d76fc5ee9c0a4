"""Manager and worker together: a hit means that every byte is where the load will read it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from pool_kit import HIT, MISS, Pool, key
from worker_kit import BLOCKS, Device

SLOTS = 6


class Engine:
    """The connector's part: submits jobs for one request each, and completes what has ended."""

    def __init__(self, policy: str, **faults: object) -> None:
        self.pool = Pool(SLOTS, policy)
        self.device = Device(num_slots=SLOTS, **faults)
        self.jobs: dict[int, tuple[str, list[bytes], object, object]] = {}
        self.next_job = 0
        self.failed_keys: set[bytes] = set()

    def submit(self, kind: str, chunks: list[bytes], request: object, note: object) -> int:
        """Remember a job before it is submitted."""
        self.next_job += 1
        self.jobs[self.next_job] = (kind, chunks, request, note)
        return self.next_job

    def collect(self) -> list[tuple[list[bytes], object]]:
        """Complete what has ended; answers the loads that ended well."""
        done, failures = self.device.take()
        loads = []
        for job, success in [(job, True) for job in done] + [(e.job, False) for e in failures]:
            kind, chunks, request, note = self.jobs.pop(job)
            if kind == "store":
                self.pool.manager.complete_store(chunks, request, success)
                if not success:
                    assert self.pool.answers(chunks) != [HIT] * len(chunks)
            else:
                self.pool.manager.complete_load(chunks, request)
                if success:
                    loads.append((chunks, note))
        return loads


@pytest.mark.parametrize(
    "faults",
    [
        {"max_delay_us": 300},
        {"max_delay_us": 300, "fail_every_store": 5},
        {"fail_every_load": 4},
        {"verify": "all", "max_delay_us": 200, "fail_every_store": 3, "fail_every_load": 3},
    ],
    ids=["slow", "stores fail", "loads fail", "all at once"],
)
def test_top3_whatever_hits_and_loads_has_its_bytes(policy: str, faults: dict) -> None:
    """Random stores, loads and failures in a tiny pool: every load that succeeds is right."""
    rng = random.Random(8)
    engine = Engine(policy, seed=4, **faults)
    pool, device = engine.pool, engine.device
    # Chunk n is one block whose bytes follow from n alone. Blocks 0 to 15 are sources, and every
    # load in flight has a block of its own above.
    free_blocks = list(range(16, BLOCKS))
    checked = 0
    with device:
        expected = {n: device.fill(n, 100 + n) for n in range(16)}
        for step in range(3_000):
            n = rng.randrange(16)
            request = pool.request()
            if rng.random() < 0.5:
                answer = pool.manager.prepare_store([key(n)], request)
                if answer is not None and answer[0]:
                    slots = memoryview(answer[1]).cast("i")
                    device.store(engine.submit("store", answer[0], request, n), [n], slots)
            elif pool.manager.lookup(key(n)) is HIT and free_blocks:
                slots = memoryview(pool.manager.prepare_load([key(n)], request)).cast("i")
                block = free_blocks.pop()
                device.fill(block, 0)
                job = engine.submit("load", [key(n)], request, (n, block))
                device.load(job, slots, [block])
            pool.manager.finish_request(request)
            if step % 7 == 0 or not free_blocks:  # some of what is in flight ends
                device.worker.wait(rng.sample(list(engine.jobs), len(engine.jobs) // 2))
                checked += _check(engine, expected, free_blocks)
        device.worker.wait(list(engine.jobs))
        checked += _check(engine, expected, free_blocks)
    assert not engine.jobs
    assert checked > 100
    pool.assert_idle()


def _check(engine: Engine, expected: dict[int, bytes], free_blocks: list[int]) -> int:
    checked = 0
    before = {job: entry for job, entry in engine.jobs.items() if entry[0] == "load"}
    for _, (n, block) in engine.collect():
        assert engine.device.content(block) == expected[n]
        checked += 1
    for job, (_, _, _, (_, block)) in before.items():
        if job not in engine.jobs:
            free_blocks.append(block)
    return checked


def test_top14_reset_with_copies_in_flight(policy: str) -> None:
    """A reset cuts off stores and loads, and their slots are used again at once."""
    rng = random.Random(2)
    engine = Engine(policy, max_delay_us=2_000, seed=9)
    pool, device = engine.pool, engine.device
    chunks = [key(n) for n in range(SLOTS)]
    stores: list[list[int]] = []
    with device:
        for generation in range(30):
            if generation >= 2:  # the blocks of the last but one generation are free to change
                device.worker.wait(stores[generation - 2])
            blocks = [generation % 2 * SLOTS + n for n in range(SLOTS)]
            expected = [device.fill(block, (generation + block) % 251) for block in blocks]
            first_job = engine.next_job
            for block, chunk in zip(blocks, chunks, strict=True):
                request = pool.request()
                answer = pool.manager.prepare_store([chunk], request)
                assert answer is not None
                job = engine.submit("store", [chunk], request, None)
                device.store(job, [block], memoryview(answer[1]).cast("i"))
            stores.append(list(range(first_job + 1, engine.next_job + 1)))
            loads: list[int] = []
            if rng.random() < 0.6:  # these stores end; the others are cut off
                device.worker.wait(stores[-1])
                engine.collect()
                assert pool.answers(chunks) == [HIT] * SLOTS
                for n, chunk in enumerate(chunks):
                    request = pool.request()
                    slots = memoryview(pool.manager.prepare_load([chunk], request)).cast("i")
                    loads.append(engine.submit("load", [chunk], request, n))
                    device.load(loads[-1], slots, [16 + n])
            pool.manager.reset()
            device.worker.wait(loads)  # vLLM flushes loads: their blocks are given away
            for _, n in engine.collect():
                assert device.content(16 + n) == expected[n]
            assert pool.answers(chunks) == [MISS] * SLOTS
        device.worker.wait(stores[-1])
        engine.collect()
    assert not engine.jobs
    pool.assert_idle()


def test_content_is_compared_against_something_that_changes() -> None:
    """The blocks of the device differ from each other: equality of bytes means something."""
    with Device() as device:
        assert len({device.content(block) for block in range(BLOCKS)}) == BLOCKS
        assert not np.array_equal(device.tensors[0], device.tensors[1])
