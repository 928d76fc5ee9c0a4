"""A GPU made of ordinary memory: torch without CUDA, and a CUDA worker that is a host worker."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace
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


class FakeVllm:
    """The modules of vLLM that the benchmark uses, copying at once and on the calling thread."""

    __version__ = "0.26.0"

    def __init__(self, fails: str | None = None, wrong: bool = False) -> None:
        self.fails = fails
        self.wrong = wrong
        self.ids: list[list[int]] = []

    @staticmethod
    def CanonicalKVCacheRef(tensor_idx: int, page_size_bytes: int) -> tuple[int, int]:
        return tensor_idx, page_size_bytes

    def CPULoadStoreSpec(self, block_ids: list[int]) -> list[int]:
        return block_ids

    def GPULoadStoreSpec(
        self, block_ids: list[int], group_sizes: list[int], block_indices: list[int]
    ) -> list[int]:
        assert group_sizes == [len(block_ids)] and block_indices == [0]
        self.ids.append(block_ids)
        return block_ids

    def SingleDirectionOffloadingHandler(
        self, gpu: list[Any], cpu: list[Any], per_chunk: int, refs: Any, to_cpu: bool
    ) -> FakeHandler:
        if self.fails:
            raise TypeError(self.fails)
        assert per_chunk == 1 and len(refs) == 1 and len(refs[0]) == len(gpu) == len(cpu)
        assert all(a.dtype == b.dtype == torch.int8 for a, b in zip(gpu, cpu, strict=True))
        if to_cpu:
            return FakeHandler((gpu, cpu), kernel=False)
        return FakeHandler((cpu, gpu), kernel=True, wrong=self.wrong)


class FakeHandler:
    def __init__(self, sides: tuple[Any, Any], kernel: bool, wrong: bool = False) -> None:
        self._sides = sides
        self._wrong = wrong
        self._done: list[Any] = []
        self._swap_blocks_batch = functools.partial(print) if kernel else print

    def transfer_async(self, job: int, source: list[int], target: list[int]) -> bool:
        for mine, theirs in zip(*self._sides, strict=True):
            theirs[target] = mine[source[::-1] if self._wrong else source]
        size = len(source) * sum(tensor.shape[1] for tensor in self._sides[0])
        self._done.append(SimpleNamespace(job_id=job, transfer_size=size, transfer_time=1e-3))
        return True

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        self._sides[0].clear()
        self._sides[1].clear()


def fake_device(**faults: object) -> Device:
    return Device(FakeTorch(), FakeCore(**faults), 0)
