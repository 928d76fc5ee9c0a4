"""Section A for our connector: requests that come back, end or die while their jobs live."""

from __future__ import annotations

import pytest
from connector_kit import BLOCK, FULL, Connector, Worker, chain, numbers, order
from kvoffload_rs.errors import RequestError
from kvoffload_rs.vllm.connector.messages import StepOrders


def test_A1_preempted_request_waits_for_its_own_store() -> None:
    """A request is preempted with its store in flight, and is looked up again before it ends."""
    c = Connector()
    (store,) = c.run("a", "p", 48, [1, 2, 3])
    assert c.step(preempted=["a"]) == ([], [], [], [])
    assert c.why("a") == (None, "writing")
    assert c.step().loads == []
    c.report(store)
    assert c.lookup("a") == 48
    c.allocated("a", [4, 5, 6], 48)
    (load,) = c.step().loads
    assert numbers(load.blocks) == [4, 5, 6]
    c.report(load)
    assert c.step(more={"a": ([4, 5, 6], 47, 1)}, resumed=["a"]).stores == []
    c.finish("a", 48)
    c.assert_idle()


@pytest.mark.parametrize("preempted", [False, True])
def test_A2_request_without_blocks_stores_nothing(preempted: bool) -> None:
    """Aborted while it waits: its keys are known and its tokens counted, but it has no blocks."""
    c = Connector()
    if preempted:
        c.add("a", "p", 48)
        c.lookup("a")
        c.allocated("a", [1, 2, 3])
        c.step({"a": ([1, 2, 3], 0, 8)})
        c.step(preempted=["a"])
    else:
        c.add("a", "p", 48)
        c.lookup("a")
    c.finish("a", 48)
    assert c.step() == ([], [], [], [])
    assert c.found("p", 48) == 0
    c.assert_idle()


def test_A2_no_more_is_stored_than_was_computed() -> None:
    """Aborted in the middle of its prompt: it has blocks and keys for all of it."""
    c = Connector()
    c.add("a", "p", 64)
    c.lookup("a")
    c.allocated("a", [1, 2, 3, 4])
    (store,) = c.step({"a": ([1, 2, 3, 4], 0, 40)}).stores
    assert numbers(store.blocks) == [1, 2]
    c.finish("a", 40)
    assert c.step().stores == []
    c.report(store)
    assert c.found("p", 64) == 32
    c.assert_idle()


def test_A3_chunk_whose_key_comes_later_is_not_passed_over() -> None:
    """Blocks are there before the hash of the newest one is known."""
    c = Connector()
    c.add("a", "p", 48)
    hashes = c.requests["a"].block_hashes
    c.requests["a"].block_hashes = hashes[:2]
    c.lookup("a")
    c.allocated("a", [1, 2, 3])
    (first,) = c.step({"a": ([1, 2, 3], 0, 48)}).stores
    assert numbers(first.blocks) == [1, 2]
    c.requests["a"].block_hashes = hashes
    (second,) = c.step(more={"a": ([4], 48, 1)}).stores
    assert numbers(second.blocks) == [3]
    for store in (first, second):
        c.report(store)
    c.finish("a", 49)
    assert c.found("p", 48) == 48
    c.assert_idle()


def test_A5_last_store_is_ordered_with_the_end_of_the_request() -> None:
    """What its last step completed is stored although it is over; then its name is free."""
    c = Connector(prompt_only=False)
    c.add("a", "p", 40)
    c.lookup("a")
    c.allocated("a", [1, 2, 3])
    (first,) = c.step({"a": ([1, 2, 3], 0, 40)}).stores
    c.requests["a"].block_hashes = chain("p", 3)
    c.finish("a", 48)
    c.add("a", "another", 16)
    c.finish("a", 0)
    (last,) = c.step().stores
    assert (numbers(last.blocks), last.request) == ([3], "a")
    assert c.core.num_requests == 1
    c.report(last)
    c.report(first)
    assert c.found("p", 48) == 48
    c.assert_idle()


