"""vLLM managers with one mistake each: the driver must notice every one of them.

Each mistake is one that a re-implementation makes easily. They are made from outside, by wrapping
a method of an otherwise untouched vLLM manager.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from oracle_sides import Setup, VllmSide
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.manager import _RequestCacheAccess

Mistake = Callable[[Any], None]
LRU = Setup("lru", 12)
ARC = Setup("arc", 12)


def finish_orders_tail_first(manager: Any) -> None:
    """The end of a request refreshes the head first, so the head is the next victim."""
    _wrap_finish(manager, lambda groups, new, reused, ctx: ([g[::-1] for g in groups], new, reused))


def positions_are_ignored(manager: Any) -> None:
    """Chunks of several groups are ordered group by group, not by token position."""
    original = manager._policy.on_request_finished
    manager._policy.on_request_finished = lambda groups, new, reused, ctx: original(
        groups, new, reused, ReqContext("without positions")
    )


def own_stores_count_as_reuse(manager: Any) -> None:
    """ARC takes a chunk that the request itself stored for a frequent one."""
    _wrap_finish(manager, lambda groups, new, reused, ctx: (groups, set(), new | reused))


def reuse_is_lost(manager: Any) -> None:
    """ARC does not see that the request read chunks."""
    _wrap_finish(manager, lambda groups, new, reused, ctx: (groups, new | reused, set()))


def end_of_request_is_ignored(manager: Any) -> None:
    """Recency is never updated at the end of a request."""
    manager._policy.on_request_finished = lambda *_: None


def keys_of_the_call_are_not_protected(manager: Any) -> None:
    """A store may evict a chunk that the same call names."""
    original = manager._policy.evict
    manager._policy.evict = lambda n, protected: original(n, set())


def refusal_evicts_what_it_can(manager: Any) -> None:
    """A refused store still takes one victim."""
    original = manager._policy.evict

    def evict(n: int, protected: set[bytes]) -> Any:
        victims = original(n, protected)
        if victims is None:
            original(1, protected)
        return victims

    manager._policy.evict = evict


def every_offer_adapts(manager: Any) -> None:
    """ARC adapts each time a missing chunk is offered, not once per request."""
    original = manager.prepare_store

    def prepare_store(keys: Any, ctx: ReqContext) -> Any:
        state = ctx.get_state(_RequestCacheAccess)
        if state is not None:
            state.store_miss_keys.clear()
        return original(keys, ctx)

    manager.prepare_store = prepare_store


def failed_stores_count_as_stored(manager: Any) -> None:
    """A failed store leaves the key readable."""
    original = manager.complete_store
    manager.complete_store = lambda keys, ctx, success=True: original(keys, ctx, True)


def stores_are_sorted(manager: Any) -> None:
    """keys_to_store comes back in another order than the caller's."""
    original = manager.prepare_store
    manager.prepare_store = lambda keys, ctx: original(sorted(keys), ctx)


def requests_outlive_a_reset(manager: Any) -> None:
    """What a request did before a reset still counts after it."""
    original = manager.reset_cache

    def reset_cache() -> None:
        original()
        manager._cache_generation = 0

    manager.reset_cache = reset_cache


def loads_come_in_another_order(manager: Any) -> None:
    """The slots of a load do not follow the order of its keys."""
    original = manager.prepare_load
    manager.prepare_load = lambda keys, ctx: original(sorted(keys), ctx)


def pending_is_a_miss(manager: Any) -> None:
    """A chunk that is being written is reported as absent."""
    original = manager.lookup

    def lookup(key: bytes, ctx: ReqContext) -> LookupResult:
        answer = original(key, ctx)
        return answer if answer is LookupResult.HIT else LookupResult.MISS

    manager.lookup = lookup


def threshold_is_off_by_one(manager: Any) -> None:
    """A chunk is stored one offer too late."""
    manager.store_threshold += 1


