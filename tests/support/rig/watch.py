"""Rules of our connector that can be seen from outside, checked with every step.

A slot that is written is nobody else's, a slot that is read is not written; a block that is loaded
is used by nobody until the load is over; a block that a store still reads is written only after the
workers were told to wait for that store; every rank reports every job once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Job:
    """A copy that some rank has not reported yet."""

    store: bool
    request: str
    blocks: frozenset[int]
    slots: frozenset[int]
    void: bool = False
    flushed: bool = False
    ranks: set[int] = field(default_factory=set)


class Watch:
    """The copies under way in one engine."""

    def __init__(self, ranks: int, *, one_region: bool) -> None:
        self._ranks = ranks
        self._one_region = one_region
        self._void_below = 0
        self._seen: set[int] = set()
        self.live: dict[int, Job] = {}

    def reset(self, begun: int) -> None:
        """The pool was emptied: the first ``begun`` jobs hold no slots any more."""
        self._void_below = begun
        for job in self.live.values():
            job.void = True

    def step(
        self, scheduled: Any, blocks: dict[str, tuple[list[int], ...]], sizes: list[int]
    ) -> None:
        """A step: what the workers are told, and the blocks of the requests that run."""
        orders = scheduled.kv_connector_metadata
        new = {order.job: self._begin(order, store=False) for order in orders.loads}
        new |= {order.job: self._begin(order, store=True) for order in orders.stores}
        for number in orders.flush:
            if number in self.live:  # else it was reported, but the scheduler does not know yet
                assert self.live[number].store, f"job {number} is flushed, but it is no store"
                self.live[number].flushed = True
        used, written = self._touched(scheduled, blocks, sizes)
        for number, job in self.live.items():
            if not job.store:
                clash = job.blocks & used
                assert not clash, f"blocks {clash} are used while job {number} loads them"
            for other in (load for load in new if not self.live[load].store and not job.flushed):
                clash = job.blocks & self.live[other].blocks
                assert not clash or other == number, f"job {other} loads {clash} of job {number}"
            if not job.store or job.flushed:
                continue
            for request, ids in written.items():
                # A store of this step reads what this step computes, whoever computes it.
                fine = request == job.request or (number in new and job.request in written)
                clash = frozenset() if fine else job.blocks & ids
                assert not clash, f"{request} writes {clash}, which store {number} still reads"

    def reported(self, ends: Iterable[tuple[int, int, str | None]]) -> None:
        """What a rank says."""
        for rank, number, _ in ends:
            job = self.live.get(number)
            assert job is not None, f"rank {rank} reports job {number}, which is over"
            assert rank not in job.ranks, f"rank {rank} reports job {number} twice"
            job.ranks.add(rank)
            if len(job.ranks) == self._ranks:
                del self.live[number]

    def _begin(self, order: Any, *, store: bool) -> Job:
        assert order.job not in self._seen, f"job {order.job} was ordered twice"
        self._seen.add(order.job)
        job = Job(store, order.request, _set(order.blocks), _set(order.slots))
        job.void = order.job < self._void_below
        for number, other in self.live.items():
            # A rank orders a store after the loads that a reset has voided, but only its own ones.
            read_by_others = self._one_region and store and not other.store
            if read_by_others or (not (job.void or other.void) and (store or other.store)):
                clash = job.slots & other.slots
                assert not clash, f"slots {clash} of job {order.job} are in use by job {number}"
        self.live[order.job] = job
        return job

    @staticmethod
    def _touched(
        scheduled: Any, blocks: dict[str, tuple[list[int], ...]], sizes: list[int]
    ) -> tuple[set[int], dict[str, set[int]]]:
        """Blocks that requests of this step have, and those that they write."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        used: set[int] = set()
        written: dict[str, set[int]] = {}
        for request, count in scheduled.num_scheduled_tokens.items():
            for ids, size in zip(blocks[request], sizes, strict=True):
                used.update(block for block in ids if block)
                first, end = computed[request], computed[request] + count
                written.setdefault(request, set()).update(ids[first // size : -(-end // size)])
        return used, written


def _set(numbers: bytes) -> frozenset[int]:
    return frozenset(np.frombuffer(numbers, dtype=np.int32).tolist())