@pytest.mark.parametrize("reset", [False, True])
def test_A6_nothing_is_ordered_after_the_end(reset: bool) -> None:
    """A request ends, then its two stores complete, with or without a reset in between."""
    c = Connector()
    c.add("a", "p", 48)
    c.lookup("a")
    c.allocated("a", [1, 2, 3])
    (first,) = c.step({"a": ([1, 2, 3], 0, 32)}).stores
    (second,) = c.step(more={"a": (None, 32, 16)}).stores
    c.finish("a", 48)
    with pytest.raises(RequestError):
        c.finish("a", 48)
    if reset:
        c.core.reset(True)
    for store in (second, first):
        c.report(store)
    # Somebody's late word about it is none of ours.
    assert c.step(more={"a": (None, 48, 1)}, preempted=["a"]) == ([], [], [], [])
    assert c.found("p", 48) == (0 if reset else 48)
    c.assert_idle()


def test_A7_chunks_are_found_while_their_request_still_runs() -> None:
    """A long request decodes on; another one has the same prefix."""
    c = Connector()
    (store,) = c.run("a", "p", 48, [1, 2, 3])
    c.report(store)
    assert c.found("p", 48) == 48
    c.finish("a", 50)
    c.assert_idle()


def test_A9_job_carries_its_keys() -> None:
    """The source block goes to another request, and gets another hash, while it is being stored."""
    c = Connector()
    (store,) = c.run("a", "p", 16, [1])
    c.finish("a", 16)
    c.add("b", "q", 16)
    c.lookup("b")
    c.allocated("b", [1])
    step = c.step({"b": ([1], 0, 16)})
    assert step.flush == [store.job]
    c.report(step.stores[0], "its source moved")
    c.report(store)
    c.finish("b", 16)
    assert (c.found("p", 16), c.found("q", 16)) == (16, 0)
    c.assert_idle()


def test_A9_block_that_went_to_another_request_is_not_stored_for_its_old_one() -> None:
    """Its store was put off; by the time there is room, the block is somebody else's."""
    c = Connector(1)
    (other,) = c.run("other", "o", 16, [9])  # its store holds the only slot
    c.add("a", "p", 16)
    c.lookup("a")
    c.allocated("a", [1])
    assert c.step({"a": ([1], 0, 16)}).stores == []
    c.add("b", "q", 8)
    c.lookup("b")
    c.allocated("b", [1])
    c.step({"b": ([1], 0, 8)})
    c.report(other)
    assert c.step(more={"a": (None, 16, 1)}).stores == []
    for name in ("a", "b", "other"):
        c.finish(name, 16)
    assert c.step().stores == []
    assert c.found("p", 16) == 0
    c.assert_idle()


@pytest.mark.parametrize("first", ["store", "reader"])
def test_A10_slots_come_back_in_every_order(first: str) -> None:
    """A chunk is read by two requests, one of which ends before its load and one after."""
    c = Connector(2, share_loads=False)
    c.store("p", 32)
    loads = []
    for name, blocks in (("a", [1, 2]), ("b", [3, 4])):
        c.add(name, "p", 32)
        assert c.lookup(name) == 32
        c.allocated(name, blocks, 32)
        loads += c.step().loads
    if first == "reader":
        c.finish("a", 0)
        c.report(loads[0])
    else:
        c.report(loads[0])
        c.finish("a", 32)
    # The other one still reads: there is no room, and nothing of it is taken.
    stores = c.run("c", "q", 32, [5, 6])
    assert stores == []
    c.report(loads[1])
    c.finish("b", 32)
    (store,) = c.step(more={"c": (None, 32, 1)}).stores
    c.report(store)
    c.finish("c", 33)
    c.assert_idle()


def test_A11_report_that_comes_twice_takes_nobody_elses_pin() -> None:
    """Two requests load one chunk, and one load is reported twice."""
    c = Connector(1, share_loads=False)
    c.store("p", 16)
    loads = []
    for name, block in (("a", 1), ("b", 2)):
        c.add(name, "p", 16)
        assert c.lookup(name) == 16
        c.allocated(name, [block], 16)
        loads += c.step().loads
    c.report(loads[0])
    assert c.report(loads[0]) == []
    assert c.report(loads[0], "once more") == []
    assert c.figure("stray_reports") == 2
    assert c.figure("pinned") == 1
    assert c.run("c", "q", 16, [3]) == []  # "b" still reads the only slot
    c.report(loads[1])
    for name in "abc":
        c.finish(name, 0)
    c.assert_idle()