def tracker_never_forgets(manager: Any) -> None:
    """The offer counts are not bounded by max_tracker_size."""
    manager.max_tracker_size = 1 << 40


def events_of_evictions_are_lost(manager: Any) -> None:
    """No event says that a chunk is gone."""
    original = manager.take_events
    manager.take_events = lambda: [event for event in original() if not event.removed]


def target_is_a_whole_number(manager: Any) -> None:
    """ARC's target is rounded."""
    policy = manager._policy
    original = policy.on_store_miss

    def on_store_miss(keys: Any, ctx: ReqContext) -> None:
        original(keys, ctx)
        policy.target_t1_size = float(math.floor(policy.target_t1_size))

    policy.on_store_miss = on_store_miss


def a_pin_is_lost(manager: Any) -> None:
    """Completing a load drops every pin of the chunk, other requests' too."""
    original = manager.complete_load

    def complete_load(keys: Any, ctx: ReqContext) -> None:
        for key in keys:
            chunk = manager._policy.get(key)
            while chunk is not None and chunk.ref_cnt > 0:
                original([key], ctx)

    manager.complete_load = complete_load


def a_second_completion_is_an_access(manager: Any) -> None:
    """complete_store of chunks that are readable already refreshes them."""
    original = manager.complete_store

    def complete_store(keys: Any, ctx: ReqContext, success: bool = True) -> None:
        readable = [k for k in keys if manager.lookup(k, ctx) is LookupResult.HIT]
        manager._policy.touch(readable, ctx)
        original(keys, ctx, success)

    manager.complete_store = complete_store


def unpinning_refreshes(manager: Any) -> None:
    """A chunk that is read becomes most recent when the transfer ends."""
    original = manager.complete_load

    def complete_load(keys: Any, ctx: ReqContext) -> None:
        original(keys, ctx)
        manager._policy.touch(keys, ctx)

    manager.complete_load = complete_load


def ghosts_survive_a_store(manager: Any) -> None:
    """ARC keeps the ghost of a chunk that came back."""
    policy = manager._policy
    original = policy.insert

    def insert(key: bytes, chunk: Any) -> None:
        ghost = key in policy.b1
        original(key, chunk)
        if ghost:
            policy.b1[key] = None

    policy.insert = insert


def slots_are_given_twice(manager: Any) -> None:
    """An evicted chunk's slot goes back to the pool twice."""
    original = manager._free_chunk

    def free_chunk(chunk: Any) -> None:
        original(chunk)
        if chunk.chunk_id == 0:
            original(chunk)

    manager._free_chunk = free_chunk


def groups_are_ordered_last_to_first(manager: Any) -> None:
    """Without positions, the groups are taken in the opposite order."""
    _wrap_finish(manager, lambda groups, new, reused, ctx: (groups[::-1], new, reused))


def touch_ends_with_the_tail(manager: Any) -> None:
    """A touch leaves the tail most recent, not the head."""
    original = manager._policy.touch
    manager._policy.touch = lambda keys, ctx: original(list(keys)[::-1], ctx)


def lookups_refresh(manager: Any) -> None:
    """A lookup counts as an access."""
    original = manager.lookup

    def lookup(key: bytes, ctx: ReqContext) -> LookupResult:
        answer = original(key, ctx)
        if answer is LookupResult.HIT:
            manager._policy.touch([key], ctx)
        return answer

    manager.lookup = lookup


def every_offer_is_remembered(manager: Any) -> None:
    """Chunks that are being written, or that the threshold skips, count for their requester."""
    original = manager.prepare_store

    def prepare_store(keys: Any, ctx: ReqContext) -> Any:
        output = original(keys, ctx)
        manager._record_request_cache_access(keys, ctx)
        return output

    manager.prepare_store = prepare_store


