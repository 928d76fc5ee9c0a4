"""Section C for our connector: what happens in which order, and what never waits for ever."""

from __future__ import annotations

import time

import pytest
from connector_kit import Connector, Worker, numbers, order
from kvoffload_rs.errors import InvalidJobError, TransferError, TransferTimeoutError
from kvoffload_rs.vllm.connector.messages import StepOrders


def test_C1_store_begins_with_the_step_after_the_one_that_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load begins with its own step. On a device an event does the rest: GPU tests."""
    worker = Worker(monkeypatch)
    worker.step(StepOrders(loads=[order(0, [1], [1])], stores=[order(1, [2], [2])]))
    assert worker.copies.calls == [("load", 0)]
    worker.step()
    assert worker.copies.calls == [("load", 0), ("store", 1)]


def test_C3_load_into_a_block_that_a_store_reads_waits_for_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block's owner has ended; the block is given to a request that loads into it."""
    c = Connector()
    c.store("q", 16)
    (store,) = c.run("a", "p", 16, [1])
    c.finish("a", 16)
    worker = Worker(monkeypatch)
    worker.step(StepOrders(stores=[store]))
    c.add("b", "q", 16)
    assert c.lookup("b") == 16
    c.allocated("b", [1], 16)
    step = c.step()
    assert step.flush == [store.job]
    worker.step(StepOrders(*step))
    load = step.loads[0].job
    assert worker.copies.calls == [("store", store.job), ("wait", [store.job]), ("load", load)]


def test_C3_store_of_this_very_step_is_made_before_its_block_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request has ended; its block is written with the step that orders its store."""
    worker = Worker(monkeypatch)
    worker.step(StepOrders(stores=[order(4, [1], [1])], flush=[4]))
    assert worker.copies.calls == [("store", 4), ("wait", [4])]
    worker.step()
    assert worker.copies.calls == [("store", 4), ("wait", [4])]


@pytest.mark.parametrize("how", ["allocated", "announced", "further", "resumed"])
def test_C5_every_block_that_is_given_out_is_fenced(how: str) -> None:
    """Blocks are given with nothing to load, by whichever call says so first."""
    c = Connector()
    (store,) = c.run("a", "p", 32, [1, 2])
    c.finish("a", 32)
    c.add("b", "q", 48)
    c.lookup("b")
    if how == "allocated":
        c.allocated("b", [2, 3], 0)
        step = c.step()
    elif how == "announced":
        step = c.step({"b": ([2, 3], 0, 8)})
    elif how == "further":
        assert c.step({"b": ([3], 0, 8)}).flush == []
        step = c.step(more={"b": ([2], 8, 16)})
    else:
        step = c.step(more={"b": ([3, 2], 0, 24)}, resumed=["b"])
    assert step.flush == [store.job]
    c.report(store)
    c.finish("b", 8)


def test_C5_block_of_any_group_is_fenced() -> None:
    """The second group gets a block that a store of the first one still reads."""
    c = Connector(groups=((0, 16, "full", 0, False), (1, 16, "window", 32, False)))
    (store,) = c.run("a", "p", 16, [[1], [2]])
    c.finish("a", 16)
    c.add("b", "q", 16)
    c.lookup("b")
    c.allocated("b", [[5], [1]], 0)
    assert c.step({"b": ([[5], [1]], 0, 8)}).flush == [store.job]


def test_C6_store_is_made_although_nothing_runs_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last request ends: the steps that follow compute nothing, and submit all the same."""
    c = Connector()
    c.add("a", "p", 16)
    c.lookup("a")
    c.allocated("a", [1])
    c.step({"a": ([1], 0, 8)})
    c.finish("a", 16)
    assert c.core.has_work()
    worker = Worker(monkeypatch)
    (store,) = (step := c.step()).stores
    worker.step(StepOrders(*step))
    assert c.core.has_work()
    worker.step(StepOrders(*c.step()))
    assert worker.copies.calls == [("store", store.job)]
    worker.copies.end(store.job, store=True)
    assert worker.step(StepOrders(*c.step())) == [(0, store.job, None)]
    c.report(store)
    c.assert_idle()


def test_C6_metadata_that_is_bound_twice_is_obeyed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some runners bind one step's metadata again."""
    worker = Worker(monkeypatch)
    orders = StepOrders(loads=[order(0, [1], [1])], stores=[order(1, [2], [2])])
    for _ in range(3):
        worker.side.begin(orders)
    assert worker.copies.calls == [("load", 0)]


