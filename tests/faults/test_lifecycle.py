"""Section A: requests that come back, end or die while their transfers are live.

The numbers are those of `docs/faults.md`, where every scenario is listed.
"""

from __future__ import annotations

import itertools
import random

import pytest
from kvoffload_rs.errors import KeyNotReadyError, KvOffloadError, StaleHandleError
from pool_kit import HIT, LATER, MISS, Pool, key, keys, slot_numbers


def test_A1_readmitted_request_gets_later_while_its_own_store_is_live(policy: str) -> None:
    """A request is preempted with a store in flight and looked up again before the store ends."""
    pool = Pool(4, policy)
    request = pool.request()
    chunks = keys(1, 2)
    assert pool.offer(chunks, request) == chunks
    assert pool.answers(chunks) == [LATER, LATER]
    assert pool.offer(chunks, request) == []  # re-admitted, it offers them again
    with pytest.raises(KeyNotReadyError):
        pool.manager.prepare_load(chunks, request)
    pool.manager.complete_store(chunks, request)
    pool.manager.prepare_load(chunks, request)
    pool.manager.complete_load(chunks, request)
    pool.assert_idle()


def test_A1_load_and_store_of_one_request_may_be_live_together(policy: str) -> None:
    """One request loads its prefix while its newest chunks are still being stored."""
    pool = Pool(4, policy)
    request = pool.request()
    pool.store(keys(1, 2), request)
    pool.offer(keys(3, 4), request)
    pool.manager.prepare_load(keys(1, 2), request)
    assert request.pins == 4
    pool.manager.complete_store(set(keys(3, 4)), request)
    pool.manager.complete_load(set(keys(1, 2)), request)
    assert request.pins == 0
    pool.assert_idle()


def test_A2_request_that_never_ran_leaves_nothing(policy: str) -> None:
    """A queued request is aborted: it was looked up, but never had anything to store."""
    pool = Pool(2, policy)
    request = pool.request()
    assert pool.answers(keys(1, 2)) == [MISS, MISS]
    before = pool.state()
    assert pool.manager.prepare_store([], request) == ([], b"", [])
    pool.manager.finish_request(request)
    assert pool.state() == before
    pool.assert_idle()


def test_A3_chunk_that_was_not_offered_is_offered_later(policy: str) -> None:
    """The newest chunk has no key yet; the next step offers the whole range again."""
    pool = Pool(4, policy)
    request = pool.request()
    assert pool.offer(keys(1, 2), request) == keys(1, 2)
    assert pool.offer(keys(1, 2, 3), request) == keys(3)
    pool.manager.complete_store(keys(3), request)
    pool.manager.complete_store(keys(1, 2), request)
    assert pool.answers(keys(1, 2, 3)) == [HIT, HIT, HIT]
    pool.assert_idle()


def test_A5_last_store_arrives_after_the_request_has_finished(policy: str) -> None:
    """The end of a request is announced before its deferred last store is prepared."""
    pool = Pool(4, policy)
    request = pool.request()
    pool.store(keys(1), request)
    pool.manager.finish_request(request)
    assert pool.offer(keys(1, 2), request) == keys(2)
    pool.manager.complete_store(keys(2), request)
    pool.manager.finish_request(request)
    assert pool.answers(keys(1, 2)) == [HIT, HIT]
    pool.assert_idle()


@pytest.mark.parametrize("success", [True, False])
def test_A6_completions_come_after_the_end_of_the_request(policy: str, success: bool) -> None:
    """A request finishes, then its two stores complete, then the cache is reset."""
    pool = Pool(4, policy)
    request = pool.request()
    pool.offer(keys(1, 2), request)
    pool.offer(keys(3), request)
    pool.manager.finish_request(request)
    pool.manager.complete_store(keys(3), request, success)
    pool.manager.complete_store(keys(1, 2), request, success)
    assert pool.answers(keys(1, 2, 3)) == [HIT if success else MISS] * 3
    pool.manager.reset()
    pool.manager.finish_request(request)
    pool.assert_idle()


