"""Section B: what is evicted, what is refused, and what a refusal may change (nothing)."""

from __future__ import annotations

import time

import pytest
from kvoffload_rs.errors import KeyNotReadyError, StaleHandleError
from pool_kit import HIT, LATER, MISS, Pool, key, keys


def test_B1_prepare_store_never_evicts_its_own_input(policy: str) -> None:
    """The pool is full, and the oldest chunk is one of those that the call names."""
    pool = Pool(4, policy)
    for name in (2, 6, 7, 8):
        pool.store_and_finish(keys(name))
    request = pool.request()
    answer = pool.manager.prepare_store(keys(2, 3, 4, 5), request)
    assert answer is not None
    assert answer[0] == keys(3, 4, 5)
    assert answer[2] == keys(6, 7, 8)
    assert pool.answers(keys(2, 6, 7, 8)) == [HIT, MISS, MISS, MISS]
    pool.manager.complete_store(keys(3, 4, 5), request)
    pool.assert_idle()


def test_B1_too_little_besides_the_input_is_a_refusal_without_change(policy: str) -> None:
    """Only chunks that the call itself names could go."""
    pool = Pool(3, policy, events=True)
    for name in (1, 2, 3):
        pool.store_and_finish(keys(name))
    pool.manager.take_events()
    before = pool.state()
    assert pool.offer(keys(1, 2, 3, 4), pool.request()) is None
    assert pool.offer(keys(1, 2, 4, 5), pool.request()) is None
    assert pool.state() == before
    assert pool.manager.take_events() == []
    pool.assert_idle()


def test_B1_more_than_the_pool_is_a_refusal_without_change(policy: str) -> None:
    """One call wants more slots than there are."""
    pool = Pool(3, policy)
    pool.store_and_finish(keys(1, 2))
    before = pool.state()
    assert pool.offer(keys(3, 4, 5, 6), pool.request()) is None
    assert pool.state() == before


def test_B2_arc_evicts_from_the_other_list_when_the_preferred_one_is_pinned() -> None:
    """ARC prefers its frequent list, whose chunks are all being read: the recent one must give."""
    pool = Pool(4, "arc")
    pool.store_and_finish(keys(1, 2, 3, 4))
    pool.store_and_finish(keys(5))
    while (state := pool.state())["target"] < 3:  # each ghost that returns raises the target
        pool.store_and_finish(state["ghosts"]["b1"][-1:])
    while len((lists := pool.state()["resident"])["t1"]) >= 3:
        pool.read_and_finish(lists["t1"][:1])
    recent, frequent = lists["t1"], lists["t2"]
    assert recent
    assert frequent

    pool.manager.prepare_load(frequent, pool.request())
    new = keys(*(f"new-{n}" for n, _ in enumerate(recent)))
    assert pool.offer([*new, *keys("one more")], pool.request()) is None
    answer = pool.manager.prepare_store(new, pool.request())
    assert answer is not None
    assert answer[2] == recent


def test_B3_tail_goes_first_whatever_order_the_copies_end_in(policy: str) -> None:
    """The head of a prefix is worth more than its tail: without it the rest is of no use."""
    pool = Pool(3, policy)
    request = pool.request()
    pool.offer(keys("a", "b", "c"), request)
    for name in ("c", "a", "b"):
        pool.manager.complete_store(keys(name), request)
    pool.manager.finish_request(request)
    assert pool.victims(3) == keys("c", "b", "a")


def test_B3_tail_goes_first_after_chunked_prefill(policy: str) -> None:
    """The head was stored many steps before the tail."""
    pool = Pool(3, policy)
    request = pool.request()
    for name in ("a", "b", "c"):
        pool.store(keys(name), request)
    pool.manager.finish_request(request)
    assert pool.victims(3) == keys("c", "b", "a")


def test_B3_tail_goes_first_across_groups(policy: str) -> None:
    """Two KV groups, with the window group's chunks stored late: token positions decide."""
    pool = Pool(4, policy)
    request = pool.request()
    full = [key("a", 0), key("b", 0)]
    window = [key("b", 1), key("a", 1)]  # backfilled in the wrong order
    pool.store(full, request)
    pool.store(window, request)
    ends = {key(name, group): end for name, end in (("a", 16), ("b", 32)) for group in (0, 1)}
    pool.manager.finish_request(request, ends)
    assert pool.victims(4) == [key("b", 1), key("b", 0), key("a", 1), key("a", 0)]


