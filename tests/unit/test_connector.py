"""The connector's Python parts: what a request wishes, what the model has, what is told to whom."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvoffload_rs import _core
from kvoffload_rs.errors import CapacityError, ConfigError, RequestError
from kvoffload_rs.vllm import compat
from kvoffload_rs.vllm.connector.events import to_vllm
from kvoffload_rs.vllm.connector.facts import GroupFacts, check_states, group_facts
from kvoffload_rs.vllm.connector.messages import Moved, Order, RankFacts, Reports, StepOrders
from kvoffload_rs.vllm.connector.metrics import KvOffloadStats
from kvoffload_rs.vllm.connector.scheduler import SchedulerSide, request_limits
from vllm.v1 import kv_cache_interface as kv

HASH = 32


def spec(kind: Any, **more: Any) -> Any:
    return kind(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16, **more)


def config(*groups: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=one) for one in groups])


def table(**more: Any) -> Any:
    """A table for one full-attention group with blocks of 16 tokens."""
    settings = {"num_slots": 8, "blocks_per_chunk": 1, "tokens_per_hash": 16} | more
    return _core.Requests([(0, 16, "full", 0, False)], **settings)


def hashes(seed: int, count: int) -> list[bytes]:
    return [bytes([seed, i]) + bytes(HASH - 2) for i in range(count)]


def blocks(*ids: int) -> list[list[Any]]:
    return [[SimpleNamespace(block_id=one, block_hash=None) for one in ids]]


# --- what a request wishes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "limits"),
    [
        (None, {}),
        ({}, {}),
        (
            {"max_load_tokens": 5, "max_offload_tokens": 0},
            {"max_load_tokens": 5, "max_store_tokens": 0},
        ),
        ({"kvoffload_skip": "load"}, {"skip_load": True, "skip_store": False}),
        ({"kvoffload_skip": "store"}, {"skip_load": False, "skip_store": True}),
        ({"kvoffload_skip": True}, {"skip_load": True, "skip_store": True}),
        ({"kvoffload_skip": False, "kvoffload_priority": "normal"}, {}),
        ({"kvoffload_priority": "low"}, {"low_priority": True}),
        ({"somebody_elses": 1}, {}),
    ],
)
def test_wishes(params: Any, limits: dict[str, Any]) -> None:
    assert request_limits("r", params) == limits


@pytest.mark.parametrize(
    "params",
    [
        {"max_load_tokens": -1},
        {"max_load_tokens": True},
        {"max_offload_tokens": "5"},
        {"kvoffload_skip": "both"},
        {"kvoffload_priority": 3},
    ],
)
def test_a_bad_wish_is_told_and_ignored(
    params: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert request_limits("r7", params) == {}
    assert "r7" in caplog.text
    assert next(iter(params)) in caplog.text


# --- what the model has ----------------------------------------------------------------------


def test_groups_of_a_model() -> None:
    groups = config(
        spec(kv.FullAttentionSpec),
        spec(kv.SlidingWindowSpec, sliding_window=48),
        spec(kv.ChunkedLocalAttentionSpec, attention_chunk_size=64),
    )
    found = [facts.as_tuple() for facts in group_facts(groups, (16, 16, 16))]
    assert found == [
        (0, 16, "full", 0, False),
        (1, 16, "window", 48, False),
        (2, 16, "local", 64, False),
    ]


@pytest.mark.parametrize(
    ("tokens_per_hash", "speculative", "field"),
    [(16, False, None), (8, False, "prefix_match_unit"), (16, True, "speculative_config")],
)
def test_states_must_end_with_their_blocks(
    tokens_per_hash: int, speculative: bool, field: str | None
) -> None:
    groups = [GroupFacts(0, 16, "full", 0, False), GroupFacts(1, 16, "state", 0, False)]
    check_states(groups[:1], tokens_per_hash, speculative)
    if field is None:
        check_states(groups, tokens_per_hash, speculative)
        return
    with pytest.raises(ConfigError, match="group 1") as caught:
        check_states(groups, tokens_per_hash, speculative)
    assert caught.value.field == field


def test_states_are_refused_where_vllm_continues_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [GroupFacts(0, 16, "full", 0, False), GroupFacts(1, 16, "state", 0, False)]
    monkeypatch.setattr(compat, "CONTINUES_WITHOUT_STATE", True)
    check_states(groups[:1], 16, False)
    with pytest.raises(ConfigError, match=r"states that it does not have.*vLLM 0\.28"):
        check_states(groups, 16, False)


def test_a_group_that_cannot_be_found_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="CrossAttentionSpec"):
        group_facts(config(spec(kv.CrossAttentionSpec)), (16,))


def test_all_groups_or_none() -> None:
    groups = config(spec(kv.FullAttentionSpec), spec(kv.FullAttentionSpec))
    with pytest.raises(ConfigError, match="2 KV groups"):
        group_facts(groups, (16,))


@pytest.mark.parametrize(
    ("groups", "more", "text"),
    [
        ([], {}, "groups"),
        ([(0, 16, "whole", 0, False)], {}, "whole"),
        ([(0, 16, "window", 0, False)], {}, "window"),
        ([(0, 16, "state", 0, False)], {"blocks_per_chunk": 2}, "blocks_per_chunk 1"),
        ([(0, 16, "full", 0, False)], {"tokens_per_hash": 24}, "multiple"),
        ([(0, 16, "full", 0, False)], {"defer_deadline_s": -1.0}, "defer_deadline_s"),
        ([(0, 16, "full", 0, False)], {"policy": "fifo"}, "fifo"),
    ],
)
def test_what_makes_no_sense_is_refused(groups: Any, more: dict[str, Any], text: str) -> None:
    settings = {"num_slots": 8, "blocks_per_chunk": 1, "tokens_per_hash": 16} | more
    with pytest.raises(ConfigError, match=text):
        _core.Requests(groups, **settings)


# --- one request through the table -----------------------------------------------------------


def test_a_prompt_is_stored_and_found_again() -> None:
    core = table()
    keys = hashes(1, 3)
    request = SimpleNamespace(block_hashes=keys)
    core.add("a", 48)
    assert core.lookup("a", keys, 0, 50) == (0, "never_stored")
    core.allocated("a", blocks(1, 2, 3, 4), 0)
    loads, stores, flush, spoiled, void = core.step(
        [("a", ([1, 2, 3, 4],), 0)], [], [], [], set(), None, [], [], {"a": 50}, {"a": request}
    )
    assert (loads, flush, spoiled, void) == ([], [], [], [])
    order = Order(*stores[0])
    assert order.request == "a"
    assert order.blocks == b"".join(i.to_bytes(4, "little") for i in (1, 2, 3))
    assert (order.group_sizes, order.first_blocks) == ([3], [0])
    assert core.has_work()
    core.finish("a", keys, 50)
    ended = core.report([(0, order.job, None)])
    assert ended == [(order.job, True, None, 3, [], False)]
    assert not core.has_work()
    core.add("b", 48)
    assert core.lookup("b", keys, 16, 50) == (32, None)
    core.allocated("b", blocks(9, 5, 6, 7), 32)
    loads, _, _, _, _ = core.step([], [], [], [], set(), None, [], [], {}, {})
    load = Order(*loads[0])
    assert load.blocks == b"".join(i.to_bytes(4, "little") for i in (5, 6))
    assert (load.group_sizes, load.first_blocks) == ([2], [1])
    core.report([(0, load.job, "no driver")])
    core.validate()
    assert core.stats()["loads_failed"] == 1
    core.finish("b", keys, 0)
    core.add("c", 48)
    assert core.lookup("c", keys, 16, 50) == (0, "failed")
    core.finish("c", keys, 0)
    assert (core.num_requests, core.num_jobs) == (0, 0)


def test_a_block_that_is_given_away_is_flushed() -> None:
    core = table()
    request = SimpleNamespace(block_hashes=hashes(1, 2))
    core.add("a", 32)
    core.lookup("a", request.block_hashes, 0, 33)
    _, stores, _, _, _ = core.step(
        [("a", ([1, 2, 3],), 0)], [], [], [], set(), None, [], [], {"a": 33}, {"a": request}
    )
    core.finish("a", request.block_hashes, 33)
    core.add("b", 16)
    core.lookup("b", hashes(2, 1), 0, 16)
    core.allocated("b", blocks(2), 0)
    assert core.step([], [], [], [], set(), None, [], [], {}, {})[2] == [stores[0][0]]


def test_a_block_that_is_cleared_spoils_what_reads_it() -> None:
    """Whoever got it: a request that is preempted in the same step is not announced."""
    core = table()
    request = SimpleNamespace(block_hashes=hashes(1, 2))
    core.add("a", 32)
    core.lookup("a", request.block_hashes, 0, 33)
    _, stores, _, _, _ = core.step(
        [("a", ([1, 2, 3],), 0)], [], [], [], set(), None, [], [], {"a": 33}, {"a": request}
    )
    core.finish("a", request.block_hashes, 33)
    _, _, flush, spoiled, _ = core.step([], [], [], [], set(), None, [2], [], {}, {})
    assert flush == spoiled == [stores[0][0]]


@pytest.mark.parametrize("which", ["written", "moved"])
def test_a_block_that_is_not_what_it_was_is_not_stored(which: str) -> None:
    core = table()
    request = SimpleNamespace(block_hashes=hashes(1, 1))
    core.add("a", 48)
    core.lookup("a", request.block_hashes, 0, 49)
    core.step([("a", ([1, 2, 3],), 0)], [], [], [], set(), None, [], [], {"a": 40}, {"a": request})
    request.block_hashes += hashes(1, 3)[1:]
    written, moved = ([2], []) if which == "written" else ([], [2])
    _, stores, _, _, _ = core.step(
        [], ["a"], [None], [40], set(), None, written, moved, {"a": 9}, {"a": request}
    )
    assert Order(*stores[0]).blocks == (3).to_bytes(4, "little")


def test_a_prefix_that_ends_inside_a_block_is_not_continued() -> None:
    core = table()
    keys = hashes(1, 3)
    request = SimpleNamespace(block_hashes=keys)
    core.add("a", 48)
    core.lookup("a", keys, 0, 49)
    core.step([("a", ([1, 2, 3],), 0)], [], [], [], set(), None, [], [], {"a": 49}, {"a": request})
    core.report([(0, 0, None)])
    core.add("b", 48)
    assert core.lookup("b", keys, 16, 49)[0] == 32
    assert core.lookup("b", keys, 24, 49)[0] == 0


def test_names_are_unique_and_known() -> None:
    core = table()
    core.add("a", 16)
    with pytest.raises(RequestError, match="known already"):
        core.add("a", 16)
    with pytest.raises(RequestError, match="nobody"):
        core.lookup("nobody", [], 0, 1)
    with pytest.raises(RequestError, match="hash"):
        core.lookup("a", [b"12345678", b"123"], 0, 40)
    # Somebody else's requests are no business of ours.
    core.step([("x", ([1],), 0)], ["y"], [None], [3], set(), {"z"}, [], [], {"x": 1, "y": 1}, {})


def test_a_report_too_many_is_counted() -> None:
    core = table()
    assert core.report([(0, 17, None), (5, 17, None)]) == []
    assert core.stats()["stray_reports"] == 2


# --- what travels, and what is told ----------------------------------------------------------


def test_messages_survive_pickling() -> None:
    order = Order(3, "r", b"\x01\0\0\0", [1], [0], b"\x02\0\0\0")
    orders = StepOrders([order], [], [3], [4], [])
    assert pickle.loads(pickle.dumps(orders)) == orders
    reports = Reports([(0, 3, None)], Moved(1, 10, 0.5))
    other = Reports([(1, 3, "broken")], Moved(1, 20, 0.25), Moved(2, 5, 0.5))
    both = pickle.loads(pickle.dumps(reports)).aggregate(other)
    assert both.ends == [(0, 3, None), (1, 3, "broken")]
    assert both.stored == Moved(2, 30, 0.75)
    assert both.loaded == Moved(2, 5, 0.5)


def test_events() -> None:
    stored, removed = to_vllm(
        [([b"hash" + (1).to_bytes(4, "big")], False), ([b"gone" + bytes(4)], True)]
    )
    assert (type(stored).__name__, stored.group_idx, stored.medium) == ("BlockStored", 1, "CPU")
    assert (type(removed).__name__, removed.group_idx) == ("BlockRemoved", 0)


def test_statistics() -> None:
    core = table()
    moved = Reports([], Moved(1, 2_000_000_000, 0.5))
    first = KvOffloadStats.since(core.metrics(), moved)
    second = first.aggregate(KvOffloadStats.since(core.metrics(), moved))
    assert second.data["moved_store_bytes"] == 4_000_000_000
    assert second.data["pool_slots"] == 8
    assert second.reduce()["store GB/s"] == 4.0
    assert KvOffloadStats().is_empty()
    second.reset()
    assert second.is_empty()
    assert second.reduce() == {}


def scheduler_side(stages: int) -> Any:
    """As much of the scheduler's side as the check of the ranks needs."""
    side = SchedulerSide.__new__(SchedulerSide)
    side._groups = [(0, 16, "full", 0, False)]
    side._settings = {"blocks_per_chunk": 1, "tokens_per_hash": 16}
    side._spec = SimpleNamespace(chunk=1, facts=SimpleNamespace(pipeline_size=stages))
    side.core = table()
    return side


