"""Sections B and C: writes that never end, and settings that cannot work."""

from __future__ import annotations

import time

import pytest
from kvoffload_rs._core import Manager
from kvoffload_rs.errors import ConfigError, KeyNotReadyError
from pool_kit import HIT, LATER, MISS, Pool, keys


def wait_for_miss(pool: Pool, chunk: bytes) -> None:
    """Poll a chunk being written until it counts as absent."""
    start = time.monotonic()
    while pool.manager.lookup(chunk) is LATER:
        assert time.monotonic() - start < 10, "the deadline has no effect"
        time.sleep(0.02)


@pytest.fixture
def stuck(policy: str) -> tuple[Pool, object]:
    """A pool of two slots in which one write never ends, and its deadline is the next second."""
    pool = Pool(2, policy, write_deadline_s=0.0)
    owner = pool.request()
    assert pool.offer(keys(1), owner) == keys(1)
    return pool, owner


def test_C10_write_that_never_completes_turns_into_a_miss(policy: str) -> None:
    """A completion is lost: who waits for the chunk must recompute in the end, not wait for ever.

    Asking again, in a lookup or with a store, does not start the deadline anew.
    """
    pool = Pool(2, policy, write_deadline_s=1.0)
    pool.offer(keys(1), pool.request())
    start = time.monotonic()
    while pool.manager.lookup(keys(1)[0]) is LATER:
        assert pool.offer(keys(1), pool.request()) == []
        assert time.monotonic() - start < 10, "the deadline has no effect"
        time.sleep(0.02)
    assert time.monotonic() - start >= 0.9
    assert pool.figure("overdue") >= 1
    assert pool.manager.lookup_run(keys(1)) == (0, False)


def test_C10_slot_of_an_overdue_write_is_given_to_nobody(stuck: tuple[Pool, object]) -> None:
    """The copy may still be running: its slot is not free, and its chunk not written twice."""
    pool, _ = stuck
    wait_for_miss(pool, keys(1)[0])
    other = pool.request()
    assert pool.offer(keys(1), other) == []
    assert pool.offer(keys(2, 3), other) is None
    with pytest.raises(KeyNotReadyError):
        pool.manager.prepare_load(keys(1), other)
    assert pool.offer(keys(2), other) == keys(2)
    slots = {slot for slot, _, _ in pool.state()["keys"].values()}
    assert len(slots) == 2


@pytest.mark.parametrize("success", [True, False])
def test_C10_overdue_write_that_ends_after_all_gives_its_slot_back(
    stuck: tuple[Pool, object], success: bool
) -> None:
    """The completion was only late."""
    pool, owner = stuck
    wait_for_miss(pool, keys(1)[0])
    pool.manager.complete_store(keys(1), owner, success)
    assert pool.answers(keys(1)) == [HIT if success else MISS]
    pool.assert_idle()


def test_C10_reset_reclaims_the_slot_of_an_overdue_write(stuck: tuple[Pool, object]) -> None:
    """A reset is the caller's word that the copies are over."""
    pool, _ = stuck
    pool.manager.reset()
    assert pool.offer(keys(1, 2), pool.request()) == keys(1, 2)


def test_C13_chunk_is_published_when_its_write_completes_not_before(policy: str) -> None:
    """A reader finds a chunk whose bytes are still on their way."""
    pool = Pool(2, policy, events=True)
    writer, reader = pool.request(), pool.request()
    pool.offer(keys(1), writer)
    assert pool.answers(keys(1)) == [LATER]
    assert pool.manager.take_events() == []
    with pytest.raises(KeyNotReadyError):
        pool.manager.prepare_load(keys(1), reader)
    pool.manager.complete_store(keys(1), writer)
    assert pool.manager.take_events() == [(keys(1), False)]
    pool.manager.prepare_load(keys(1), reader)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("num_slots", {"num_slots": 0}),
        ("num_slots", {"num_slots": 1 << 40}),
        ("policy", {"num_slots": 4, "policy": "mru"}),
        ("write_deadline_s", {"num_slots": 4, "write_deadline_s": -1.0}),
        ("write_deadline_s", {"num_slots": 4, "write_deadline_s": float("nan")}),
        ("max_tracker_size", {"num_slots": 4, "store_threshold": 2, "max_tracker_size": 0}),
    ],
)
def test_top13_settings_that_cannot_work_are_named(field: str, arguments: dict) -> None:
    """A pool without slots, an unknown policy, a deadline in the past."""
    with pytest.raises(ConfigError) as caught:
        Manager(**arguments)
    assert caught.value.field == field
    assert str(caught.value)