def test_B3_one_request_is_one_access() -> None:
    """ARC: a request that stores a chunk and looks at it a hundred times has not used it twice."""
    pool = Pool(4, "arc")
    request = pool.request()
    pool.store(keys(1, 2), request)
    for _ in range(100):
        assert pool.answers(keys(1, 2)) == [HIT, HIT]
        assert pool.offer(keys(1, 2), request) == []
        pool.manager.prepare_load(keys(1), request)
        pool.manager.complete_load(keys(1), request)
    pool.manager.finish_request(request)
    assert pool.state()["resident"] == {"t1": keys(2, 1), "t2": []}
    pool.read_and_finish(keys(1))
    assert pool.state()["resident"] == {"t1": keys(2), "t2": keys(1)}


def test_B6_hit_that_was_evicted_before_the_load_is_a_typed_error(policy: str) -> None:
    """Lookup says hit; another request's store evicts one chunk; then the load comes."""
    pool = Pool(4, policy)
    pool.store_and_finish(keys(1, 2))
    assert pool.manager.lookup_run(keys(1, 2)) == (2, False)
    pool.store_and_finish(keys(3, 4, 5))
    assert MISS in pool.answers(keys(1, 2))
    reader = pool.request()
    with pytest.raises(KeyNotReadyError):
        pool.manager.prepare_load(keys(1, 2), reader)
    assert reader.pins == 0
    left = pool.manager.lookup_run(keys(1, 2))[0]
    pool.manager.prepare_load(keys(1, 2)[:left], reader)
    pool.manager.complete_load(keys(1, 2)[:left], reader)
    pool.assert_idle()


def test_B6_hit_that_is_pinned_survives(policy: str) -> None:
    """The same, but the load was prepared in the same step as its lookup."""
    pool = Pool(4, policy)
    pool.store_and_finish(keys(1, 2))
    reader = pool.request()
    pool.manager.prepare_load(keys(1, 2), reader)
    pool.store_and_finish(keys(3, 4))
    pool.store_and_finish(keys(5, 6))
    assert pool.offer(keys(7, 8, 9), pool.request()) is None
    assert pool.answers(keys(1, 2)) == [HIT, HIT]
    pool.manager.complete_load(keys(1, 2), reader)
    pool.assert_idle()


def test_B7_no_room_is_an_answer_not_a_wait(policy: str) -> None:
    """Every chunk is being read: the store is refused at once, and counted."""
    pool = Pool(64, policy)
    chunks = keys(*range(64))
    pool.store_and_finish(chunks)
    reader = pool.request()
    pool.manager.prepare_load(chunks, reader)
    writer = pool.request()
    start = time.monotonic()
    for n in range(1000):
        assert pool.offer(keys(f"new-{n}"), writer) is None
    assert time.monotonic() - start < 1
    assert pool.figure("refused") == 1000
    pool.manager.complete_load(chunks, reader)
    assert pool.offer(keys("new-0"), writer) == keys("new-0")


def test_B7_half_a_store_is_never_held(policy: str) -> None:
    """Two requests each need the whole pool: one has it, the other gets nothing until then."""
    pool = Pool(4, policy)
    first, second = pool.request(), pool.request()
    assert pool.offer(keys(1, 2, 3), first) == keys(1, 2, 3)
    assert pool.offer(keys(5, 6, 7), second) is None
    assert pool.figure("free") == 1
    assert second.pins == 0
    pool.manager.complete_store(keys(1, 2, 3), first)
    assert pool.offer(keys(5, 6, 7), second) == keys(5, 6, 7)


def test_B7_partial_admission_takes_the_first_chunks(policy: str) -> None:
    """An option: where not all fit, the head of the range is stored."""
    pool = Pool(3, policy, partial_admission=True)
    reader, writer = pool.request(), pool.request()
    pool.store(keys(1))
    pool.manager.prepare_load(keys(1), reader)
    assert pool.offer(keys("a", "b", "c", "d"), writer) == keys("a", "b")
    assert pool.figure("left_out") == 2
    assert pool.offer(keys("c"), writer) is None  # nothing at all can go now
    pool.manager.complete_store(keys("a", "b"), writer)
    pool.manager.complete_load(keys(1), reader)
    pool.assert_idle()


def test_B9_store_that_was_refused_or_failed_is_not_present(policy: str) -> None:
    """Whoever asks afterwards must not take the chunk for backed up."""
    pool = Pool(1, policy, events=True)
    reader, writer = pool.request(), pool.request()
    pool.store(keys(1))
    pool.manager.prepare_load(keys(1), reader)
    assert pool.offer(keys(2), writer) is None
    assert pool.answers(keys(2)) == [MISS]
    pool.manager.complete_load(keys(1), reader)
    assert pool.offer(keys(2), writer) == keys(2)
    pool.manager.complete_store(keys(2), writer, False)
    assert pool.answers(keys(2)) == [MISS]
    assert pool.figure("store_failures") == 1
    stored = [chunks for chunks, removed in pool.manager.take_events() if not removed]
    assert stored == [keys(1)]
    pool.assert_idle()


