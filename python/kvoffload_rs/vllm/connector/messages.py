"""What travels between the scheduler's process and the workers'.

Plain tuples, numbers and bytes: pickled with every step, so nothing here has one object per block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


class Order(NamedTuple):
    """One copy to make.

    Attributes:
        job: its number.
        request: the request it is for.
        blocks: GPU blocks as native int32, group after group.
        group_sizes: how many of them belong to each group.
        first_blocks: for each group the position of its first block in the request.
        slots: host slots as native int32, in the order of the chunks. Empty although there are
            blocks: the load cannot be made, and is to be reported as failed.
    """

    job: int
    request: str
    blocks: bytes
    group_sizes: list[int]
    first_blocks: list[int]
    slots: bytes


@dataclass
class StepOrders(KVConnectorMetadata):
    """What the workers are to do with a step.

    Attributes:
        loads: start now.
        stores: start when this step has been computed.
        flush: stores whose blocks this step writes: they must have read them before.
        void: loads that were overtaken by a reset: they fail, whatever they read.
        spoiled: stores whose blocks are written before `flush` is heeded: they fail.
    """

    loads: list[Order] = field(default_factory=list)
    stores: list[Order] = field(default_factory=list)
    flush: list[int] = field(default_factory=list)
    void: list[int] = field(default_factory=list)
    spoiled: list[int] = field(default_factory=list)


@dataclass
class Moved:
    """Copies of one direction that ended well.

    Attributes:
        jobs: how many.
        bytes: of all of them.
        seconds: from each one's first byte to its last, added up.
    """

    jobs: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, other: Moved) -> None:
        """Adds other copies."""
        self.jobs += other.jobs
        self.bytes += other.bytes
        self.seconds += other.seconds


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """What became of jobs on one rank, or on several.

    Attributes:
        ends: (rank, job, why it failed or None).
        stored: copies to the host.
        loaded: copies to the GPU.
    """

    ends: list[tuple[int, int, str | None]] = field(default_factory=list)
    stored: Moved = field(default_factory=Moved)
    loaded: Moved = field(default_factory=Moved)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds another rank's."""
        if isinstance(other, Reports):
            self.ends += other.ends
            self.stored.add(other.stored)
            self.loaded.add(other.loaded)
        return self


@dataclass
class RankFacts(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler when the engine starts.

    Attributes:
        rank: its rank.
        num_slots: slots of its region.
        slot_bytes: bytes of each.
        chunk_shape: bytes of one chunk in each KV group; equal on ranks with equal layers.
        blocks_per_chunk: GPU blocks in a chunk.
    """

    rank: int
    num_slots: int
    slot_bytes: int
    chunk_shape: tuple[int, ...]
    blocks_per_chunk: int