def test_A13_nothing_is_loaded_when_another_connector_won() -> None:
    """We had a hit, but are told to load nothing, with blocks that another one fills."""
    c = Connector()
    c.store("p", 48)
    c.add("a", "p", 48)
    assert c.lookup("a") == 48
    c.allocated("a", [1, 2, 3], 0)
    assert c.step() == ([], [], [], [])
    assert c.figure("pinned") == 0
    c.finish("a", 0)
    c.assert_idle()


def test_A14_load_is_what_the_blocks_are_for() -> None:
    """Fewer tokens than were promised are loaded, or more blocks hold KV than were counted."""
    c = Connector()
    c.store("p", 64)
    c.add("a", "p", 64)
    assert c.lookup("a", BLOCK) == 48
    c.allocated("a", [1, 2, 3], 32, hashed=1)
    (load,) = c.step().loads
    assert (numbers(load.blocks), load.first_blocks) == ([2, 3], [1])
    c.report(load)
    c.finish("a", 48)
    c.add("b", "p", 64)
    assert c.lookup("b", BLOCK) == 48
    c.allocated("b", [1, 2, 3], 32, hashed=3)
    # Nothing is left to load; the engine waits to hear so all the same, and it is no failure.
    (load,) = c.step().loads
    assert (load.blocks, load.slots, c.figure("pinned")) == (b"", b"", 0)
    c.report(load)
    c.finish("b", 48)
    assert c.figure("loads_failed") == 0
    c.assert_idle()


def test_A14_load_of_nothing_is_reported_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has nothing to copy for a request that waits: the request goes on."""
    worker = Worker(monkeypatch, groups=2)
    assert worker.step(StepOrders(loads=[order(1, [], [])])) == [(0, 1, None)]
    assert worker.side.take_loaded() == ({"r"}, set())
    assert worker.copies.calls == []


def test_A15_one_block_in_two_groups_is_one_reader_for_each() -> None:
    """Both groups name the same physical block, so one store reads it twice."""
    c = Connector(groups=(FULL, (1, BLOCK, "full", 0, False)))
    (store,) = c.run("a", "p", 16, [[7], [7]])
    assert numbers(store.blocks) == [7, 7]
    c.finish("a", 16)
    c.report(store)
    c.add("b", "q", 16)
    c.lookup("b")
    c.allocated("b", [[7], [8]])
    assert c.step().flush == []  # nobody reads it any more
    c.finish("b", 0)
    c.assert_idle()


@pytest.mark.parametrize("reported", ["before", "after", "never well"])
@pytest.mark.parametrize("end", ["preempt", "abort", "finish", "reset"])
def test_top5_request_ends_while_a_load_and_a_store_live(end: str, reported: str) -> None:
    """Every way to end, against every place of the reports."""
    c = Connector()
    c.store("p", 32)
    c.add("a", "p", 64)
    assert c.lookup("a") == 32
    c.allocated("a", [1, 2, 3, 4], 32)
    (load,) = c.step().loads
    (store,) = c.run("b", "q", 32, [5, 6])
    why = "a fault" if reported == "never well" else None
    if reported == "before":
        c.report(load)
        c.report(store)
    if end == "preempt":
        c.step(preempted=["b"])
        answer = c.lookup("b")
        # While it is being written: later, or not at all where waiting would take longer.
        assert answer == 32 if reported == "before" else answer in (None, 0)
    elif end == "reset":
        c.core.reset(True)
        assert c.step().void == ([] if reported == "before" else [load.job])
    else:
        for name in "ab":
            c.finish(name, 0 if end == "abort" else 32)
    if reported != "before":
        c.report(load, why)
        c.report(store, why)
    if end in ("preempt", "reset"):
        for name in "ab":
            c.finish(name, 0)
    assert c.found("q", 32) == (0 if end == "reset" or why else 32)
    c.assert_idle()
