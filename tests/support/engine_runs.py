"""What a test asks of the real engine, and what it gets back; shared by tests and fixtures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class EngineRun:
    """What the real engine did with one workload."""

    outputs: dict[str, list[int]]
    cached: dict[str, int]
    metrics: dict[str, float]
    pool: dict[str, int] | None
    start_seconds: float
    serve_seconds: float

    def differs_from(self, other: EngineRun) -> list[str]:
        """The requests that were answered differently."""
        assert self.outputs.keys() == other.outputs.keys()
        return [name for name, tokens in self.outputs.items() if tokens != other.outputs[name]]


@dataclass(frozen=True)
class EngineCase:
    """What to run; see ``support/engine_case.py``. Everything but ``extra`` makes the reference."""

    workload: str
    model: str = "full"
    own_process: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


# Serves a case with an offloading configuration, or without one (None: the reference).
RunEngine = Callable[[EngineCase, dict[str, Any] | None], EngineRun]
