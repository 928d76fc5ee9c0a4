"""Section E for our connector: ranks that differ, lag, fail or repeat themselves."""

from __future__ import annotations

import itertools
import pickle

import pytest
from connector_kit import BLOCK, Connector, Worker, numbers, order
from kvoffload_rs.errors import InvalidJobError
from kvoffload_rs.vllm.connector.messages import Reports, StepOrders
from worker_kit import Device


def test_E1_slot_that_a_worker_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler gives out more slots than this rank has: an error, and no byte outside."""
    with Device(num_slots=4) as device:
        before = device.content(1)
        with pytest.raises(InvalidJobError) as refused:
            device.load(1, [4], [1])
        assert device.content(1) == before
    worker = Worker(monkeypatch)
    worker.copies.refuses = refused.value
    ((_, job, why),) = worker.step(StepOrders(loads=[order(7, [1], [4])]))
    assert (job, why is not None) == (7, True)
    assert worker.side.take_bad_blocks() == {1}


@pytest.mark.parametrize("last", range(4))
def test_E2_chunk_is_there_when_the_last_rank_has_written_it(last: int) -> None:
    """Four ranks report in any order, some of them twice."""
    c = Connector(num_ranks=4)
    (store,) = c.run("a", "p", 16, [1])
    for rank in range(4):
        if rank != last:
            c.report(store, ranks=[rank, rank])
    assert c.why("a") == (None, "writing")
    assert c.core.num_jobs == 1
    c.report(store, ranks=[last])
    assert c.lookup("a") == 16
    assert c.figure("stray_reports") == 3
    c.finish("a", 16)
    c.assert_idle()


@pytest.mark.parametrize("order_", list(itertools.permutations(range(3))))
def test_E2_rank_that_failed_fails_the_job(order_: tuple[int, ...]) -> None:
    """Whoever is last: one failure is enough, and it is told which rank it was."""
    c = Connector(num_ranks=3)
    (store,) = c.run("a", "p", 16, [1])
    ended = []
    for rank in order_:
        ended += c.report(store, "a fault" if rank == 1 else None, ranks=[rank])
    ((_, _, _, _, failures, _),) = ended
    assert failures == [(1, "a fault")]
    assert c.lookup("a") == 0
    c.finish("a", 16)
    c.assert_idle()


def test_E2_reports_of_ranks_that_do_not_exist_count_for_nothing() -> None:
    """A rank beyond the engine's, and a job that never was."""
    c = Connector(num_ranks=2)
    (store,) = c.run("a", "p", 16, [1])
    assert c.core.report([(2, store.job, None), (0, 99, None), (1, store.job, None)]) == []
    assert c.lookup("a") is None
    c.report(store)
    c.finish("a", 16)
    c.assert_idle()


def test_E3_every_rank_is_told_the_same_and_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank is slow and one has failed: their next calls are the same all the same."""
    workers = [Worker(monkeypatch) for _ in range(2)]
    wire = pickle.dumps(StepOrders(loads=[order(0, [1], [1])], stores=[order(1, [2], [2])]))
    for worker in workers:
        worker.step(pickle.loads(wire))
    workers[0].copies.end(0, store=False)
    for worker in workers:
        worker.step(StepOrders(flush=[1]))
    assert workers[0].copies.calls == workers[1].copies.calls


def test_E2_reports_are_joined_over_ranks_and_steps() -> None:
    """vLLM joins what ranks report into one message."""
    first, second = Reports([(0, 5, None)]), Reports([(1, 5, "a fault")])
    assert first.aggregate(second).ends == [(0, 5, None), (1, 5, "a fault")]


def test_E5_chunk_that_one_rank_lacks_is_absent_for_all() -> None:
    """One rank could not load it: nobody is offered it again."""
    c = Connector(num_ranks=2)
    (store,) = c.run("a", "p", 32, [1, 2])
    c.report(store, ranks=[0, 1])
    c.finish("a", 32)
    c.add("b", "p", 32)
    assert c.lookup("b") == 32
    c.allocated("b", [3, 4], 32)
    (load,) = c.step().loads
    c.report(load, ranks=[0])
    c.report(load, "bad bytes", ranks=[1])
    assert c.lookup("b") == 0
    c.finish("b", 0)
    c.assert_idle()


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_E7_blocks_hold_the_tokens_of_all_context_parallel_ranks(
    parallel: int, blocks_per_chunk: int
) -> None:
    """One figure for the tokens of a block: keys, blocks and loads agree for every length."""
    size = BLOCK * parallel
    for tokens in range(1, 8 * size, 7):
        c = Connector(
            64,
            groups=((0, size, "full", 0, False),),
            blocks_per_chunk=blocks_per_chunk,
            tokens_per_hash=size,
        )
        blocks = list(range(1, 2 + tokens // size))
        stores = c.run("a", "p", tokens, blocks)
        whole = tokens // (size * blocks_per_chunk)
        assert sum(len(numbers(one.slots)) for one in stores) == whole
        assert sum(len(numbers(one.blocks)) for one in stores) == whole * blocks_per_chunk
        for one in stores:
            c.report(one)
        c.finish("a", tokens)
        assert c.found("p", tokens) == whole * size * blocks_per_chunk
        c.assert_idle()
