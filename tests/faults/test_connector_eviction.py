"""Section B for our connector: what goes, what stays, and what there is no room for."""

from __future__ import annotations

import pytest
from connector_kit import BLOCK, FULL, Connector, Worker, chain, numbers, order
from kvoffload_rs.vllm.connector.messages import StepOrders


def test_B1_request_never_evicts_chunks_of_its_own_store() -> None:
    """The pool is full, and its oldest chunk is the head of the prompt that is being stored."""
    c = Connector(3)
    c.store("p", 16)
    c.store("q", 32)
    (store,) = c.run("a", "p", 48, [1, 2, 3])
    assert numbers(store.blocks) == [2, 3]
    c.report(store)
    c.finish("a", 48)
    assert (c.found("p", 48), c.found("q", 32)) == (48, 0)
    c.assert_idle()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_B3_end_of_a_prefix_goes_before_its_head(policy: str) -> None:
    """A prompt is stored in two steps, the second of which ends first; then room is needed."""
    c = Connector(4, policy=policy)
    c.add("a", "p", 64)
    c.lookup("a")
    c.allocated("a", [1, 2, 3, 4])
    (first,) = c.step({"a": ([1, 2, 3, 4], 0, 32)}).stores
    (second,) = c.step(more={"a": (None, 32, 32)}).stores
    c.report(second)
    c.report(first)
    c.finish("a", 64)
    for one in range(1, 4):
        c.store(f"other {one}", 16)
        assert c.found("p", 64) == 64 - 16 * one


def test_B3_request_counts_once_however_long_it_runs() -> None:
    """A prompt that one request computed and decoded on is no frequent one for ARC."""
    c = Connector(4, policy="arc")
    (store,) = c.run("a", "p", 32, [1, 2])
    c.report(store)
    for step in range(20):
        c.step(more={"a": (None, 32 + step, 1)})
    c.finish("a", 52)
    resident = c.core.debug_state()["resident"]
    assert (len(resident["t1"]), resident["t2"]) == (2, [])
    assert c.found("p", 32) == 32