def test_B10_release_of_what_another_request_locked_is_refused(policy: str) -> None:
    """One request locked 1 and 3, another one locked 2; the first releases "1 to 3"."""
    pool = Pool(3, policy)
    pool.store(keys(1, 2, 3))
    first, second = pool.request(), pool.request()
    pool.manager.prepare_load(keys(1, 3), first)
    pool.manager.prepare_load(keys(2), second)
    with pytest.raises(StaleHandleError):
        pool.manager.complete_load(keys(1, 2, 3), first)
    assert [pool.pins(chunk) for chunk in keys(1, 2, 3)] == [1, 1, 1]
    pool.manager.complete_load(keys(1, 3), first)
    assert [pool.pins(chunk) for chunk in keys(1, 2, 3)] == [0, 1, 0]
    pool.manager.complete_load(keys(2), second)
    pool.assert_idle()


def test_B10_write_is_ended_by_its_owner_only(policy: str) -> None:
    """A request completes, well or badly, a store that another one is writing."""
    pool = Pool(1, policy)
    owner, other = pool.request(), pool.request()
    pool.offer(keys(1), owner)
    pool.manager.complete_store(keys(1), other, True)
    pool.manager.complete_store(keys(1), other, False)
    assert pool.answers(keys(1)) == [LATER]
    assert pool.figure("stale_completions") == 2
    pool.manager.complete_store(keys(1), owner)
    assert pool.answers(keys(1)) == [HIT]


def test_B11_storing_is_an_access(policy: str) -> None:
    """Chunk y was just stored and never read; x was read before: x is the older one."""
    pool = Pool(2, policy)
    pool.store_and_finish(keys("x"))
    if policy == "lru":
        pool.read_and_finish(keys("x"))
    pool.store_and_finish(keys("y"))
    assert pool.victims(1) == keys("x")
    assert pool.answers(keys("y")) == [HIT]


def test_B13_chunk_being_written_is_no_miss_and_is_not_written_twice(policy: str) -> None:
    """A second request with the same prompt comes while the first one's store is in flight."""
    pool = Pool(4, policy)
    first, second = pool.request(), pool.request()
    pool.offer(keys(1, 2), first)
    assert pool.answers(keys(1, 2)) == [LATER, LATER]
    assert pool.offer(keys(1, 2, 3), second) == keys(3)
    assert pool.figure("writing") == 3
    pool.manager.complete_store(keys(3), second)
    pool.manager.complete_store(keys(1, 2), second)  # not its own: no effect
    assert pool.answers(keys(1, 2, 3)) == [LATER, LATER, HIT]
    pool.manager.complete_store(keys(1, 2), first)
    pool.assert_idle()


def test_B14_chunk_that_was_pending_can_be_offered_again(policy: str) -> None:
    """The chunk was skipped because another request was writing it, and that write failed."""
    pool = Pool(2, policy)
    first, second = pool.request(), pool.request()
    pool.offer(keys(1), first)
    assert pool.offer(keys(1), second) == []
    pool.manager.complete_store(keys(1), first, False)
    assert pool.offer(keys(1), second) == keys(1)
    pool.manager.complete_store(keys(1), second)
    assert pool.answers(keys(1)) == [HIT]


def test_B15_eviction_cost_does_not_grow_with_pinned_chunks(policy: str) -> None:
    """A hundred thousand chunks are being read and one can go: finding it costs the same."""

    def cost_of_one_eviction(slots: int) -> float:
        pool = Pool(slots, policy)
        chunks = keys(*range(slots))
        pool.store_and_finish(chunks)
        pool.manager.prepare_load(chunks[1:], pool.request())
        best = 1.0
        for n in range(200):
            writer, new = pool.request(), keys(f"new-{n}")
            start = time.perf_counter()
            assert pool.manager.prepare_store(new, writer) is not None
            best = min(best, time.perf_counter() - start)
            pool.manager.complete_store(new, writer)
        return best

    few, many = cost_of_one_eviction(100), cost_of_one_eviction(100_000)
    assert many < 20 * few + 20e-6, f"{few * 1e6:.1f} us with 100 chunks, {many * 1e6:.1f} us"
