"""What the oracle's driver drives: managers behind one interface, and their requests and jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

if TYPE_CHECKING:
    from oracle_driver import Driver

State = dict[str, Any]


class Divergence(AssertionError):
    """The two managers answered differently."""


@dataclass(frozen=True)
class Setup:
    """One configuration of the two managers and of the traffic that they see."""

    policy: str
    slots: int
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    groups: tuple[int, ...] = (0,)
    hash_bytes: tuple[int, ...] = (4,)
    events: bool = True
    live_requests: int = 6
    max_chunks: int = 8

    def __str__(self) -> str:
        threshold = f"-t{self.store_threshold}" if self.store_threshold else ""
        events = "" if self.events else "-quiet"
        return f"{self.policy}-{self.slots}slots-{len(self.groups)}g{threshold}{events}"


class Side(Protocol):
    """A manager with vLLM's interface, and a view of its whole state."""

    manager: Any

    def state(self) -> State:
        """Order of the policy, ghosts, target, and (slot, state, pins) of every key."""

    def check_misuse(self, driver: Driver) -> None:
        """Make calls that vLLM's manager would not survive; they must change nothing."""

    def after_reset(self, driver: Driver) -> None:
        """Called after a reset, before the jobs that it cut off are forgotten."""


class VllmSide:
    """vLLM's own manager."""

    def __init__(self, setup: Setup) -> None:
        self.manager = CPUOffloadingManager(
            num_chunks=setup.slots,
            cache_policy=setup.policy,
            enable_events=setup.events,
            store_threshold=setup.store_threshold,
            max_tracker_size=setup.max_tracker_size,
        )

    def state(self) -> State:
        """The manager's state in the format of our `debug_state()`."""
        policy = self.manager._policy
        if isinstance(policy, LRUCachePolicy):
            chunks = policy.chunks
            resident = {"lru": sorted(chunks, key=policy._ranks.__getitem__)}
            ghosts: dict[str, list[bytes]] = {"b1": [], "b2": []}
            target = None
        else:
            chunks = {**policy.t1, **policy.t2}
            resident = {"t1": list(policy.t1), "t2": list(policy.t2)}
            ghosts = {"b1": list(policy.b1), "b2": list(policy.b2)}
            target = policy.target_t1_size
        keys = {
            key: (chunk.chunk_id, "ready" if chunk.is_ready else "writing", max(chunk.ref_cnt, 0))
            for key, chunk in chunks.items()
        }
        return {"resident": resident, "ghosts": ghosts, "target": target, "keys": keys}

    def check_misuse(self, driver: Driver) -> None:
        """vLLM's manager answers misuse with assertions: nothing to try."""

    def after_reset(self, driver: Driver) -> None:
        """vLLM's scheduler drops the completions of jobs that a reset cut off."""


@dataclass(eq=False, slots=True)
class Request:
    """One request: a context for each side, and its keys per group from head to tail."""

    number: int
    ours: ReqContext
    theirs: ReqContext
    groups: list[list[bytes]]
    resets: int
    announced: bool = False
    refused: list[bytes] | None = None
    finished: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """A transfer in flight: keys that a request stores or loads."""

    request: Request
    keys: list[bytes]
    is_store: bool


@dataclass(slots=True)
class Tally:
    """What a run exercised, so that a test can tell that nothing was left out."""

    operations: int = 0
    hits: int = 0
    misses: int = 0
    later: int = 0
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    failed_stores: int = 0
    loaded: int = 0
    finished: int = 0
    resets: int = 0
    adaptations: int = 0

    def add(self, other: Tally) -> None:
        """Add another run's figures to this one's."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class SlotMap:
    """The slot of every live key of one side, as its store specs told it."""

    slot_of: dict[bytes, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.used.discard(self.slot_of.pop(key))

    def clear(self) -> None:
        self.slot_of.clear()
        self.used.clear()


def block_ids(spec: Any) -> list[int]:
    return [int(slot) for slot in spec.block_ids]


def events(manager: Any) -> list[tuple[list[bytes], bool, object]]:
    return [(list(event.keys), event.removed, event.medium) for event in manager.take_events()]


def rounded(value: Any) -> Any:
    """Figures that two correct ways of computing them may give with different last bits."""
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return round(value, 9) if isinstance(value, float) else value


def show(value: object) -> str:
    """Keys in short hex, collections entry by entry."""
    if isinstance(value, bytes):
        return f"{value[:-4].hex()[:12]}/{int.from_bytes(value[-4:], 'big')}"
    if isinstance(value, list | tuple | set):
        return "[" + " ".join(show(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(k)}: {show(v)}" for k, v in value.items()) + "}"
    return str(value)
