"""What an engine does with its offloading worker, seen from this process.

Wraps the worker that vLLM's connector makes, whoever it belongs to, so that every backend is
measured in the same way.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

RUNNERS = {1: "vllm.v1.worker.gpu_model_runner", 2: "vllm.v1.worker.gpu.model_runner"}


@dataclass
class Job:
    """One transfer.

    Attributes:
        store: from the GPU to the host.
        submitted: clock when the submit call began, in seconds.
        submit_s: seconds that the submit call took.
        finished: clock when the engine was told that it is over.
        size: bytes.
        event_s: seconds by the worker's own clock, which are CUDA events on a GPU.
    """

    store: bool
    submitted: float
    submit_s: float
    finished: float = 0.0
    size: int = 0
    event_s: float = 0.0


class Watch:
    """Follows the worker of one engine. Make and `install` it before the engine."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.worker_s: float | None = None
        self.layout: dict[str, Any] | None = None
        self.preemptions = 0
        self.failures = 0
        self.captures: list[dict[str, float]] = []
        self._tensors: list[Any] = []
        self._open: dict[int, Job] = {}
        self._done: list[Job] = []

    def install(self, runner: int) -> None:
        """Wraps vLLM's connector, scheduler and model runner.

        Args:
            runner: 1 or 2, the version of the model runner.
        """
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as connector
        from vllm.v1.core.sched.scheduler import Scheduler

        make = connector.OffloadingConnectorWorker._init_worker

        def init_worker(this: Any, kv_caches: Any) -> None:
            begin = time.perf_counter()
            make(this, kv_caches)
            self.worker_s = time.perf_counter() - begin
            self._tensors = [canonical.tensor for canonical in kv_caches.tensors]
            self.layout = layout_of(kv_caches)
            self._follow(this.worker)

        connector.OffloadingConnectorWorker._init_worker = init_worker
        preempt = Scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        Scheduler._preempt_request = count
        self._follow_captures(RUNNERS[runner])

    def stats(self) -> dict[str, int]:
        """Our worker's counters; empty for another backend."""
        transfers = getattr(self.worker, "transfers", None)
        return dict(transfers.stats()) if transfers is not None else {}

    def describe(self) -> str | None:
        """Our worker's line about how it copies; None for another backend."""
        core = getattr(getattr(self.worker, "transfers", None), "_core", None)
        return str(core.describe()) if core is not None else None

    def wait_registered(self, limit_s: float = 120.0) -> float:
        """Waits until our worker's region is registered; returns the seconds it took."""
        begin = time.monotonic()
        while time.monotonic() < begin + limit_s:
            stats = self.stats()
            if stats.get("registered_bytes", 0) >= stats.get("region_bytes", 0):
                break
            time.sleep(0.02)
        return time.monotonic() - begin

    def scrub(self) -> None:
        """Overwrites the whole KV cache, so that nothing can be read from it by chance."""
        import torch

        with torch.inference_mode():
            for tensor in self._tensors:
                tensor.fill_(63)  # 0.75 in bf16
        if self._tensors and self._tensors[0].is_cuda:
            torch.cuda.synchronize()

    def take(self) -> list[Job]:
        """The jobs that have ended since the last call."""
        done, self._done = self._done, []
        return done

    def _follow(self, worker: Any) -> None:
        self.worker = worker
        self._follow_transfers(getattr(worker, "transfers", None))
        store, load, finished = worker.submit_store, worker.submit_load, worker.get_finished

        def submit(is_store: bool, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(job_id: int, *args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                self._open[job_id] = job = Job(is_store, begin, 0.0)
                answer = call(job_id, *args, **kwargs)
                job.submit_s = time.perf_counter() - begin
                return answer

            return wrapped

        def get_finished() -> Any:
            results = finished()
            now = time.perf_counter()
            for result in results:
                job = self._open.pop(result.job_id)
                job.finished = now
                job.size = int(result.transfer_size or 0)
                job.event_s = float(result.transfer_time or 0.0)
                self._done.append(job)
            return results

        worker.submit_store, worker.submit_load = submit(True, store), submit(False, load)
        worker.get_finished = get_finished

    def _follow_transfers(self, transfers: Any) -> None:
        """Our connector calls the copies themselves, not the worker in front of them."""
        if not hasattr(transfers, "start_load"):
            return
        store, load, outcomes = transfers.start_store, transfers.start_load, transfers.outcomes

        def start(is_store: bool, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(job_id: int, *args: Any) -> None:
                begin = time.perf_counter()
                self._open[job_id] = job = Job(is_store, begin, 0.0)
                call(job_id, *args)
                job.submit_s = time.perf_counter() - begin

            return wrapped

        def take() -> Any:
            results = outcomes()
            now = time.perf_counter()
            for job_id, _, size, seconds, error in results:
                job = self._open.pop(job_id)
                job.finished, job.size, job.event_s = now, int(size), float(seconds)
                if error is None:
                    self._done.append(job)
                else:
                    self.failures += 1
            return results

        transfers.start_store, transfers.start_load = start(True, store), start(False, load)
        transfers.outcomes = take

    def _follow_captures(self, module: str) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        runner = importlib.import_module(module).GPUModelRunner
        capture = getattr(runner, "capture_model", None)
        if capture is None:  # nothing else depends on it
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, before = time.perf_counter(), self.stats()
            answer = capture(*args, **kwargs)
            after = self.stats()
            self.captures.append(
                {
                    "seconds": round(time.perf_counter() - begin, 3),
                    "registered_before": before.get("registered_bytes", 0),
                    "registered_after": after.get("registered_bytes", 0),
                    "region_bytes": after.get("region_bytes", 0),
                }
            )
            return answer

        runner.capture_model = timed


def layout_of(kv_caches: Any) -> dict[str, Any]:
    """How the KV cache is laid out: tensors, and the fragments of one block."""
    fragments = [[ref.page_size_bytes for ref in refs] for refs in kv_caches.group_data_refs]
    return {
        "tensors": len(kv_caches.tensors),
        "blocks": int(kv_caches.tensors[0].tensor.shape[0]),
        "fragments_a_block": [len(sizes) for sizes in fragments],
        "fragment_bytes": sorted({size for sizes in fragments for size in sizes}),
    }


def summary(jobs: Sequence[Job], *, store: bool, one_dma: float | None = None) -> dict[str, Any]:
    """Totals of one direction.

    Args:
        jobs: transfers.
        store: which direction.
        one_dma: bytes per second of one large copy in this direction.

    Returns:
        `event_ms` adds up the jobs' own times, which overlap where jobs queue; `wall_ms` is from
        the first submit until the engine knew of the last end; `dma_ms` is bytes / `one_dma`.
    """
    chosen = [job for job in jobs if job.store == store]
    if not chosen:
        return {"jobs": 0, "bytes": 0}
    size = sum(job.size for job in chosen)
    event = sum(job.event_s for job in chosen)
    wall = max(job.finished for job in chosen) - min(job.submitted for job in chosen)
    answer: dict[str, Any] = {
        "jobs": len(chosen),
        "bytes": size,
        "event_ms": round(event * 1e3, 3),
        "wall_ms": round(wall * 1e3, 3),
        "submit_ms": round(max(job.submit_s for job in chosen) * 1e3, 3),
        "event_gb_per_s": round(size / event / 1e9, 2) if event else None,
        "wall_gb_per_s": round(size / wall / 1e9, 2) if wall else None,
    }
    if one_dma:
        answer["dma_ms"] = round(size / one_dma * 1e3, 3)
    return answer


def one_dma_rates(mib: int = 512) -> dict[str, float] | None:
    """Bytes per second of one large copy from and to pinned memory; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, target, source in (("d2h", host, device), ("h2d", device, host)):
        times = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        rates[name] = (mib << 20) / statistics.median(times[1:])
    del host, device
    torch.cuda.empty_cache()
    return rates