def test_A6_end_of_a_request_counts_once(policy: str) -> None:
    """The end of a request is announced twice, with other requests' accesses in between."""
    pool = Pool(2, policy)
    request = pool.request()
    pool.store(keys(1), request)
    pool.manager.finish_request(request)
    pool.store_and_finish(keys(2))
    pool.manager.finish_request(request)  # must not make chunk 1 young again
    assert pool.victims(1) == keys(1)


def test_A6_end_of_a_request_from_before_a_reset_does_nothing(policy: str) -> None:
    """The cache is reset while a request lives; what it did before must not count after."""
    pool = Pool(2, policy)
    request = pool.request()
    pool.store(keys(1), request)
    pool.manager.reset()
    pool.store_and_finish(keys(1))
    pool.store_and_finish(keys(2))
    pool.manager.finish_request(request)
    assert pool.victims(1) == keys(1)


def test_A7_chunk_is_readable_as_soon_as_its_own_copy_is_done(policy: str) -> None:
    """A long request is still running; another one has the same prefix."""
    pool = Pool(4, policy)
    long_request = pool.request()
    pool.offer(keys(1, 2), long_request)
    pool.offer(keys(3), long_request)
    pool.manager.complete_store(keys(1, 2), long_request)
    assert pool.answers(keys(1, 2, 3)) == [HIT, HIT, LATER]
    assert pool.manager.lookup_run(keys(1, 2, 3)) == (2, True)
    pool.read_and_finish(keys(1, 2))


def test_A10_release_order_never_leaks(policy: str) -> None:
    """Readers and the writer of a chunk let go in every possible order."""
    for order in itertools.permutations(range(3)):
        pool = Pool(1, policy)
        chunk = keys("shared")
        pool.store(chunk)
        readers = [pool.request() for _ in order]
        for reader in readers:
            pool.manager.prepare_load(chunk, reader)
        for left, reader in enumerate(reversed(order)):
            assert pool.offer(keys("new"), pool.request()) is None  # still being read
            pool.manager.complete_load(chunk, readers[reader])
            assert pool.figure("pinned") == (left < len(order) - 1)
        assert pool.victims(1) == chunk
        pool.assert_idle()


def test_A10_eviction_skips_pinned_chunks(policy: str) -> None:
    """The oldest chunk is being read: the next one goes, and the pinned one keeps its place."""
    pool = Pool(3, policy)
    for name in (1, 2, 3):
        pool.store_and_finish(keys(name))
    reader = pool.request()
    pool.manager.prepare_load(keys(1), reader)
    assert pool.victims(1) == keys(2)
    pool.manager.complete_load(keys(1), reader)
    assert pool.victims(1) == keys(1)  # the reader has not finished, so 1 is no younger


def test_A10_slot_is_freed_once(policy: str) -> None:
    """A store fails although a reset has freed its slot already."""
    pool = Pool(2, policy)
    request = pool.request()
    pool.offer(keys(1, 2), request)
    pool.manager.reset()
    assert pool.offer(keys(3), pool.request()) == keys(3)
    pool.manager.complete_store(keys(1, 2), request, False)
    assert pool.figure("free") == 1
    assert pool.figure("stale_completions") == 2


def test_A11_double_release_is_an_error_and_takes_nobody_elses_pin(policy: str) -> None:
    """Two requests read a chunk and one of them releases it twice."""
    pool = Pool(1, policy)
    chunk = keys(1)
    pool.store(chunk)
    first, second = pool.request(), pool.request()
    pool.manager.prepare_load(chunk, first)
    pool.manager.prepare_load(chunk, second)
    pool.manager.complete_load(chunk, first)
    for _ in range(3):
        with pytest.raises(StaleHandleError):
            pool.manager.complete_load(chunk, first)
    assert pool.pins(chunk[0]) == 1
    assert pool.offer(keys(2), pool.request()) is None
    pool.manager.complete_load(chunk, second)
    pool.assert_idle()


