"""The manager as vLLM's connector sees it: the same calls, the same answers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
from kvoffload_rs.errors import ConfigError, KeyNotReadyError, StaleHandleError
from kvoffload_rs.vllm import compat
from kvoffload_rs.vllm.manager import HostSlotsSpec, KvOffloadManager
from vllm.v1.kv_offload import base

MISS, HIT, LATER = compat.ANSWERS


def keys(*numbers: int, group: int = 0) -> list[bytes]:
    return [n.to_bytes(32, "big") + group.to_bytes(4, "big") for n in numbers]


def context(name: str = "r") -> Any:
    return base.ReqContext(req_id=name)


def store(manager: KvOffloadManager, wanted: list[bytes], ctx: Any = None) -> Any:
    ctx = ctx or context()
    output = manager.prepare_store(wanted, ctx)
    assert output is not None
    manager.complete_store(output.keys_to_store, ctx)
    return output


def lookups(manager: KvOffloadManager, wanted: list[bytes], ctx: Any = None) -> list[object]:
    ctx = ctx or context()
    return [manager.lookup(key, ctx) for key in wanted]


def test_it_is_a_manager_of_vllm() -> None:
    manager = KvOffloadManager(4)
    assert isinstance(manager, base.OffloadingManager)
    assert base.OffloadingManager.__abstractmethods__ <= set(vars(KvOffloadManager))


def test_lookup_is_the_rust_method() -> None:
    manager = KvOffloadManager(4)
    assert type(manager.lookup).__name__ == "builtin_function_or_method"
    assert KvOffloadManager.lookup(manager, keys(1)[0], context()) is MISS


def test_a_chunk_from_store_to_load() -> None:
    manager = KvOffloadManager(4)
    ctx = context()
    manager.on_new_request(ctx)
    wanted = keys(1, 2, 3)
    assert lookups(manager, wanted) == [MISS] * 3
    output = manager.prepare_store(wanted, ctx)
    assert isinstance(output, base.PrepareStoreOutput)
    assert output.keys_to_store == wanted
    assert output.evicted_keys == []
    assert lookups(manager, wanted) == [LATER] * 3
    manager.complete_store(set(wanted), ctx)
    assert lookups(manager, wanted) == [HIT] * 3
    loaded = manager.prepare_load(wanted, ctx)
    assert loaded.block_ids.tolist() == output.store_spec.block_ids.tolist()
    manager.complete_load(set(wanted), ctx)
    manager.on_request_finished(ctx)
    assert manager.stats()["pinned"] == 0


def test_new_requests_are_offloaded_by_default() -> None:
    assert KvOffloadManager(4).on_new_request(context()) == base.RequestOffloadingContext()


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, dict.fromkeys])
def test_keys_come_in_any_collection(kind: Any) -> None:
    manager = KvOffloadManager(8)
    ctx = context()
    wanted = keys(1, 2, 3)
    output = manager.prepare_store(kind(wanted), ctx)
    assert output is not None
    assert sorted(output.keys_to_store) == wanted
    assert len(output.store_spec.block_ids) == 3
    manager.touch(kind(wanted), ctx)
    manager.complete_store(kind(wanted), ctx)
    assert len(manager.prepare_load(kind(wanted), ctx).block_ids) == 3
    manager.complete_load(kind(wanted), ctx)
    assert lookups(manager, wanted) == [HIT] * 3


def test_keys_to_store_keep_the_order_of_the_call() -> None:
    manager = KvOffloadManager(16)
    store(manager, keys(5, 7))
    wanted = keys(9, 7, 1, 5, 3)
    output = store(manager, wanted)
    assert output.keys_to_store == keys(9, 1, 3)
    positions = manager.prepare_load(output.keys_to_store, context()).block_ids.tolist()
    assert positions == output.store_spec.block_ids.tolist()


def test_loads_are_in_the_order_of_the_call() -> None:
    manager = KvOffloadManager(16)
    slots = dict(
        zip(keys(1, 2, 3), store(manager, keys(1, 2, 3)).store_spec.block_ids, strict=True)
    )
    for order in ([3, 1, 2], [2, 3, 1]):
        ids = manager.prepare_load(keys(*order), context()).block_ids
        assert ids.tolist() == [slots[key] for key in keys(*order)]


def test_nothing_to_store_is_not_a_refusal() -> None:
    manager = KvOffloadManager(4)
    store(manager, keys(1))
    output = manager.prepare_store(keys(1), context())
    assert output is not None
    assert output.keys_to_store == []
    assert output.store_spec.block_ids.tolist() == []
    assert manager.prepare_store([], context()) is not None


def test_a_refusal_changes_nothing() -> None:
    manager = KvOffloadManager(2, events=True)
    ctx = context()
    store(manager, keys(1, 2), ctx)
    manager.prepare_load(keys(1, 2), ctx)
    before = manager.stats()
    list(manager.take_events())
    assert manager.prepare_store(keys(3), context("other")) is None
    assert lookups(manager, keys(1, 2, 3)) == [HIT, HIT, MISS]
    assert list(manager.take_events()) == []
    after = manager.stats()
    assert {k: after[k] for k in ("free", "ready", "writing", "pinned")} == {
        k: before[k] for k in ("free", "ready", "writing", "pinned")
    }


def test_eviction_is_reported() -> None:
    manager = KvOffloadManager(2, events=True)
    store(manager, keys(1, 2))
    output = store(manager, keys(3, 4))
    assert sorted(output.evicted_keys) == keys(1, 2)
    assert lookups(manager, keys(1, 2, 3, 4)) == [MISS, MISS, HIT, HIT]
    events = list(manager.take_events())
    assert all(isinstance(event, base.OffloadingEvent) for event in events)
    assert {event.medium for event in events} == {compat.EVENT_MEDIUM}
    told = [(sorted(event.keys), event.removed) for event in events]
    assert told == [(keys(1, 2), False), (keys(1, 2), True), (keys(3, 4), False)]
    assert list(manager.take_events()) == []


def test_no_events_unless_asked_for() -> None:
    manager = KvOffloadManager(2)
    store(manager, keys(1))
    assert list(manager.take_events()) == []


def test_completing_what_is_not_pending_does_nothing() -> None:
    manager = KvOffloadManager(4)
    store(manager, keys(1))
    before = manager.stats()
    for success in (True, False):
        manager.complete_store(keys(1, 2), context(), success=success)
        assert lookups(manager, keys(1, 2)) == [HIT, MISS]
    assert manager.stats()["ready"] == before["ready"]
    assert manager.stats()["free"] == before["free"]


def test_a_failed_store_gives_its_slots_back() -> None:
    manager = KvOffloadManager(2)
    ctx = context()
    assert manager.prepare_store(keys(1, 2), ctx) is not None
    manager.complete_store(keys(1, 2), ctx, success=False)
    assert lookups(manager, keys(1, 2)) == [MISS, MISS]
    assert manager.stats()["free"] == 2


@pytest.mark.parametrize("state", ["absent", "pending"])
def test_loading_what_is_not_readable_pins_nothing(state: str) -> None:
    manager = KvOffloadManager(4)
    ctx = context()
    store(manager, keys(1), ctx)
    if state == "pending":
        manager.prepare_store(keys(2), ctx)
    with pytest.raises(KeyNotReadyError):
        manager.prepare_load(keys(1, 2), ctx)
    assert manager.stats()["pinned"] == 0


def test_a_pin_is_given_back_once() -> None:
    manager = KvOffloadManager(4)
    ctx = context()
    store(manager, keys(1), ctx)
    manager.prepare_load(keys(1), ctx)
    manager.complete_load(keys(1), ctx)
    with pytest.raises(StaleHandleError):
        manager.complete_load(keys(1), ctx)
    assert manager.stats()["pinned"] == 0


def test_one_request_does_not_release_another_ones_pin() -> None:
    manager = KvOffloadManager(1)
    first, second = context("a"), context("b")
    store(manager, keys(1), first)
    manager.prepare_load(keys(1), first)
    with pytest.raises(StaleHandleError):
        manager.complete_load(keys(1), second)
    assert manager.prepare_store(keys(2), second) is None


def test_a_reset_forgets_everything_and_late_completions_do_nothing() -> None:
    manager = KvOffloadManager(4)
    ctx = context()
    store(manager, keys(1, 2), ctx)
    manager.prepare_load(keys(1), ctx)
    manager.prepare_store(keys(3), ctx)
    manager.reset_cache()
    assert lookups(manager, keys(1, 2, 3)) == [MISS] * 3
    assert manager.stats()["free"] == 4
    manager.complete_load(keys(1), ctx)
    manager.complete_store(keys(3), ctx)
    manager.on_request_finished(ctx)
    assert manager.stats()["free"] == 4
    assert lookups(manager, keys(1, 2, 3)) == [MISS] * 3
    store(manager, keys(1, 2, 3, 4))
    assert lookups(manager, keys(1, 2, 3, 4)) == [HIT] * 4


def test_a_request_may_go_on_after_a_reset() -> None:
    manager = KvOffloadManager(4)
    ctx = context()
    manager.prepare_store(keys(1), ctx)
    manager.reset_cache()
    store(manager, keys(1), ctx)
    manager.prepare_load(keys(1), ctx)
    manager.complete_load(keys(1), ctx)
    manager.on_request_finished(ctx)
    assert manager.stats()["pinned"] == 0


def test_the_connectors_calls_come_in_any_order() -> None:
    """Completions after the end of a request, and the end of a request that did nothing."""
    manager = KvOffloadManager(4)
    ctx = context()
    manager.on_new_request(ctx)
    manager.prepare_store(keys(1), ctx)
    manager.on_request_finished(ctx)
    manager.complete_store(keys(1), ctx)
    assert lookups(manager, keys(1)) == [HIT]
    manager.on_request_finished(context("never seen"))
    idle = context("idle")
    manager.on_new_request(idle)
    manager.on_request_finished(idle)
    manager.on_request_finished(idle)


def test_two_managers_may_see_the_same_context() -> None:
    first, second = KvOffloadManager(2), KvOffloadManager(2)
    ctx = context()
    for manager in (first, second):
        store(manager, keys(1), ctx)
        manager.prepare_load(keys(1), ctx)
    for manager in (first, second):
        assert manager.stats()["pinned"] == 1
        manager.complete_load(keys(1), ctx)
        assert manager.stats()["pinned"] == 0


def test_a_context_looks_the_same_with_a_handle_on_it() -> None:
    ctx, other = context(), context()
    KvOffloadManager(2).on_new_request(ctx)
    assert ctx == other
    assert repr(ctx) == repr(other)


def test_a_request_counts_as_one_access_from_its_last_token_on() -> None:
    """The end of a request makes its first chunk the most recent: tails go first."""
    manager = KvOffloadManager(4)
    ctx = context()
    if not hasattr(ctx, "set_offload_key_position"):
        pytest.skip("this vLLM does not record key positions")
    wanted = keys(1, 2, 3, 4)
    for token, key in enumerate(wanted, 1):
        ctx.set_offload_key_position(key, 16 * token)
    store(manager, wanted[2:], ctx)
    store(manager, wanted[:2], ctx)
    manager.on_request_finished(ctx)
    assert store(manager, keys(5)).evicted_keys == keys(4)
    assert store(manager, keys(6)).evicted_keys == keys(3)


def test_touches_count_only_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for drop, victim in ((False, 2), (True, 1)):
        monkeypatch.setattr(compat, "DROP_TOUCHES", drop)
        manager = KvOffloadManager(2)
        store(manager, keys(1))
        store(manager, keys(2))
        manager.touch(keys(1), context())
        assert store(manager, keys(3)).evicted_keys == keys(victim)


def test_the_source_of_a_hit() -> None:
    source = KvOffloadManager(1).get_load_source(keys(1)[0], context())
    assert source is compat.LOAD_SOURCE
    assert getattr(source, "value", "host") == "host"


def test_what_is_inherited() -> None:
    manager = KvOffloadManager(1)
    assert manager.has_pending_work() is False
    manager.on_schedule_end(base.ScheduleEndContext((), ()))
    manager.shutdown()
    manager.shutdown()


@pytest.mark.parametrize("slots", [0, -1])
def test_a_pool_has_slots(slots: int) -> None:
    with pytest.raises((ConfigError, OverflowError)):
        KvOffloadManager(slots)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        KvOffloadManager(1, policy="fifo")
    assert caught.value.field


# --- metrics -------------------------------------------------------------------------------------


def values(manager: KvOffloadManager) -> dict[str, Any]:
    """Metric names without their prefix, and their values."""
    data: dict[str, dict[tuple[str, ...], Any]] = manager.get_stats().data["data"]
    return {name.removeprefix("vllm:kv_offload_"): value[()] for name, value in data.items()}


def test_usage_is_what_transfers_hold() -> None:
    manager = KvOffloadManager(8)
    ctx = context()
    assert values(manager) == {
        "cpu_cache_usage_perc": 0.0,
        "cpu_cache_write_usage_perc": 0.0,
        "cpu_cache_read_usage_perc": 0.0,
    }
    manager.prepare_store(keys(1, 2), ctx)
    assert values(manager) == {
        "cpu_cache_usage_perc": 0.25,
        "cpu_cache_write_usage_perc": 0.25,
        "cpu_cache_read_usage_perc": 0.0,
        "cpu_allocation_size": [2],
    }
    manager.complete_store(keys(1, 2), ctx)
    manager.prepare_load(keys(1), ctx)
    assert values(manager) == {
        "cpu_cache_usage_perc": 0.125,
        "cpu_cache_write_usage_perc": 0.0,
        "cpu_cache_read_usage_perc": 0.125,
    }


def test_skipped_stores_are_counted() -> None:
    manager = KvOffloadManager(8, store_threshold=2)
    output = manager.prepare_store(keys(1, 2), context("a"))
    assert output is not None
    assert output.keys_to_store == []
    assert values(manager)["stores_skipped"] == 2
    output = manager.prepare_store(keys(1, 2), context("b"))
    assert output is not None
    assert output.keys_to_store == keys(1, 2)
    assert values(manager)["stores_skipped"] == 0


@pytest.mark.parametrize("threshold", [0, 2])
def test_every_metric_is_declared(threshold: int) -> None:
    manager = KvOffloadManager(2, store_threshold=threshold)
    for name in ("a", "b"):
        manager.prepare_store(keys(1), context(name))
    emitted = set(manager.get_stats().data["data"])
    assert emitted == set(compat.metric_definitions(threshold))


@pytest.mark.parametrize("threshold", [0, 2])
def test_metrics_are_declared_without_vllms_own_spec(threshold: int) -> None:
    assert compat.METRICS is not None
    ours = compat._own_metric_definitions(compat.METRICS, threshold)
    theirs = compat.metric_definitions(threshold)
    assert {name: type(entry) for name, entry in ours.items()} == {
        name: type(entry) for name, entry in theirs.items()
    }
    for name, entry in ours.items():
        assert getattr(entry, "buckets", None) == getattr(theirs[name], "buckets", None)


# --- the message to the workers ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_travel_by_pickle(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    import kvoffload_rs.vllm.manager as module

    monkeypatch.setattr(compat, "ID_DTYPE", np.dtype(dtype))
    monkeypatch.setattr(module, "_WIDEN", np.dtype(dtype).itemsize != 4)
    spec = HostSlotsSpec.from_bytes(np.array([3, 1, 2], dtype=np.int32).tobytes())
    assert isinstance(spec, base.BlockIDsLoadStoreSpec)
    again = pickle.loads(pickle.dumps(spec))
    assert type(again) is HostSlotsSpec
    assert again.block_ids.dtype == dtype
    assert again.block_ids.tolist() == [3, 1, 2]
    assert HostSlotsSpec.from_bytes(b"").block_ids.tolist() == []
    assert HostSlotsSpec.medium() == "CPU"


def test_slots_have_vllms_own_integer_type() -> None:
    output = store(KvOffloadManager(2), keys(1))
    assert output.store_spec.block_ids.dtype == base.GPULoadStoreSpec([], [], []).block_ids.dtype
