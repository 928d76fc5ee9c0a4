"""Bytes go to the host and back, on every path, and nothing else changes."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence

import pytest
from gpu_kit import Rig, makes_rows, run_script

pytestmark = pytest.mark.gpu

MIB = 1 << 20
PAGES = (2, 6, 16, 100, 1000, 4096, 4097, 65536, MIB + 64, 8 * MIB)


def test_the_check_sees_a_single_wrong_byte() -> None:
    """The control of every test below."""
    with Rig([[100, 6]], padding=10) as rig:
        rig.done(rig.store([1, 2], [3, 4]))
        rig.check()
        rig.tensors[1][40, 15] ^= 1  # padding
        with pytest.raises(AssertionError, match="1 wrong bytes, the first in block 40 at 15"):
            rig.check()
        rig.tensors[1][40, 15] ^= 1
        rig.region[5, 0] ^= 1
        if rig.window is not None:
            with pytest.raises(AssertionError, match="slot 5 at 0"):
                rig.check()


@pytest.mark.parametrize("padding", [0, 18])
@pytest.mark.parametrize("page", PAGES)
def test_pages(path: str, page: int, padding: int) -> None:
    """Scattered blocks to scattered slots, and back to other blocks."""
    large = page >= MIB
    blocks, slots = (12, 7) if large else (64, 20)
    rng = random.Random(page)
    with Rig([[page, page]], blocks=blocks, padding=padding, slots=slots, path=path) as rig:
        count = slots - 1
        source = rng.sample(range(blocks), count)
        places = rng.sample(range(slots), count)
        rig.done(rig.store(source, places))
        rig.check()
        order = rng.sample(range(count), min(count, blocks // 2))
        target = rng.sample(range(blocks), len(order))
        rig.done(rig.load([places[at] for at in order], target))
        rig.check()


@pytest.mark.parametrize("per_chunk", [1, 2, 16])
def test_groups_and_partial_chunks(path: str, per_chunk: int) -> None:
    """Chunks that begin or end half-way leave the rest of their slot as it was."""
    pages = [[100, 36], [4096], [6, 6, 6]]
    rng = random.Random(per_chunk)
    with Rig(pages, blocks=200, padding=2, blocks_per_chunk=per_chunk, slots=40, path=path) as rig:
        sizes = [2 * per_chunk + 1, per_chunk, 3]
        indices = [per_chunk - 1, 5 * per_chunk, 7 * per_chunk + per_chunk // 2]
        places = rng.sample(range(40), rig.chunks(sizes, indices))
        # Whole chunks first, so that what must stay is not all zeros.
        counts = [rig.chunks([size], [index]) for size, index in zip(sizes, indices, strict=True)]
        whole = [count * per_chunk for count in counts]
        rig.done(rig.store(_blocks(rng, whole), places, whole, [0, 0, 0]))
        rig.check()
        rig.done(rig.store(_blocks(rng, sizes), places, sizes, indices))
        rig.check()
        rig.done(rig.load(places, _blocks(rng, sizes), sizes, indices))
        rig.check()


def _blocks(rng: random.Random, sizes: Sequence[int]) -> list[int]:
    return [block for size in sizes for block in rng.sample(range(200), size)]


def test_slots_on_both_sides_of_every_piece_border(path: str) -> None:
    """A region of several pieces, filled whole: runs that would cross a border are cut."""
    slots, blocks = 3300, 600
    with Rig([[65536, 33 * 64]], blocks=blocks, slots=slots, path=path) as rig:
        assert slots * rig.slot_bytes > 3 * 64 * MIB
        rig.done(rig.store([slot % blocks for slot in range(slots)], range(slots)))
        rig.check()
        for first in range(0, slots, blocks):
            several = range(first, min(first + blocks, slots))
            rig.done(rig.load(several, [(block * 7) % blocks for block in range(len(several))]))
            rig.check()


def test_a_slot_larger_than_a_piece(path: str) -> None:
    """A piece then holds one slot."""
    with Rig([[8 * MIB] * 9], blocks=4, slots=3, path=path) as rig:
        rig.done(rig.store([3, 0], [0, 2]))
        rig.done(rig.load([2, 0], [1, 2]))
        rig.check()


def test_adjacent_blocks_and_slots(path: str) -> None:
    """What is merged into long copies arrives like the rest."""
    with Rig([[4096]], blocks=3000, slots=1500, path=path) as rig:
        rig.done(rig.store(range(1500), range(1500)))
        rig.check()
        rig.done(rig.load(range(1000), range(1900, 2900)))
        rig.check()
        # Runs with holes, and runs that go down.
        runs = [*range(0, 90), *range(100, 190), *range(299, 199, -1)]
        rig.done(rig.store(runs, runs))
        rig.done(rig.load(runs, [block + 1000 for block in runs]))
        rig.check()


@pytest.mark.parametrize("page", [6, 8192, 65536, 65538])
@pytest.mark.parametrize("padding", [0, 18])
def test_neighbouring_blocks_are_rows_of_one_copy(page: int, padding: int) -> None:
    """Rows end at the pieces of the region, at holes, and where numbers go down."""
    layers, blocks, slots = 8, 1000, 400
    with Rig([[page] * layers], blocks=blocks, padding=padding, slots=slots, path="direct") as rig:
        rig.done(rig.store(range(100, 500), range(slots)))
        rig.check()
        stored = rig.core.stats()["row_copies"]
        assert (stored >= layers) == makes_rows(page)
        rig.done(rig.load(range(slots), range(600, 1000)))
        rig.check()
        assert (rig.core.stats()["row_copies"] >= stored + layers) == makes_rows(page)
        holes = [at for at in range(slots) if at % 50 < 41]
        rig.done(rig.store([at + 3 for at in holes], holes))
        rig.done(rig.load(range(399, 199, -1), range(300, 100, -1)))
        rig.done(rig.load(range(0, 200, 2), range(0, 300, 3)))
        rig.check()
        assert rig.core.stats()["retries"] == 0


@pytest.mark.parametrize("page", [6, 8192, 65536, 65538])
def test_layers_of_one_allocation_are_rows_of_one_copy(page: int) -> None:
    """Scattered blocks to scattered slots."""
    layers, blocks, slots = 32, 300, 100
    rng = random.Random(page)
    with Rig(
        [[page] * layers], blocks=blocks, slots=slots, path="direct", one_allocation=True
    ) as rig:
        places = rng.sample(range(slots), slots)
        rig.done(rig.store(rng.sample(range(blocks), slots), places))
        rig.check()
        rig.done(rig.load(places, rng.sample(range(blocks), slots)))
        rig.check()
        stats = rig.core.stats()
        assert (stats["row_copies"] >= 2 * slots - 8) == makes_rows(page)
        assert stats["retries"] == 0


def test_rows_in_memory_that_torch_maps_piece_by_piece() -> None:
    """Expandable segments: the driver copies rows there, or says that it does not."""
    code = """
        import os
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        import json, random
        from gpu_kit import Rig
        rng = random.Random(1)
        said = []
        for one_allocation in (False, True):
            with Rig([[16384] * 32], blocks=1200, slots=600, path="direct",
                     one_allocation=one_allocation) as rig:
                rig.done(rig.store(range(600), range(600)))
                rig.check()
                rig.done(rig.load(range(600), range(600, 1200)))
                rig.done(rig.store(rng.sample(range(1200), 600), range(600)))
                rig.check()
                said.append([rig.core.stats()["row_copies"], rig.core.take_notices()])
        print(json.dumps({"said": said}))
    """
    for row_copies, notices in run_script(textwrap.dedent(code))["said"]:
        told = any("rows" in notice for notice in notices)
        assert row_copies > 0 or told or not makes_rows(16_384)


def test_one_slot_goes_to_many_blocks(path: str) -> None:
    """A load may read a slot more than once."""
    with Rig([[1000, 4096]], path=path) as rig:
        rig.done(rig.store([5, 6], [1, 2]))
        rig.done(rig.load([1, 2, 1, 1, 2], [20, 21, 22, 23, 40]))
        rig.check()


def test_one_block_goes_to_many_slots(path: str) -> None:
    """A store may read a block more than once."""
    with Rig([[1000, 4096]], path=path) as rig:
        rig.done(rig.store([5, 6, 5, 5], [1, 2, 9, 15]))
        rig.check()


def test_a_job_of_100000_fragments(path: str) -> None:
    """One job of 25,000 blocks in four layers, each fragment on its own."""
    rng = random.Random(1)
    count = 25_000
    with Rig([[256] * 4], blocks=2 * count, slots=count, path=path) as rig:
        blocks = rng.sample(range(2 * count), 2 * count)
        slots = rng.sample(range(count), count)
        rig.done(rig.store(blocks[:count], slots))
        rig.done(rig.load(slots, blocks[count:]))
        rig.check()


@pytest.mark.parametrize("verify", ["off", "all"])
def test_mixed_jobs_in_flight(path: str, verify: str) -> None:
    """2,000 jobs that depend on each other end as if they had run one by one."""
    rng = random.Random(verify)
    blocks, slots, per_chunk = 128, 64, 2
    with Rig(
        [[512, 100], [2050]],
        blocks=blocks,
        blocks_per_chunk=per_chunk,
        slots=slots,
        padding=6,
        path=path,
        verify=verify,
    ) as rig:
        holds: dict[int, int] = {}  # slot -> group of the chunk in it
        jobs: list[int] = []
        for _ in range(2000):
            group = rng.randrange(2)
            count = rng.choice([1, 1, 2, 3, 5, 20])
            stored = [slot for slot, owner in holds.items() if owner == group]
            load = bool(stored) and rng.random() < 0.5
            places = rng.sample(stored if load else range(slots), min(count, len(stored) or 64))
            numbers = rng.sample(range(blocks), per_chunk * len(places))
            sizes = [0, 0]
            sizes[group] = len(numbers)
            if load:
                jobs.append(rig.load(places, numbers, sizes, [0, 0]))
            else:
                jobs.append(rig.store(numbers, places, sizes, [0, 0]))
                holds.update(dict.fromkeys(places, group))
        rig.done(*jobs)
        rig.check()


# --- the region ---


@pytest.mark.parametrize("pinning", ["register", "allocate", "none"])
def test_every_kind_of_host_memory(path: str, pinning: str) -> None:
    """Registered in the background, allocated by the driver, or pageable."""
    with Rig([[4096, 100]], path=path, pinning=pinning, register=pinning == "register") as rig:
        rig.done(rig.store(range(16), range(16)))
        rig.done(rig.load(range(16), range(30, 46)))
        if pinning == "allocate":
            rig.window = None  # The bytes are in the driver's memory, not in the mapping.
        rig.check()


def test_jobs_do_not_wait_for_the_region(path: str) -> None:
    """Slots anywhere in a large region can be used at once, before it is registered."""
    slots = 2000  # of 1 MiB
    with Rig([[MIB]], blocks=64, slots=slots, path=path, register=False, model=False) as rig:
        places = [slots - 1, 0, slots // 2, 70, 71, 1300]
        rig.done(rig.store(range(6), places))
        rig.done(rig.load(places, range(20, 26)))
        assert rig.same(range(6), range(20, 26))
        rig.wait_registered()
        rig.done(rig.load(places, range(40, 46)))
        assert rig.same(range(6), range(40, 46))
