"""A small hand on `_core.Requests`, and a worker's side whose copies the test makes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvoffload_rs import _core
from kvoffload_rs.vllm import compat
from kvoffload_rs.vllm.connector.messages import Order, StepOrders
from kvoffload_rs.vllm.connector.worker import WorkerSide

BLOCK = 16
FULL = (0, BLOCK, "full", 0, False)

Ids = Sequence[int] | Sequence[Sequence[int]]


class Step(NamedTuple):
    """What the workers are told with a step."""

    loads: list[Order]
    stores: list[Order]
    flush: list[int]
    void: list[int]


def chain(prompt: object, count: int) -> list[bytes]:
    """The hashes of a prompt's blocks, as vLLM makes them: each stands for all before it."""
    return [hashlib.sha256(f"{prompt}/{i}".encode()).digest() for i in range(count)]


def numbers(raw: bytes) -> list[int]:
    """The blocks or slots of an order."""
    return np.frombuffer(raw, dtype=np.int32).tolist()


class Connector:
    """The scheduler's side, and the calls that vLLM makes around it.

    A request is named by the test; its `prompt` decides its hashes. Block lists are given for one
    group, or for each.
    """

    def __init__(
        self, slots: int = 16, groups: Sequence[tuple[Any, ...]] = (FULL,), **settings: Any
    ) -> None:
        settings = {"blocks_per_chunk": 1, "tokens_per_hash": BLOCK} | settings
        self.core = _core.Requests(list(groups), num_slots=slots, **settings)
        self.num_groups = len(groups)
        self.unit = settings["tokens_per_hash"]
        self.requests: dict[str, Any] = {}

    # --- requests ---

    def add(self, name: str, prompt: object, tokens: int, **limits: Any) -> None:
        """A request whose whole text is known and has so many tokens."""
        hashes = chain(prompt, tokens // self.unit)
        self.requests[name] = SimpleNamespace(block_hashes=hashes, tokens=tokens)
        self.core.add(name, tokens, **limits)

    def lookup(self, name: str, computed: int = 0) -> int | None:
        """How many tokens can be loaded."""
        return self.why(name, computed)[0]

    def why(self, name: str, computed: int = 0) -> tuple[int | None, str | None]:
        """The same with the reason."""
        request = self.requests[name]
        answer: tuple[int | None, str | None] = self.core.lookup(
            name, request.block_hashes, computed, request.tokens
        )
        return answer

    def allocated(self, name: str, blocks: Ids, external: int = 0, hashed: int = 0) -> None:
        """The request gets its blocks, of which the first `hashed` of each group hold KV."""
        groups = [
            [
                SimpleNamespace(block_id=block, block_hash=b"x" if at < hashed else None)
                for at, block in enumerate(group)
            ]
            for group in self._groups(blocks)
        ]
        self.core.allocated(name, groups, external)

    def step(
        self,
        new: Mapping[str, tuple[Ids, int, int]] | None = None,
        more: Mapping[str, tuple[Ids | None, int, int]] | None = None,
        resumed: Iterable[str] = (),
        preempted: Iterable[str] = (),
    ) -> Step:
        """One step.

        `new` and `more`: (blocks, tokens computed before, tokens of this step) of requests that are
        announced with all their blocks, or with further ones.
        """
        new, more = new or {}, more or {}
        answer = self.core.step(
            [(name, self._tuple(ids), done) for name, (ids, done, _) in new.items()],
            list(more),
            [None if ids is None else self._tuple(ids) for ids, _, _ in more.values()],
            [done for _, done, _ in more.values()],
            set(resumed),
            set(preempted) or None,
            [],
            [],
            {name: count for name, (_, _, count) in {**new, **more}.items()},
            self.requests,
        )
        loads, stores, flush, *_spoiled, void = answer
        self.core.validate()
        return Step([Order(*one) for one in loads], [Order(*one) for one in stores], flush, void)

    def report(self, order: Order, why: str | None = None, ranks: Iterable[int] = (0,)) -> Any:
        """Ranks have done their part of a job."""
        ended = self.core.report([(rank, order.job, why) for rank in ranks])
        self.core.validate()
        return ended

    def finish(self, name: str, computed: int) -> None:
        """The request ends."""
        self.core.finish(name, self.requests[name].block_hashes, computed)
        self.core.validate()

    # --- stories ---

    def run(self, name: str, prompt: object, tokens: int, blocks: Ids) -> list[Order]:
        """A request that computes all its tokens at once; what it stores is under way."""
        self.add(name, prompt, tokens)
        self.lookup(name)
        self.allocated(name, blocks)
        return self.step({name: (blocks, 0, tokens)}).stores

    def store(self, prompt: object, tokens: int, first_block: int = 100) -> None:
        """Somebody else's request: it computes, stores and ends."""
        name = f"stores {prompt}"
        count = -(-tokens // BLOCK)
        ids = [list(range(first_block, first_block + count))] * self.num_groups
        orders = self.run(name, prompt, tokens, ids)
        self.finish(name, tokens)
        for order in orders:
            self.report(order)

    def found(self, prompt: object, tokens: int) -> int | None:
        """What a new request of this prompt finds."""
        self.add("looks", prompt, tokens)
        try:
            return self.lookup("looks")
        finally:
            self.finish("looks", 0)

    def figure(self, name: str) -> int:
        """One of the counters, or one of the pool's."""
        return {**self.core.pool_stats(), **self.core.stats()}[name]

    def assert_idle(self) -> None:
        """Nothing is left over."""
        self.core.validate()
        assert not self.core.has_work()
        assert (self.core.num_requests, self.core.num_jobs) == (0, 0)
        pool = self.core.pool_stats()
        assert pool["pinned"] == pool["writing"] == 0, pool
        assert pool["free"] + pool["ready"] == pool["slots"], pool

    def _groups(self, blocks: Ids) -> list[list[int]]:
        lists = [list(blocks)] if not blocks or isinstance(blocks[0], int) else map(list, blocks)
        groups = list(lists)  # type: ignore[arg-type]
        return groups if len(groups) == self.num_groups else groups * self.num_groups

    def _tuple(self, blocks: Ids) -> tuple[list[int], ...]:
        return tuple(self._groups(blocks))


class Copies:
    """Transfers of one rank that end when the test says so."""

    num_slots, slot_bytes, chunk_bytes, pages_per_block = 8, 64, [64], [1]

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.ended: list[Any] = []
        self.refuses: Exception | None = None
        self.wait_fails: Exception | None = None

    def start_store(self, job: int, blocks: Any, slots: bytes) -> None:
        """A store begins."""
        self._start("store", job)

    def start_load(self, job: int, slots: bytes, blocks: Any) -> None:
        """A load begins."""
        self._start("load", job)

    def await_ends(self, jobs: Iterable[int]) -> None:
        """A wait."""
        self.calls.append(("wait", sorted(jobs)))
        if self.wait_fails is not None:
            raise self.wait_fails

    def cancel(self, jobs: Iterable[int]) -> None:
        """A job is given up."""
        self.calls.append(("cancel", sorted(jobs)))

    def outcomes(self) -> list[Any]:
        """What has ended."""
        ended, self.ended = self.ended, []
        return ended

    def end(self, job: int, *, store: bool, error: Exception | None = None) -> None:
        """A job ends."""
        self.ended.append((job, store, 64, 0.001, error))

    def _start(self, what: str, job: int) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.calls.append((what, job))


class Worker:
    """A worker's side of our connector over such copies."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, groups: int = 1, deadline_s: float = 60.0
    ) -> None:
        monkeypatch.setattr(compat, "kv_cache_registrar", lambda *_: None)
        spec: Any = SimpleNamespace(
            facts=SimpleNamespace(rank=0),
            settings=SimpleNamespace(load_deadline_s=deadline_s),
            chunk=1,
        )
        self.side = WorkerSide(spec, None, SimpleNamespace(kv_cache_groups=[None] * groups))
        self.copies = self.side._transfers = Copies()

    def step(self, orders: StepOrders | None = None) -> list[tuple[int, int, str | None]]:
        """One step as vLLM makes it; what is reported with it."""
        orders = orders or StepOrders()
        self.side.flush(orders)
        self.side.begin(orders)
        self.side.collect()
        reports = self.side.take_reports()
        return [] if reports is None else reports.ends


def order(job: int, blocks: Sequence[int], slots: Sequence[int], request: str = "r") -> Order:
    """An order of one group."""
    raw = [np.asarray(ids, dtype=np.int32).tobytes() for ids in (blocks, slots)]
    return Order(job, request, raw[0], [len(blocks)], [0], raw[1])
