"""What a test asks of the real engine, and what it gets back; shared by tests and fixtures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class EngineRun:
    """What the real engine did with one workload.

    ``pool``, ``connector`` (its counters) and ``left_over`` (what should be nothing in the end, by
    name) are known of an engine in the test's process, the last two with KvOffloadConnector only.
    """

    outputs: dict[str, list[int]]
    cached: dict[str, int]
    aborted_loads: int
    metrics: dict[str, float]
    pool: dict[str, int] | None
    connector: dict[str, int] | None
    left_over: dict[str, int] | None
    async_scheduling: bool
    log: list[str]
    start_seconds: float
    serve_seconds: float

    def differs_from(self, other: EngineRun) -> list[str]:
        """The requests that were answered differently."""
        assert self.outputs.keys() == other.outputs.keys()
        return [name for name, tokens in self.outputs.items() if tokens != other.outputs[name]]


@dataclass(frozen=True)
class EngineCase:
    """What to run; see ``support/engine_case.py``. All of it makes the reference."""

    workload: str
    model: str = "full"
    own_process: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


class RunEngine(Protocol):
    """Serves a case with an offloading configuration, or without one (None: the reference)."""

    def __call__(
        self,
        case: EngineCase,
        extra: dict[str, Any] | None,
        transfer: dict[str, Any] | None = None,
        hook: str | None = None,
        fresh: bool = False,
    ) -> EngineRun:
        """``transfer``: further arguments of KVTransferConfig; ``hook``: see ``engine_case``;
        ``fresh``: in a new process, for what is logged once per process."""
        ...
