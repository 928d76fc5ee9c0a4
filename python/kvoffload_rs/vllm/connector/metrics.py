"""Counters for vLLM's log line and for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvoffload_rs.vllm.connector.messages import Reports

#: Gauges: the newest value counts. Everything else is a count since the engine's start.
_GAUGES = {
    "slots": "Host slots.",
    "free": "Host slots that hold nothing.",
    "ready": "Chunks in host memory that can be loaded.",
    "writing": "Chunks being stored.",
    "pinned": "Chunks being loaded.",
}


@dataclass
class KvOffloadStats(KVConnectorStats):
    """Counts since the engine's start, as one flat dictionary of numbers."""

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def since(cls, data: dict[str, Any], moved: Reports) -> KvOffloadStats:
        """The state of all counters.

        Args:
            data: of `_core.Requests.metrics`; it is kept and added to.
            moved: copies since the last call; these are differences.
        """
        for name, copies in (("store", moved.stored), ("load", moved.loaded)):
            data[f"moved_{name}_bytes"] = copies.bytes
            data[f"moved_{name}_seconds"] = copies.seconds
            data[f"moved_{name}_jobs"] = copies.jobs
        return cls(data)

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The later of two: its counts include the earlier one's, but for the copies."""
        merged = dict(other.data)
        for name, value in self.data.items():
            if name.startswith("moved_"):
                merged[name] = merged.get(name, 0) + value
        return type(self)(merged)

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows."""
        data = self.data
        if not data:
            return {}
        shown: dict[str, int | float] = {
            "hit tokens": data["tokens_hit"],
            "asked tokens": data["tokens_asked"],
            "chunks on the host": data["pool_ready"],
            "slots": data["pool_slots"],
            "failed loads": data["loads_failed"],
            "failed stores": data["stores_failed"],
        }
        for name in ("store", "load"):
            seconds = data.get(f"moved_{name}_seconds", 0)
            if seconds:
                rate = data[f"moved_{name}_bytes"] / seconds / 1e9
                shown[f"{name} GB/s"] = round(rate, 2)
        return shown

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class KvOffloadPromMetrics(KVConnectorPromMetrics):
    """The same counters as Prometheus metrics named `vllm:kvoffload_*`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, dict[int, Any]] = {}
        self._last: dict[tuple[str, int], float] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes over the state of all counters."""
        for name, value in transfer_stats_data.items():
            short = name.removeprefix("pool_")
            if name.startswith("pool_") and short in _GAUGES:
                self._metric(name, _GAUGES[short], gauge=True)[engine_idx].set(value)
                continue
            metric = self._metric(name, f"kvoffload: {name.replace('_', ' ')}.", gauge=False)
            if name.startswith("moved_"):
                metric[engine_idx].inc(value)
                continue
            before = self._last.get((name, engine_idx), 0)
            self._last[name, engine_idx] = value
            # A counter that went back is another engine's, which started anew.
            metric[engine_idx].inc(value - before if value >= before else value)

    def _metric(self, name: str, text: str, *, gauge: bool) -> dict[int, Any]:
        if name not in self._metrics:
            kind = self._gauge_cls if gauge else self._counter_cls
            more: dict[str, Any] = {"multiprocess_mode": "mostrecent"} if gauge else {}
            metric: Any = kind(
                name=f"vllm:kvoffload_{name}",
                documentation=text,
                labelnames=self._labelnames,
                **more,
            )
            self._metrics[name] = {
                engine: metric.labels(*labels)
                for engine, labels in self.per_engine_labelvalues.items()
            }
        return self._metrics[name]
