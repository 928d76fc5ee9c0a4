"""A GPU made of ordinary memory: torch without CUDA, and a CUDA worker that is a host worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from kvoffload_rs import _core
from kvoffload_rs.cli.bench.device import Device


class FakeStream:
    cuda_stream = 7

    def synchronize(self) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return time.perf_counter() > self.at + 0.002

    def elapsed_time(self, other: FakeEvent) -> float:
        return max(1e-3, (other.at - self.at) * 1e3)


class FakeCuda:
    Stream = FakeStream
    Event = FakeEvent

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus

    def is_available(self) -> bool:
        return self.gpus > 0

    def device_count(self) -> int:
        return self.gpus

    def get_device_name(self, index: int) -> str:
        return f"pretended GPU {index}"

    def synchronize(self) -> None: ...

    def current_stream(self) -> FakeStream:
        return FakeStream()

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        yield

    stream = device


class FakeTorch:
    """torch, whose GPU tensors are CPU tensors."""

    def __init__(self, gpus: int = 1) -> None:
        self.cuda = FakeCuda(gpus)

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("empty", "zeros", "randn", "tensor"):
            return found

        def make(*arguments: Any, **options: Any) -> Any:
            options.pop("device", None)
            options.pop("pin_memory", None)
            return found(*arguments, **options)

        return make


class FakeWorker:
    """The CUDA worker's calls on a host worker."""

    def __init__(self, *layout: Any, device: int, copy_path: str, **options: Any) -> None:
        self.host = _core.HostWorker(*layout, **options)
        self.left = 3  # calls of `stats` until the pool is registered

    def submit_store(self, *arguments: Any) -> None:
        *rest, stream = arguments
        assert stream == FakeStream.cuda_stream
        self.host.submit_store(*rest)

    def submit_load(self, *arguments: Any) -> None:
        *rest, stream = arguments
        assert stream == FakeStream.cuda_stream
        self.host.submit_load(*rest)

    def take_finished(self) -> list[tuple[int, bool, int, float]]:
        return self.host.take_finished()

    def stats(self) -> dict[str, int]:
        self.left -= 1
        return {"region_bytes": 10, "registered_bytes": 10 if self.left <= 0 else 5}

    def shutdown(self) -> object:
        return self.host.shutdown()


class FakeCore:
    """The compiled module with a CUDA backend."""

    def __init__(self, reason: str | None = None, **faults: object) -> None:
        self.reason = reason
        self.faults = faults
        self.workers: list[FakeWorker] = []

    slot_bytes = staticmethod(_core.slot_bytes)

    def cuda_available(self) -> bool:
        return self.reason is None

    def cuda_unavailable_reason(self) -> str | None:
        return self.reason

    def CudaWorker(self, *arguments: Any, **options: Any) -> FakeWorker:
        self.workers.append(FakeWorker(*arguments, **options, faults=self.faults or None))
        return self.workers[-1]


def fake_device(**faults: object) -> Device:
    return Device(FakeTorch(), FakeCore(**faults), 0)
