"""Kernels that leave no room for the staging kernel: copies go on by the copy engine alone."""

from __future__ import annotations

from typing import Any

import gpu_kit
import pytest
from gpu_kit import Rig

pytestmark = pytest.mark.gpu

#: Fills every multiprocessor: all of its shared memory, for as long as it is told.
HOG = r"""
extern "C" __global__ void hog(long long nanoseconds) {
    extern __shared__ char memory[];
    memory[threadIdx.x] = 1;
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < nanoseconds);
}
"""
BLOCKS = range(0, 2000, 2)
TARGET = range(1, 2001, 2)
SLOTS = range(1000)


class Hog:
    """A kernel that occupies the GPU, on a stream of its own."""

    def __init__(self) -> None:
        cupy = pytest.importorskip("cupy")
        self.cupy = cupy
        self.kernel = cupy.RawKernel(HOG, "hog")
        facts = cupy.cuda.runtime.getDeviceProperties(0)
        self.shared = facts["sharedMemPerBlockOptin"]
        self.count = facts["multiProcessorCount"]
        self.kernel.max_dynamic_shared_size_bytes = self.shared
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.run(0.001)
        self.stream.synchronize()

    def run(self, seconds: float) -> None:
        """Starts it."""
        nanoseconds = self.cupy.int64(int(seconds * 1e9))
        with self.stream:
            self.kernel((self.count,), (1024,), (nanoseconds,), shared_mem=self.shared)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return bool(self.stream.done)


def run_beside(hog: Hog, path: str) -> tuple[bool, dict[str, int]]:
    """A store and a load beside a kernel of 400 ms: whether they ended before it, and counters."""
    with Rig([[65536] * 2], blocks=2001, slots=1000, path=path, model=False, faults=None) as rig:
        for tensor in rig.tensors:
            tensor.random_()
        gpu_kit.synchronize()
        rig.done(rig.store(BLOCKS, SLOTS))
        hog.run(0.4)
        rig.done(rig.store(BLOCKS, SLOTS))
        rig.done(rig.load(SLOTS, TARGET))
        early = not hog.is_done
        stats: dict[str, Any] = rig.core.stats()
        hog.stream.synchronize()
        assert rig.same(BLOCKS, TARGET)
        return early, stats


def test_copies_do_not_wait_for_a_kernel_that_leaves_no_room() -> None:
    early, stats = run_beside(Hog(), "auto")
    assert early
    assert stats["switched_pieces"] > 0 or stats["staged_jobs"] == 0


def test_control_on_the_staged_path_alone() -> None:
    early, stats = run_beside(Hog(), "staged")
    assert not early
    assert stats["switched_pieces"] == 0