def test_A11_release_that_is_partly_wrong_releases_nothing(policy: str) -> None:
    """One key of a release was never loaded: the whole call is refused, and can be corrected."""
    pool = Pool(3, policy)
    pool.store(keys(1, 2, 3))
    request = pool.request()
    pool.manager.prepare_load(keys(1, 2), request)
    with pytest.raises(StaleHandleError) as caught:
        pool.manager.complete_load(keys(1, 2, 3), request)
    assert isinstance(caught.value, KvOffloadError)
    assert request.pins == 2
    pool.manager.complete_load(keys(1, 2), request)
    pool.assert_idle()


def test_A13_nothing_to_load_pins_nothing(policy: str) -> None:
    """Another connector won the request: we are asked to load zero tokens."""
    pool = Pool(2, policy)
    pool.store(keys(1, 2))
    request = pool.request()
    assert pool.manager.prepare_load([], request) == b""
    pool.manager.complete_load([], request)
    assert request.pins == 0
    pool.manager.finish_request(request)
    pool.assert_idle()


def test_A14_load_shrunk_to_the_committed_blocks(policy: str) -> None:
    """Fewer blocks are committed than the lookup promised: a shorter range is loaded."""
    pool = Pool(4, policy)
    pool.store(keys(1, 2, 3, 4))
    slots = [pool.state()["keys"][chunk][0] for chunk in keys(1, 2, 3, 4)]
    assert pool.manager.lookup_run(keys(1, 2, 3, 4)) == (4, False)
    request = pool.request()
    assert slot_numbers(pool.manager.prepare_load(keys(3, 1), request)) == [slots[2], slots[0]]
    pool.manager.complete_load(keys(1, 3), request)
    pool.assert_idle()


def test_A15_same_chunk_twice_in_one_call(policy: str) -> None:
    """A key is named twice in one store and in one load: one slot, and two pins to release."""
    pool = Pool(4, policy)
    request = pool.request()
    chunk = key(1)
    assert pool.offer([chunk, key(2), chunk], request) == [chunk, key(2)]
    assert pool.figure("writing") == 2
    pool.manager.complete_store([chunk, key(2)], request)
    pool.manager.prepare_load([chunk, chunk], request)
    assert pool.pins(chunk) == 2
    pool.manager.complete_load([chunk], request)
    assert pool.pins(chunk) == 1
    pool.manager.complete_load([chunk], request)
    pool.assert_idle()


@pytest.mark.parametrize("event", ["readmit", "finish", "reset"])
@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("late", [True, False], ids=["late", "never"])
def test_top5_request_ends_or_returns_while_its_jobs_are_live(
    policy: str, event: str, success: bool, late: bool
) -> None:
    """A request with a store and a load in flight is re-admitted, ended or cut off by a reset."""
    pool = Pool(4, policy)
    pool.store(keys(1, 2))
    request = pool.request()
    pool.manager.prepare_load(keys(1, 2), request)
    pool.offer(keys(3, 4), request)
    if event == "readmit":
        assert pool.answers(keys(1, 2, 3, 4)) == [HIT, HIT, LATER, LATER]
    elif event == "finish":
        pool.manager.finish_request(request)
    else:
        pool.manager.reset()
    if late or event != "reset":  # completions never come for jobs that a reset cut off
        pool.manager.complete_load(set(keys(1, 2)), request)
        pool.manager.complete_store(set(keys(3, 4)), request, success)
    pool.manager.finish_request(request)
    assert request.pins == 0
    pool.assert_idle()