def rank(number: int, slots: int, chunk: int = 1) -> RankFacts:
    return RankFacts(number, slots, slot_bytes=64, chunk_shape=(64,), blocks_per_chunk=chunk)


def test_the_names_of_all_counters() -> None:
    core = table()
    metrics = core.metrics()
    assert {name for name in metrics if not name.startswith("pool_")} == set(core.stats())
    pool = core.pool_stats()
    for name, value in metrics.items():
        if name.startswith("pool_"):
            assert pool[name.removeprefix("pool_")] == value
    core.add("a", 16)
    core.lookup("a", hashes(1, 1), 0, 17)
    core.step([("a", ([1, 2],), 0)], [], [], [], set(), None, [], [], {"a": 17}, {})
    assert core.stats()["miss_never_stored"] == 1


def test_ranks_that_disagree_are_found_at_start() -> None:
    side = scheduler_side(1)
    side.check_ranks([rank(0, 8), rank(1, 8)])
    with pytest.raises(CapacityError, match="rank 1 has 7 slots"):
        side.check_ranks([rank(1, 7), rank(0, 8)])
    with pytest.raises(CapacityError, match="2 block"):
        side.check_ranks([rank(0, 8, chunk=2)])


def test_pipeline_stages_agree_on_the_smallest_pool() -> None:
    side = scheduler_side(2)
    side.check_ranks([rank(0, 8), rank(1, 5)])
    assert side.core.num_slots == 5
    with pytest.raises(CapacityError, match="2 block"):
        side.check_ranks([rank(0, 8, chunk=2), rank(1, 5)])
