"""Copies whose every delay and failure is planned, in steps: no clock and no thread decides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvoffload_rs.errors import TransferError, TransferTimeoutError

_GARBAGE = 0x55


@dataclass(frozen=True)
class Fate:
    """What becomes of a job: after how many steps it runs, and whether it fails then."""

    steps: int = 0
    fails: bool = False


@dataclass
class _Job:
    number: int
    store: bool
    fate: Fate
    left: int
    blocks: frozenset[int]
    slots: frozenset[int]
    submit: Callable[[], None]


class PlannedTransfers:
    """Stands before a rank's transfers and lets each job begin when it is its turn.

    A job that uses a slot or a block of an earlier one runs after it, as in the real engine. A load
    that fails leaves garbage in its blocks, a store that fails what it was in its slots.
    """

    def __init__(
        self, real: Any, fate: Callable[[bool], Fate], late: Callable[[], bool], pages: list[Any]
    ) -> None:
        self._real, self._fate, self._late, self._pages = real, fate, late, pages
        self._queue: list[_Job] = []
        self._ended: list[Any] = []
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def start_store(self, job: int, blocks: Any, slots: bytes) -> None:
        """As `RankTransfers.start_store`."""
        self._add(job, True, blocks, slots, lambda: self._real.start_store(job, blocks, slots))

    def start_load(self, job: int, slots: bytes, blocks: Any) -> None:
        """As `RankTransfers.start_load`."""
        self._add(job, False, blocks, slots, lambda: self._real.start_load(job, slots, blocks))

    def await_ends(self, jobs: Collection[int]) -> None:
        """As `RankTransfers.await_ends`."""
        if any(job.number in jobs for job in self._queue) and self._late():
            raise TransferTimeoutError("a planned deadline", job=min(jobs))
        self._run([job for job in self._queue if job.number in jobs])

    def cancel(self, jobs: Iterable[int]) -> None:
        """As `RankTransfers.cancel`: none of these has begun."""
        wanted = set(jobs)
        for job in [job for job in self._queue if job.number in wanted]:
            self._queue.remove(job)
            self._fail(job, "cancelled")

    def outcomes(self) -> list[Any]:
        """As `RankTransfers.outcomes`; a step has passed."""
        for job in self._queue:
            job.left -= 1
        self._run([job for job in self._queue if job.left < 0])
        ended, self._ended = self._ended, []
        return ended

    def _add(
        self, number: int, store: bool, blocks: Any, slots: bytes, submit: Callable[[], None]
    ) -> None:
        fate = self._fate(store)
        ids = frozenset(blocks.block_ids.tolist())
        taken = frozenset(np.frombuffer(slots, dtype=np.int32).tolist())
        self._queue.append(_Job(number, store, fate, fate.steps, ids, taken, submit))

    def _run(self, jobs: list[_Job]) -> None:
        for job in jobs:
            if job not in self._queue:
                continue  # an earlier one needed it
            before = self._queue[: self._queue.index(job)]
            self._run([one for one in before if one.slots & job.slots or one.blocks & job.blocks])
            self._queue.remove(job)
            if job.fate.fails:
                if not job.store:
                    for page in self._pages:
                        page[sorted(job.blocks)] = _GARBAGE
                self._fail(job, "a planned failure")
                continue
            job.submit()
            self._real.wait([job.number])
            self._ended += self._real.outcomes()

    def _fail(self, job: _Job, why: str) -> None:
        self.failed += 1
        self._ended.append((job.number, job.store, 0, 0.0, TransferError(why, job=job.number)))
