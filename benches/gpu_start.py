"""How a CUDA worker starts, what a submit costs, and whether anything grows: one JSON object.

python benches/gpu_start.py [--gib 40] [--submits 5000] [--minutes 0] [--path auto]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvoffload_rs import _core

LAYERS = 32
DEADLINE_S = 300.0


def current_stream() -> int:
    """The handle of torch's stream, as the package's workers ask for it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(0) if raw else torch.cuda.current_stream().cuda_stream)


class Worker:
    """A `CudaWorker` over random tensors, one a layer, all with pages of the same size."""

    def __init__(self, page: int, blocks: int, slots: int, path: str) -> None:
        self.page, self.blocks, self.slots = page, blocks, slots
        self.tensors = [
            torch.empty((blocks, page), dtype=torch.uint8, device="cuda").random_()
            for _ in range(LAYERS)
        ]
        torch.cuda.synchronize()
        groups = [[(layer, page) for layer in range(LAYERS)]]
        core: Any = _core
        begin = time.perf_counter()
        self.core = core.CudaWorker(
            [(tensor.data_ptr(), blocks, page, page) for tensor in self.tensors],
            groups,
            device=0,
            blocks_per_chunk=1,
            num_slots=slots,
            slot_bytes=core.slot_bytes(groups, 1),
            keep_alive=self.tensors,
            copy_path=path,
        )
        self.made = time.perf_counter()
        self.constructor_s = self.made - begin
        self._job = 0

    @property
    def registered(self) -> bool:
        """Whether the driver has the whole region."""
        stats = self.core.stats()
        return bool(stats["registered_bytes"] >= stats["region_bytes"])

    def wait_registered(self) -> None:
        """Wait until it has."""
        while not self.registered:
            time.sleep(0.002)

    def store(self, blocks: np.ndarray, slots: np.ndarray) -> int:
        """Submit a store behind torch's current stream."""
        self._job += 1
        stream = current_stream()
        self.core.submit_store(self._job, blocks, [len(blocks)], [0], slots, stream)
        return self._job

    def load(self, slots: np.ndarray, blocks: np.ndarray) -> int:
        """Submit a load behind torch's current stream."""
        self._job += 1
        stream = current_stream()
        self.core.submit_load(self._job, slots, blocks, [len(blocks)], [0], stream)
        return self._job

    def finish(self, *jobs: int) -> None:
        """Poll until jobs are over; a failure raises."""
        missing = set(jobs)
        deadline = time.monotonic() + DEADLINE_S
        while missing:
            missing -= {job for job, *_ in self.core.take_finished()}
            if time.monotonic() > deadline:
                raise SystemExit(f"jobs {sorted(missing)[:5]} did not end")

    def same(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether blocks have the same bytes."""
        torch.cuda.synchronize()
        a, b = (torch.from_numpy(ids.astype(np.int64)).cuda() for ids in (source, target))
        return all(bool(torch.equal(tensor[a], tensor[b])) for tensor in self.tensors)


def ids(numbers: Any) -> np.ndarray:
    """Block or slot numbers as the worker takes them."""
    return np.asarray(numbers, dtype=np.int32)


def decode_gaps(until: Any) -> dict[str, float]:
    """A loop like a decode step, one small kernel and its end, until something is so.

    Longest and median time between two iterations, in milliseconds.
    """
    values = torch.zeros(1024, device="cuda")
    stream = torch.cuda.current_stream()
    values += 1  # what the first launch of a kernel loads does not count
    stream.synchronize()
    gaps: list[float] = []
    last = time.perf_counter()
    while not until():
        values += 1
        stream.synchronize()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    if not gaps:
        return {"iterations": 0, "longest_ms": 0.0, "median_ms": 0.0}
    return {
        "iterations": len(gaps),
        "longest_ms": round(max(gaps) * 1e3, 3),
        "over_10_ms": sum(gap > 0.01 for gap in gaps),
        "median_ms": round(statistics.median(gaps) * 1e3, 4),
    }


def decode_beside_touching(gib: int) -> dict[str, float]:
    """The loop beside a thread that touches new memory and never calls the driver.

    What it shows belongs to the machine: new memory is not free on a virtual one.
    """
    size = gib << 30
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    thread = threading.Thread(target=ctypes.memset, args=(address, 1, size))
    thread.start()
    gaps = decode_gaps(lambda: not thread.is_alive())
    thread.join()
    return gaps  # the mapping goes with its last user


def measure_start(gib: int, path: str) -> dict[str, Any]:
    """From the constructor to a registered region, with a job at once and a decode loop beside."""
    page, count = 65536, 32  # 64 MiB a job
    worker = Worker(page, 1024, (gib << 30) // (page * LAYERS), path)
    blocks, target = ids(range(0, 2 * count, 2)), ids(range(501, 501 + 2 * count, 2))
    # The last ones, which the thread that registers gets to last; adjacent, as the pool gives them.
    slots = ids(worker.slots - 1 - np.arange(count))
    begin = time.perf_counter()
    job = worker.store(blocks, slots)
    submitted = time.perf_counter()
    worker.core.wait([job], torch.cuda.current_stream().cuda_stream)
    waited = time.perf_counter()
    worker.finish(job)
    stored = time.perf_counter()
    was_registered = worker.registered
    worker.finish(worker.load(slots, target))
    loaded = time.perf_counter()
    right = worker.same(blocks, target)
    beside = decode_gaps(lambda: worker.registered)
    registered = time.perf_counter() - worker.made
    end = time.monotonic() + 2
    after = decode_gaps(lambda: time.monotonic() > end)
    begin_again = time.perf_counter()
    worker.finish(worker.store(blocks, slots))
    again = time.perf_counter() - begin_again
    answer = {
        "region_gib": gib,
        "constructor_s": round(worker.constructor_s, 4),
        "registered_after_s": round(registered, 3),
        "first_store_submit_us": round((submitted - begin) * 1e6, 1),
        "first_store_wait_ms": round((waited - submitted) * 1e3, 3),
        "first_store_ms": round((stored - begin) * 1e3, 3),
        "first_load_ms": round((loaded - stored) * 1e3, 3),
        "first_bytes_right": right,
        "region_was_registered_at_first_store": was_registered,
        "store_when_registered_ms": round(again * 1e3, 3),
        "decode_while_registering": beside,
        "decode_afterwards": after,
        "decode_beside_touching_only": decode_beside_touching(min(gib, 16)),
        "longest_register_call_ms": worker.core.stats()["longest_register_us"] / 1e3,
        "longest_touch_call_ms": worker.core.stats()["longest_touch_us"] / 1e3,
        "calibration": worker.core.calibration(),
    }
    worker.core.shutdown()
    return answer


def measure_submits(count: int, path: str) -> dict[str, Any]:
    """Time of the submit call: 4,096 random blocks of 32 layers, of 131,072 blocks."""
    page, blocks, per_job = 128, 131_072, 4096
    worker = Worker(page, blocks, 4 * per_job, path)
    worker.wait_registered()
    rng = np.random.default_rng(1)
    some_blocks = [ids(rng.choice(blocks, per_job, replace=False)) for _ in range(32)]
    some_slots = [ids(rng.choice(worker.slots, per_job, replace=False)) for _ in range(31)]
    times: list[float] = []
    for number in range(count + 20):
        numbers, slots = some_blocks[number % 32], some_slots[number % 31]
        if number < 20:  # every slot is stored to once
            slots = ids(np.arange(per_job) + number % 4 * per_job)
        begin = time.perf_counter()
        job = worker.load(slots, numbers) if number >= 20 and number % 2 else None
        job = job or worker.store(numbers, slots)
        taken = time.perf_counter() - begin
        worker.finish(job)
        if number >= 20:
            times.append(taken * 1e6)
    worker.core.shutdown()
    times.sort()
    return {
        "submits": len(times),
        "fragments_a_job": per_job * LAYERS,
        "median_us": round(statistics.median(times), 2),
        "p999_us": round(times[min(len(times) - 1, int(len(times) * 0.999))], 2),
        "longest_us": round(times[-1], 2),
    }


def usage() -> dict[str, int]:
    """What this process holds: memory in KiB, GPU memory that is free, descriptors, threads."""
    status = Path("/proc/self/status").read_text().splitlines()
    memory = {
        name: int(line.split()[1])
        for line in status
        for name in ("VmRSS", "RssAnon")
        if line.startswith(f"{name}:")
    }
    return {
        "rss_kib": memory["VmRSS"],
        "anonymous_kib": memory.get("RssAnon", 0),
        "gpu_free_bytes": torch.cuda.mem_get_info()[0],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def soak(minutes: float, path: str) -> dict[str, Any]:
    """Mixed jobs of many sizes, several in flight, and what the process holds before and after."""
    worker = Worker(4096, 16_384, 8192, path)
    worker.wait_registered()
    rng = random.Random(1)
    worker.finish(worker.store(ids(range(8192)), ids(range(8192))))
    jobs = moved = 0

    def run(seconds: float) -> None:
        nonlocal jobs, moved
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            batch: list[int] = []
            for _ in range(8):
                count = rng.choice([1, 3, 16, 100, 1000, 4096])
                blocks = ids(rng.sample(range(worker.blocks), count))
                slots = ids(rng.sample(range(worker.slots), count))
                store = rng.random() < 0.5
                batch.append(worker.store(blocks, slots) if store else worker.load(slots, blocks))
                moved += count * worker.page * LAYERS
            worker.finish(*batch)
            jobs += len(batch)

    run(min(10.0, minutes * 6))
    before = usage()
    jobs = moved = 0
    run(minutes * 60)
    after = usage()
    stats = worker.core.stats()
    worker.core.shutdown()
    grown = {name: after[name] - before[name] for name in before}
    return {
        "minutes": minutes,
        "jobs": jobs,
        "bytes": moved,
        "before": before,
        "after": after,
        "grown": grown,
        "stats": stats,
    }


def main() -> int:
    """Run the measurements that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=40, help="GiB of the region (40; 0: skip)")
    parser.add_argument("--submits", type=int, default=5000, help="timed submits (5000; 0: skip)")
    parser.add_argument("--minutes", type=float, default=0, help="minutes of mixed jobs (0: skip)")
    parser.add_argument("--path", default="auto", choices=("auto", "direct", "staged"))
    options = parser.parse_args()
    if not torch.cuda.is_available() or not hasattr(_core, "CudaWorker"):
        print("this needs a GPU, torch with CUDA and the CUDA backend", file=sys.stderr)
        return 2
    torch.zeros(1, device="cuda")
    answer: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "path": options.path}
    if options.gib:
        answer["start"] = measure_start(options.gib, options.path)
        print(json.dumps(answer["start"]), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    if options.submits:
        answer["submit"] = measure_submits(options.submits, options.path)
        print(json.dumps(answer["submit"]), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    if options.minutes:
        answer["soak"] = soak(options.minutes, options.path)
    print(json.dumps(answer))
    return 0 if answer.get("start", {}).get("first_bytes_right", True) else 1


if __name__ == "__main__":
    raise SystemExit(main())
