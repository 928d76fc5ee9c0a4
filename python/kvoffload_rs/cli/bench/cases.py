"""Which blocks and slots a measured job moves."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvoffload_rs.errors import ConfigError

LAYERS = 32
"""GPU tensors; a slot holds one block of each of them, so 32 fragments."""

MOST_FRAGMENTS = 131_072
"""Fragments of a job at most: jobs of small fragments move fewer bytes."""

Ids = array
"""Block or slot numbers as 32-bit integers."""


@dataclass(frozen=True)
class Geometry:
    """Shape of the GPU tensors and of the host pool for one fragment size."""

    fragment: int
    """Bytes of one block in one tensor."""
    chunks: int
    """Slots, and blocks of each tensor, that one job moves."""
    num_blocks: int
    """Blocks of each tensor."""
    num_slots: int

    @classmethod
    def of(cls, fragment: int, case_bytes: int, pool: int) -> Geometry:
        """The shape for jobs of `case_bytes` or less between the GPU and `pool` bytes.

        Raises:
            ConfigError: the pool does not hold the slots of two such jobs with gaps.
        """
        slot = fragment * LAYERS
        chunks = max(1, min(case_bytes, MOST_FRAGMENTS * fragment) // slot)
        num_slots = pool // slot
        if num_slots < 4 * chunks:
            raise ConfigError(
                f"--pool has {num_slots} slots of {slot} bytes, {4 * chunks} are needed",
                field="pool",
                value=pool,
                hint="Use a larger pool or smaller fragments.",
            )
        return cls(fragment, chunks, 6 * chunks, num_slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.fragment * LAYERS

    @property
    def job_bytes(self) -> int:
        """Bytes that one job moves."""
        return self.chunks * self.slot_bytes

    @property
    def fragments(self) -> int:
        """Fragments of one job."""
        return self.chunks * LAYERS


@dataclass(frozen=True)
class Plan:
    """The ids of all jobs of a case. The four sets are disjoint where they could clash."""

    source: Ids[int]
    """Blocks that are stored."""
    target: Ids[int]
    """Blocks that are loaded into, in the order of `source`."""
    slots: Ids[int]
    """Slots between them."""
    other_slots: Ids[int]
    """Slots of the store that runs beside a load."""
    adjacent: bool

    def parts(self, count: int) -> list[Plan]:
        """Up to `count` plans that share no block and no slot."""
        count = min(count, len(self.source))
        return [
            Plan(
                self.source[part::count],
                self.target[part::count],
                self.slots[part::count],
                self.other_slots[part::count],
                False,
            )
            for part in range(count)
        ]


def make_plan(geometry: Geometry, seed: int, *, adjacent: bool = False) -> Plan:
    """Ids in random order and none next to another, or in rows of adjacent ones."""
    rng = random.Random(f"{seed} {geometry.fragment} {adjacent}")
    count = geometry.chunks
    pick = _runs if adjacent else scattered
    blocks = pick(rng, 2 * count, geometry.num_blocks)
    slots = pick(rng, 2 * count, geometry.num_slots)
    return Plan(
        source=_ids(blocks[:count]),
        target=_ids(blocks[count:]),
        slots=_ids(slots[:count]),
        other_slots=_ids(slots[count:]),
        adjacent=adjacent,
    )


def scattered(rng: random.Random, count: int, limit: int) -> list[int]:
    """`count` different numbers below `limit` in random order, no two of them consecutive."""
    if limit < 2 * count - 1:
        raise ValueError(f"{count} numbers below {limit} cannot all be apart")
    # Numbers drawn without gaps become numbers with gaps by adding each one's rank.
    drawn = sorted(rng.sample(range(limit - count + 1), count))
    apart = [number + rank for rank, number in enumerate(drawn)]
    rng.shuffle(apart)
    return apart


def _runs(rng: random.Random, count: int, limit: int) -> list[int]:
    """`count` consecutive numbers below `limit`."""
    start = rng.randrange(limit - count + 1)
    return list(range(start, start + count))


def _ids(numbers: Iterable[int]) -> Ids[int]:
    return array("i", numbers)
