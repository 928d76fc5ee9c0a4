"""The scheduler's side: vLLM's `OffloadingManager` over the Rust manager.

Each method makes one call into Rust; there is no Python work per key.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
)

from kvoffload_rs import _core
from kvoffload_rs.vllm import compat

_WIDEN = compat.ID_DTYPE.itemsize != 4
_MANAGERS = itertools.count()


class HostSlotsSpec(BlockIDsLoadStoreSpec):
    """Host slots, in the order of the keys they belong to; sent to the workers by pickle."""

    @staticmethod
    def medium() -> str:
        """Name by which vLLM up to 0.24 chooses the handler."""
        return compat.HOST_MEDIUM

    @classmethod
    def from_bytes(cls, slots: bytes) -> HostSlotsSpec:
        """Makes one from native 32-bit integers, without a Python number per slot."""
        spec = cls.__new__(cls)
        ids = np.frombuffer(slots, dtype=np.int32)
        spec.block_ids = ids.astype(compat.ID_DTYPE) if _WIDEN else ids
        return spec


class KvOffloadManager(OffloadingManager):
    """Which chunks the host pool holds, and which go when room is needed.

    Not thread-safe by itself, like vLLM's own: the scheduler's thread is the only caller.

    Args:
        num_slots: slots of the pool.
        policy: `lru` or `arc`.
        events: collect KV events.
        store_threshold: how often a chunk is offered before it is stored.
        max_tracker_size: how many chunks that are not stored yet are counted.
        partial_admission: store what there is room for instead of all or none.
        write_deadline_s: after so long, a chunk whose store never completed counts as absent.
        info: values of vLLM's configuration metric.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        policy: str = "lru",
        events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        partial_admission: bool = False,
        write_deadline_s: float = 600.0,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self._core = _core.Manager(
            num_slots,
            policy=policy,
            events=events,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
            partial_admission=partial_admission,
            write_deadline_s=write_deadline_s,
            answers=compat.ANSWERS,
        )
        self._num_slots = num_slots
        self._count_skipped = store_threshold >= 2
        self._info = info or {}
        # vLLM makes one context per request and passes it to every call, so the request's handle
        # is kept on it. The name is this manager's own: another manager that is given the same
        # context must not find our handle.
        self._attribute = f"_kvoffload_request_{next(_MANAGERS)}"
        # vLLM looks up one key per call, thousands per request. An attribute that is the Rust
        # function itself saves the Python frame that a method here would cost each time.
        self.lookup = self._core.lookup_function()  # type: ignore[method-assign]

    def lookup(self, key: bytes, req_context: Any) -> object:
        """Whether a chunk is readable, absent, or being written. The instance's attribute hides it.

        It is here because vLLM's base class demands the method.
        """
        return self._core.lookup(key, req_context)

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """The tier that a hit came from: there is only the host's memory."""
        return compat.LOAD_SOURCE

    def on_new_request(self, req_context: Any) -> Any:
        """Prepares for a request."""
        self._new_request(req_context)
        return compat.request_context()

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """Takes slots for those of `keys` that are to be stored, in the order of `keys`.

        Returns:
            What to store where, and what had to go for it; None if there is no room, and then
            nothing has changed.
        """
        answer = self._core.prepare_store(_sequence(keys), self._request(req_context))
        if answer is None:
            return None
        to_store, slots, evicted = answer
        return PrepareStoreOutput(to_store, HostSlotsSpec.from_bytes(slots), evicted)

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        """Makes chunks readable, or gives their slots back. Other keys are left alone."""
        self._core.complete_store(keys, self._request(req_context), success)

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> HostSlotsSpec:
        """Pins the chunks and says where they are, in the order of `keys`.

        Raises:
            KeyNotReadyError: one of them is not readable; nothing is pinned then.
        """
        slots = self._core.prepare_load(_sequence(keys), self._request(req_context))
        return HostSlotsSpec.from_bytes(slots)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Gives the pins of a load back.

        Raises:
            StaleHandleError: a key is not pinned by this request (after a reset: no error).
        """
        self._core.complete_load(keys, self._request(req_context))

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Counts as an access, in versions where nothing else does (see `compat.DROP_TOUCHES`)."""
        if not compat.DROP_TOUCHES:
            self._core.touch(_sequence(keys))

    def on_request_finished(self, req_context: Any) -> None:
        """Applies the request's accesses to the policy. Completions may still follow."""
        request = getattr(req_context, self._attribute, None)
        if request is not None:
            self._core.finish_request(request, compat.key_positions(req_context))

    def reset_cache(self) -> None:
        """Forgets everything. Completions of jobs from before may come or not come."""
        self._core.reset()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The KV events since the last call."""
        medium = compat.EVENT_MEDIUM
        return [
            OffloadingEvent(keys=keys, medium=medium, removed=removed)
            for keys, removed in self._core.take_events()
        ]

    def get_stats(self) -> Any:
        """The metrics since the last call, by the names of vLLM's own CPU manager."""
        names = compat.METRICS
        if names is None:
            return None
        stats = compat.new_stats()
        now = self._core.stats()
        slots = self._num_slots
        writing = now["writing"]
        # Neither free nor evictable: being written, or pinned by a load.
        busy = slots - now["free"] - now["evictable"]
        for name, count in (
            (names.usage, busy),
            (names.write_usage, writing),
            (names.read_usage, max(busy - writing, 0)),
        ):
            if name is not None:
                stats.set_gauge(name, count / slots)
        if names.allocation_size is not None:
            for size in self._core.take_allocation_sizes():
                stats.observe_histogram(names.allocation_size, size)
        if names.stores_skipped is not None and self._count_skipped:
            stats.increase_counter(names.stores_skipped, self._core.take_stores_skipped())
        return stats

    def config_info(self) -> Sequence[Mapping[str, Any]]:
        """Values of the configuration metric, one series."""
        return [self._info]

    def stats(self) -> dict[str, int]:
        """All counters of the Rust manager; vLLM does not ask for them."""
        return self._core.stats()

    def _request(self, req_context: Any) -> _core.Request:
        request: _core.Request | None = getattr(req_context, self._attribute, None)
        return self._new_request(req_context) if request is None else request

    def _new_request(self, req_context: Any) -> _core.Request:
        request = self._core.new_request()
        setattr(req_context, self._attribute, request)
        return request


def _sequence(keys: Collection[bytes]) -> Sequence[bytes]:
    """vLLM passes lists, and in places tuples or sets."""
    return keys if isinstance(keys, (list, tuple)) else list(keys)