def refused_offers_count_as_stored(manager: Any) -> None:
    """A request whose store was refused is taken for the one that stored the chunks."""
    original = manager.prepare_store

    def prepare_store(keys: Any, ctx: ReqContext) -> Any:
        output = original(keys, ctx)
        if output is None:
            ctx.get_state(_RequestCacheAccess).inserted_keys.update(keys)
        return output

    manager.prepare_store = prepare_store


def the_last_observation_counts(manager: Any) -> None:
    """A chunk's place in its request is where it was seen last, not first."""
    original = manager._record_request_cache_access

    def record(keys: Any, ctx: ReqContext, **classes: Any) -> None:
        keys = list(keys)
        original(keys, ctx, **classes)
        groups = ctx.get_state(_RequestCacheAccess).key_groups.values()
        for group in groups:
            group.sort(key=lambda key: key in keys)

    manager._record_request_cache_access = record


def a_failed_store_leaves_a_ghost(manager: Any) -> None:
    """ARC remembers a chunk that was never there."""
    policy = manager._policy
    original = policy.remove

    def remove(key: bytes) -> None:
        original(key)
        policy.b1[key] = None

    policy.remove = remove


def one_ghost_too_many(manager: Any) -> None:
    """ARC's ghost lists are one longer than the pool."""
    policy = manager._policy
    original = policy.evict

    def evict(n: int, protected: set[bytes]) -> Any:
        policy.cache_capacity += 1
        try:
            return original(n, protected)
        finally:
            policy.cache_capacity -= 1

    policy.evict = evict


def _wrap_finish(manager: Any, change: Callable[..., tuple[Any, Any, Any]]) -> None:
    original = manager._policy.on_request_finished
    manager._policy.on_request_finished = lambda groups, new, reused, ctx: original(
        *change(groups, new, reused, ctx), ctx
    )


_TRACKER = Setup("lru", 12, store_threshold=2, max_tracker_size=12)
_GROUPS = Setup("lru", 12, groups=(0, 1, 2))

MISTAKES: list[tuple[Mistake, Setup]] = [
    (finish_orders_tail_first, LRU),
    (finish_orders_tail_first, ARC),
    (positions_are_ignored, _GROUPS),
    (own_stores_count_as_reuse, ARC),
    (reuse_is_lost, ARC),
    (end_of_request_is_ignored, LRU),
    (end_of_request_is_ignored, ARC),
    (keys_of_the_call_are_not_protected, LRU),
    (keys_of_the_call_are_not_protected, ARC),
    (refusal_evicts_what_it_can, LRU),
    (refusal_evicts_what_it_can, ARC),
    (every_offer_adapts, ARC),
    (failed_stores_count_as_stored, LRU),
    (stores_are_sorted, LRU),
    (requests_outlive_a_reset, LRU),
    (requests_outlive_a_reset, ARC),
    (loads_come_in_another_order, LRU),
    (pending_is_a_miss, LRU),
    (threshold_is_off_by_one, _TRACKER),
    (tracker_never_forgets, _TRACKER),
    (events_of_evictions_are_lost, LRU),
    (target_is_a_whole_number, ARC),
    (a_pin_is_lost, ARC),
    (a_second_completion_is_an_access, LRU),
    (unpinning_refreshes, LRU),
    (unpinning_refreshes, ARC),
    (ghosts_survive_a_store, ARC),
    (slots_are_given_twice, LRU),
    (groups_are_ordered_last_to_first, _GROUPS),
    (touch_ends_with_the_tail, LRU),
    (touch_ends_with_the_tail, ARC),
    (lookups_refresh, LRU),
    (every_offer_is_remembered, LRU),
    (every_offer_is_remembered, _TRACKER),
    (refused_offers_count_as_stored, ARC),
    (the_last_observation_counts, LRU),
    (a_failed_store_leaves_a_ghost, ARC),
    (one_ghost_too_many, ARC),
]


class MutantSide(VllmSide):
    """vLLM's manager with one mistake in it."""

    def __init__(self, setup: Setup, mistake: Mistake) -> None:
        super().__init__(setup)
        mistake(self.manager)
