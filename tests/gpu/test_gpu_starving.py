"""Kernels that leave no room for the staging kernel: copies go on by the copy engine alone."""

from __future__ import annotations

import time

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
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""
BLOCKS, SLOTS = 2048, 1024
#: The first job of each direction finds nothing amiss, and waits for the kernel.
FIRST = range(64)
OTHERS = range(128, 960)


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


def upper(blocks: range) -> range:
    """Blocks of the upper half."""
    return range(blocks.start + 1024, blocks.stop + 1024)


def beside(hog: Hog, rig: Rig) -> bool:
    """Stores and loads beside a kernel of 600 ms; whether all but the first ended before it."""
    rig.done(rig.store(range(1000), range(1000)))
    rig.check()
    hog.run(0.6)
    first = [rig.store(FIRST, upper_slots(FIRST)), rig.load(range(128), upper(range(128)))]
    time.sleep(0.02)  # by now they are seen to starve
    others = [
        rig.store(OTHERS, OTHERS),
        rig.load(OTHERS, upper(OTHERS)),
    ]
    rig.core.wait(others, None)
    early = not hog.is_done
    hog.stream.synchronize()
    rig.done(*first, *others)
    rig.check()
    return early


def upper_slots(chunks: range) -> range:
    """Slots that nothing else uses here."""
    return range(chunks.start + 960, chunks.stop + 960)


def make(path: str) -> Rig:
    """Fragments of 8 KiB: the staged path is much the faster one."""
    return Rig([[8192] * 16], blocks=BLOCKS, slots=SLOTS, path=path)


def test_copies_do_not_wait_for_a_kernel_that_leaves_no_room() -> None:
    with make("auto") as rig:
        assert beside(Hog(), rig)
        stats = rig.core.stats()
        assert stats["staged_jobs"] >= 2 and stats["switched_pieces"] > 0
        # Stores stay with the copy engine for a while after kernels come through again; then they
        # are staged again.
        for wait, is_staged in ((0.05, False), (2.5, True)):
            rig.done(rig.store(range(960), range(960)))
            time.sleep(wait)
            before = rig.core.stats()["switched_pieces"]
            rig.done(rig.store(range(960), range(960)))
            rig.check()
            assert (rig.core.stats()["switched_pieces"] == before) == is_staged


def test_control_on_the_staged_path_alone() -> None:
    with make("staged") as rig:
        assert not beside(Hog(), rig)
        assert rig.core.stats()["switched_pieces"] == 0


def clones_see_the_load(**faults: object) -> bool:
    """A load that goes both ways; whether what a stream reads after waiting for it is loaded."""
    hog = Hog()
    with Rig([[8192] * 16], blocks=BLOCKS, slots=SLOTS, path="auto", faults=faults or None) as rig:
        rig.done(rig.store(range(960), range(960)))
        hog.run(0.5)
        job = rig.load(range(960), upper(range(960)))
        deadline = time.monotonic() + 0.3
        while not rig.core.stats()["switched_pieces"] and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)  # by now the rest is in the queues, or done
        assert rig.core.stats()["switched_pieces"] and not hog.is_done
        rig.core.wait([job], gpu_kit.current_stream())
        seen = [tensor[1024 : 1024 + 960].clone() for tensor in rig.tensors]
        rig.done(job)
        rig.check()
        wanted = [tensor[:960] for tensor in rig.tensors]
        return all(bool((a == b).all()) for a, b in zip(seen, wanted, strict=True))


def test_a_stream_waits_for_both_ways_of_a_job() -> None:
    assert clones_see_the_load()


def test_control_with_a_stream_that_does_not_wait() -> None:
    assert not clones_see_the_load(skip_stream_wait=1)


def test_a_small_ring(path: str) -> None:
    """Pieces of the direct way are longer than what a small ring stages."""
    hog = Hog()
    with Rig([[8192] * 4], blocks=BLOCKS, slots=SLOTS, path=path, staging_bytes=2 << 20) as rig:
        hog.run(0.1)
        rig.done(rig.store(range(1000), range(1000)))
        rig.done(rig.load(range(1000), range(1024, 2024)))
        rig.check()