def test_C6_only_what_a_worker_did_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later store ends before an earlier one: nothing is said of the earlier one."""
    worker = Worker(monkeypatch)
    worker.step(StepOrders(stores=[order(1, [1], [1]), order(2, [2], [2])]))
    worker.step()
    worker.copies.end(2, store=True)
    assert worker.step() == [(0, 2, None)]
    worker.copies.end(1, store=True, error=TransferError("a fault", job=1))
    ((_, job, why),) = worker.step()
    assert (job, why is not None) == (1, True)


@pytest.mark.parametrize(("prompt", "ended", "stored"), [(32, 48, 2), (32, 49, 3), (48, 49, 3)])
def test_C7_last_sampled_token_is_not_stored(prompt: int, ended: int, stored: int) -> None:
    """A request ends with `ended` tokens, of which all but the last were computed."""
    c = Connector(prompt_only=False)
    c.add("a", "p", 48)
    c.requests["a"].tokens = prompt
    c.lookup("a")
    c.allocated("a", [1, 2, 3])
    orders = c.step({"a": ([1, 2, 3], 0, prompt)}).stores
    c.finish("a", ended - 1)
    orders += c.step().stores
    assert sum(len(numbers(one.blocks)) for one in orders) == stored


def test_C9_head_of_the_queue_is_put_off_for_a_while_only() -> None:
    """The first in the queue waits for a chunk that never comes, others hold what it needs."""
    c = Connector(defer_deadline_s=0.05)
    c.run("a", "p", 32, [1, 2])  # its store is never reported
    c.add("b", "p", 32)
    start = time.monotonic()
    while c.lookup("b") is None:
        assert time.monotonic() - start < 5
        c.step()
    assert c.why("b")[0] == 0
    assert time.monotonic() - start >= 0.05
    assert c.step().loads == []


def test_C10_failed_rounds_do_not_set_the_deadline_back() -> None:
    """A store that others wait for fails, and is tried again by somebody else, over and over."""
    c = Connector(defer_deadline_s=0.15)
    c.add("waits", "p", 16)
    start = time.monotonic()
    for turn in range(1000):
        name = f"stores {turn}"
        c.add(name, "p", 16)
        c.allocated(name, [turn + 1])
        (store,) = c.step({name: ([turn + 1], 0, 16)}).stores
        answer = c.why("waits")
        if answer[0] is not None:
            break
        assert answer[1] == "writing"
        time.sleep(0.02)
        c.report(store, "a fault")
        c.finish(name, 16)
        assert time.monotonic() - start < 5
    assert answer[0] == 0
    assert turn > 2


def test_C10_slot_of_a_lost_store_is_given_to_nobody() -> None:
    """A completion never comes. Its chunk is a miss in the end, and its slot nobody else's."""
    c = Connector(1, write_deadline_s=0.1)  # it is counted in tenths
    (lost,) = c.run("a", "p", 16, [1])
    c.finish("a", 16)
    time.sleep(0.35)
    assert c.found("p", 16) == 0
    assert c.run("b", "q", 16, [2]) == []
    c.report(lost)
    c.finish("b", 16)
    (store,) = c.step().stores
    c.report(store)
    c.assert_idle()


def test_C11_overdue_load_keeps_its_blocks_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is given up at its deadline, but may write until it says that it does not."""
    worker = Worker(monkeypatch, deadline_s=0.01)
    worker.step(StepOrders(loads=[order(1, [5, 6], [1, 2])]))
    time.sleep(0.02)
    for _ in range(3):
        assert worker.step() == []
        assert worker.side.take_loaded() == (set(), set())
        assert worker.side.take_bad_blocks() == set()
    assert worker.copies.calls == [("load", 1), ("cancel", [1])]
    # That it had been copied after all does not make it good: it was called off.
    worker.copies.end(1, store=False)
    ((_, job, why),) = worker.step()
    assert (job, why is not None) == (1, True)
    assert worker.side.take_loaded() == ({"r"}, {"r"})
    assert worker.side.take_bad_blocks() == {5, 6}


def test_C11_store_that_was_not_in_time_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block must be written, and the wait for it ended with its deadline: what it reads from
    then on is something else."""
    worker = Worker(monkeypatch)
    worker.step(StepOrders(stores=[order(1, [5], [1])]))
    worker.copies.wait_fails = TransferTimeoutError("60 s are over", job=1)
    assert worker.step(StepOrders(flush=[1])) == []
    assert worker.copies.calls[-1] == ("cancel", [1])
    worker.copies.wait_fails = None
    worker.copies.end(1, store=True)
    ((_, job, why),) = worker.step()
    assert (job, why is not None) == (1, True)


def test_C11_store_that_is_refused_under_a_flush_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never began, so there is nothing to wait for and nothing more to say."""
    worker = Worker(monkeypatch)
    worker.step(StepOrders(stores=[order(1, [5], [1])]))
    worker.copies.refuses = InvalidJobError("no such slot")
    assert [job for _, job, _ in worker.step(StepOrders(flush=[1]))] == [1]
    assert worker.step() == []


def test_C13_chunk_is_loaded_only_once_it_is_written() -> None:
    """A request that does not wait any longer computes: it never reads half a chunk."""
    c = Connector(defer_deadline_s=0.01)
    (store,) = c.run("a", "p", 48, [1, 2, 3])
    c.add("b", "p", 48)
    assert c.lookup("b") is None
    time.sleep(0.02)
    assert c.lookup("b") == 0
    c.report(store)
    assert c.found("p", 48) == 48
    for name in "ab":
        c.finish(name, 0)
    c.assert_idle()


def test_top14_reset_voids_loads_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load reads after a reset is of the old weights: it fails, however well it ends."""
    c = Connector()
    c.store("p", 16)
    c.add("a", "p", 16)
    assert c.lookup("a") == 16
    c.allocated("a", [1], 16)
    worker = Worker(monkeypatch)
    (load,) = (step := c.step()).loads
    worker.step(StepOrders(*step))
    c.core.reset(True)
    worker.copies.end(load.job, store=False)
    ((_, job, why),) = worker.step(StepOrders(*c.step()))
    assert (job, why is not None) == (load.job, True)
    assert worker.side.take_bad_blocks() == {1}
    c.report(load, why)
    c.finish("a", 0)
    assert c.figure("loads_voided") == 1
    c.assert_idle()