def test_B6_hit_that_is_gone_before_its_load_fails_that_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lookup promised two chunks; before blocks were given, others took their slots."""
    c = Connector(2)
    c.store("p", 32)
    c.add("a", "p", 32)
    assert c.lookup("a") == 32
    c.store("q", 32)
    c.allocated("a", [1, 2], 32)
    (load,) = c.step().loads
    assert (numbers(load.blocks), load.slots) == ([1, 2], b"")
    worker = Worker(monkeypatch)
    ((rank, job, why),) = worker.step(StepOrders(loads=[load]))
    assert (rank, job) == (0, load.job)
    assert why is not None
    assert worker.copies.calls == []  # there is nothing to copy from
    assert worker.side.take_loaded() == ({"a"}, {"a"})
    assert worker.side.take_bad_blocks() == {1, 2}
    c.report(load, why)
    # The request computes, and is stored.
    (store,) = c.step(more={"a": ([1, 2], 0, 32)}, resumed=["a"]).stores
    c.report(store)
    c.finish("a", 32)
    assert c.found("p", 32) == 32
    c.assert_idle()


def test_B7_no_room_is_an_answer_that_is_counted_and_tried_again() -> None:
    """All slots are being read: nothing waits for one, and the next step asks again."""
    c = Connector(2)
    c.store("p", 32)
    c.add("a", "p", 32)
    assert c.lookup("a") == 32
    c.allocated("a", [1, 2], 32)
    (load,) = c.step().loads
    assert c.run("b", "q", 32, [3, 4]) == []
    assert c.figure("chunks_refused") == 2
    assert c.step(more={"b": (None, 32, 1)}).stores == []
    c.report(load)
    (store,) = c.step(more={"b": (None, 33, 1)}).stores
    assert numbers(store.blocks) == [3, 4]
    c.report(store)
    c.finish("a", 32)
    c.finish("b", 34)
    c.assert_idle()


def test_B7_half_of_what_is_needed_is_never_held_for_a_load() -> None:
    """One of two chunks is gone: the load holds nothing."""
    c = Connector(2)
    c.store("p", 32)
    c.add("a", "p", 32)
    assert c.lookup("a") == 32
    c.store("q", 16)  # takes the end of "p"
    c.allocated("a", [1, 2], 32)
    (load,) = c.step().loads
    assert load.slots == b""
    assert c.figure("pinned") == 0
    c.report(load, "gone")
    c.finish("a", 0)
    c.assert_idle()


def test_B9_store_that_failed_is_not_there() -> None:
    """Its request goes on, and whoever asks computes."""
    c = Connector()
    (store,) = c.run("a", "p", 32, [1, 2])
    c.report(store, "a fault")
    c.add("b", "p", 32)
    assert c.why("b") == (0, "failed")
    assert c.figure("stores_failed") == 1
    c.finish("a", 32)
    c.finish("b", 0)
    c.assert_idle()


def test_B10_load_releases_what_it_holds_and_nothing_else() -> None:
    """One request reads all of a prompt, another one its head; the first one ends."""
    c = Connector(3, share_loads=False)
    c.store("p", 48)
    loads = []
    for name, tokens in (("a", 48), ("b", 16)):
        c.add(name, "p", tokens)
        assert c.lookup(name) == tokens
        c.allocated(name, [1, 2, 3][: tokens // BLOCK], tokens)
        loads += c.step().loads
    c.report(loads[0])
    c.finish("a", 48)
    pins = {key[:-4]: pins for key, (_, _, pins) in c.core.debug_state()["keys"].items()}
    assert [pins[one] for one in chain("p", 3)] == [1, 0, 0]
    c.report(loads[1])
    c.finish("b", 16)
    c.assert_idle()


def test_B11_new_chunk_is_not_the_first_to_go() -> None:
    """One chunk was loaded long ago, another one has just been stored and never read."""
    c = Connector(2)
    c.store("x", 16)
    c.add("a", "x", 16)
    assert c.lookup("a") == 16
    c.allocated("a", [1], 16)
    c.report(c.step().loads[0])
    c.finish("a", 16)
    c.store("y", 16)
    c.store("z", 16)
    assert (c.found("x", 16), c.found("y", 16), c.found("z", 16)) == (0, 16, 16)


def test_B13_chunk_that_is_being_written_is_waited_for_and_not_written_twice() -> None:
    """A second request has the same prompt as one whose store is in flight."""
    c = Connector()
    (store,) = c.run("a", "p", 32, [1, 2])
    c.add("b", "p", 32)
    assert c.why("b") == (None, "writing")
    c.add("c", "p", 32)  # it was admitted all the same
    c.allocated("c", [3, 4])
    assert c.step({"c": ([3, 4], 0, 32)}).stores == []
    c.report(store)
    assert c.lookup("b") == 32
    for name in "abc":
        c.finish(name, 0)
    c.assert_idle()


def test_B14_chunk_is_stored_by_the_next_one_if_its_store_failed() -> None:
    """Somebody left it out because it was being written, and that store failed."""
    c = Connector()
    (store,) = c.run("a", "p", 16, [1])
    c.add("b", "p", 16)  # was admitted without a lookup, as when the deadline has passed
    assert c.step({"b": ([2], 0, 16)}).stores == []
    c.report(store, "a fault")
    (again,) = c.run("d", "p", 16, [3])
    c.report(again)
    assert c.found("p", 16) == 16
    for name in "abd":
        c.finish(name, 16)
    c.assert_idle()


def test_B6_failed_load_is_not_tried_for_ever() -> None:
    """The bytes of a chunk cannot be read: it goes, and the request computes."""
    c = Connector()
    c.store("p", 32)
    c.add("a", "p", 32)
    assert c.lookup("a") == 32
    c.allocated("a", [1, 2], 32)
    (load,) = c.step().loads
    c.report(load, "bad bytes")
    assert c.why("a") == (0, "failed")
    c.finish("a", 0)
    c.assert_idle()


def test_B9_store_that_was_refused_by_the_worker_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that cannot begin a store says so, once."""
    from kvoffload_rs.errors import InvalidJobError

    worker = Worker(monkeypatch)
    worker.copies.refuses = InvalidJobError("slot 99 does not exist")
    assert worker.step(StepOrders(stores=[order(3, [1], [99])])) == []
    ((rank, job, why),) = worker.step()
    assert (rank, job, why is not None) == (0, 3, True)
    assert worker.step() == []


def test_B10_groups_are_released_each_for_itself() -> None:
    """A window group's load needs the last chunks only, the full group's all of them."""
    window = (1, BLOCK, "window", 2 * BLOCK, False)
    c = Connector(16, groups=(FULL, window))
    c.store("p", 80)
    c.add("a", "p", 80)
    assert c.lookup("a") == 79
    c.allocated("a", [[1, 2, 3, 4, 5], [0, 0, 0, 6, 7]], 79)
    (load,) = c.step().loads
    assert load.group_sizes == [5, 2]
    assert c.figure("pinned") == 7
    c.report(load)
    c.finish("a", 79)
    c.assert_idle()
