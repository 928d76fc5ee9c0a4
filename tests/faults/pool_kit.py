"""A small hand on `_core.Manager`, so that each scenario reads as its story."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvoffload_rs._core import Manager, Request

MISS, HIT, LATER = False, True, None


def key(name: object, group: int = 0) -> bytes:
    """A chunk's key: a made-up block hash and the KV group."""
    return f"chunk-{name}".encode() + group.to_bytes(4, "big")


def keys(*names: object) -> list[bytes]:
    """The keys of several chunks of the first group."""
    return [key(name) for name in names]


class Pool:
    """A manager, and the calls that a connector makes around one transfer."""

    def __init__(self, slots: int, policy: str = "lru", **options: Any) -> None:
        self.manager = Manager(slots, policy=policy, **options)
        self.slots = slots

    def request(self) -> Request:
        """A new request."""
        return self.manager.new_request()

    def offer(self, chunks: Sequence[bytes], request: Request) -> list[bytes] | None:
        """Ask to store; the keys that were taken, or None if the store was refused."""
        answer = self.manager.prepare_store(chunks, request)
        return None if answer is None else answer[0]

    def store(self, chunks: Sequence[bytes], request: Request | None = None) -> list[bytes]:
        """Store chunks, copies included, and answer what was evicted for them."""
        request = request or self.request()
        answer = self.manager.prepare_store(chunks, request)
        assert answer is not None, "the store was refused"
        taken, _, evicted = answer
        self.manager.complete_store(taken, request)
        return evicted

    def store_and_finish(self, chunks: Sequence[bytes]) -> None:
        """A whole request that stores chunks and ends."""
        request = self.request()
        self.store(chunks, request)
        self.manager.finish_request(request)

    def read_and_finish(self, chunks: Sequence[bytes]) -> None:
        """A whole request that loads chunks and ends."""
        request = self.request()
        self.manager.prepare_load(chunks, request)
        self.manager.complete_load(chunks, request)
        self.manager.finish_request(request)

    def victims(self, n: int) -> list[bytes]:
        """What goes, in order, when n new chunks are stored one by one."""
        gone = []
        for _ in range(n):
            self._fillers = getattr(self, "_fillers", 0) + 1
            gone += self.store([key(f"filler-{self._fillers}")])
        return gone

    def answers(self, chunks: Iterable[bytes]) -> list[object]:
        """What lookups answer."""
        return [self.manager.lookup(chunk) for chunk in chunks]

    def state(self) -> dict[str, Any]:
        """The whole state."""
        return self.manager.debug_state()

    def pins(self, chunk: bytes) -> int:
        """Reads in progress of a chunk."""
        pins: int = self.state()["keys"][chunk][2]
        return pins

    def figure(self, name: str) -> int:
        """One of the manager's figures."""
        return self.manager.stats()[name]

    def assert_idle(self) -> None:
        """Nothing is pinned or being written, and no slot is lost."""
        stats = self.manager.stats()
        assert stats["pinned"] == stats["writing"] == 0, stats
        assert stats["free"] + stats["ready"] == stats["slots"] == self.slots, stats
        assert stats["evictable"] == stats["ready"], stats
        used = [slot for slot, _, _ in self.state()["keys"].values()]
        assert len(set(used)) == len(used) == stats["ready"]
        assert all(0 <= slot < self.slots for slot in used)


def slot_numbers(slots: bytes) -> list[int]:
    """The slots in an answer of the manager."""
    return list(memoryview(slots).cast("i"))