def test_top6_random_use_and_misuse_never_loses_a_slot(policy: str) -> None:
    """Thousands of calls in any order, half of them wrong, against counts kept by hand."""
    rng = random.Random(20)
    pool = Pool(6, policy)
    names = keys(*range(12))
    requests = [pool.request() for _ in range(4)]
    reading: dict[tuple[int, bytes], int] = {}
    writing: dict[bytes, int] = {}
    ready: set[bytes] = set()
    for _ in range(20_000):
        owner, chunk = rng.randrange(4), rng.choice(names)
        request, held = requests[owner], reading.get((owner, chunk), 0)
        call = rng.randrange(5)
        if call == 0:
            answer = pool.manager.prepare_store([chunk], request)
            taken, evicted = ([], []) if answer is None else (answer[0], answer[2])
            ready.difference_update(evicted)
            writing.update(dict.fromkeys(taken, owner))
        elif call == 1:
            success = rng.random() < 0.7
            pool.manager.complete_store([chunk], request, success)
            if writing.get(chunk) == owner:
                del writing[chunk]
                if success:
                    ready.add(chunk)
        elif call == 2 and chunk in ready:
            pool.manager.prepare_load([chunk], request)
            reading[owner, chunk] = held + 1
        elif call == 2:
            with pytest.raises(KeyNotReadyError):
                pool.manager.prepare_load([chunk], request)
        elif call == 3 and held:
            pool.manager.complete_load([chunk], request)
            reading[owner, chunk] = held - 1
        elif call == 3:
            with pytest.raises(StaleHandleError):
                pool.manager.complete_load([chunk], request)
        elif rng.random() < 0.1:
            pool.manager.finish_request(request)
        expected = LATER if chunk in writing else (HIT if chunk in ready else MISS)
        assert pool.manager.lookup(chunk) is expected
        stats = pool.manager.stats()
        assert stats["writing"] == len(writing)
        assert stats["ready"] == len(ready)
        assert stats["pinned"] == len({name for (_, name), n in reading.items() if n})
        assert stats["free"] == 6 - len(writing) - len(ready)
    for (owner, chunk), n in reading.items():
        pool.manager.complete_load([chunk] * n, requests[owner])
    for chunk, owner in writing.items():
        pool.manager.complete_store([chunk], requests[owner])
    assert [request.pins for request in requests] == [0] * 4
    pool.assert_idle()


def test_top14_reset_with_a_store_in_flight(policy: str) -> None:
    """Submit a store, reset, complete it: the key stays absent and the slot is free."""
    pool = Pool(2, policy)
    request = pool.request()
    pool.offer(keys(1), request)
    pool.manager.reset()
    assert pool.figure("free") == 2
    pool.manager.complete_store(keys(1), request)
    assert pool.answers(keys(1)) == [MISS]
    pool.assert_idle()


def test_top14_reset_under_a_reader_voids_its_pin(policy: str) -> None:
    """A reset comes while a chunk is read; the chunk's successor must not inherit the pin."""
    pool = Pool(1, policy)
    pool.store(keys(1))
    reader = pool.request()
    pool.manager.prepare_load(keys(1), reader)
    pool.manager.reset()
    pool.store(keys(1))
    pool.manager.complete_load(keys(1), reader)
    assert pool.pins(key(1)) == 0
    assert pool.victims(1) == keys(1)
    pool.assert_idle()


def test_top15_keys_are_compared_whole(policy: str) -> None:
    """Same beginning, another group, another length, zeros at the end: all different keys."""
    pool = Pool(16, policy)
    different = [
        key(1),
        key(1, group=1),
        key(1, group=256),
        key(1) + b"\0",
        b"\0" + key(1),
        b"chunk",
        b"chunk\0",
        b"\0",
        bytes(36),
        bytes(35) + b"\1",
        bytes(64),
        bytes(1000),
    ]
    for done, chunk in enumerate(different):
        assert pool.answers(different[done:]) == [MISS] * (len(different) - done)
        pool.store([chunk])
    assert pool.answers(different) == [HIT] * len(different)
    request = pool.request()
    slots = slot_numbers(pool.manager.prepare_load(different, request))
    assert len(set(slots)) == len(different)
