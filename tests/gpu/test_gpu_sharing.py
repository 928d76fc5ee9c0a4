"""A region that several workers have mapped: one stores, the others load."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from gpu_kit import PATHS, Rig, current_stream, ids
from kvoffload_rs.errors import ConfigError, InvalidJobError

pytestmark = pytest.mark.gpu

BLOCKS, SLOTS = 600, 700
GROUPS = [[65536, 33 * 64]]


@pytest.fixture(params=PATHS)
def ranks(request: pytest.FixtureRequest, gpu: None) -> Iterator[tuple[Rig, Rig]]:
    """The owner of a region of several pieces, and a worker that has joined it, on one GPU."""
    with Rig(GROUPS, blocks=BLOCKS, slots=SLOTS, path=request.param, share_region=True) as owner:
        descriptor = owner.core.take_region_fd()
        assert descriptor is not None
        more = {"join_region": descriptor, "model": False}
        with Rig(GROUPS, blocks=BLOCKS, slots=SLOTS, path=request.param, **more) as reader:
            os.close(descriptor)
            yield owner, reader


def test_what_one_stores_the_other_loads(ranks: tuple[Rig, Rig]) -> None:
    owner, reader = ranks
    for tensor in reader.tensors:
        tensor.zero_()
    stored = range(BLOCKS)
    owner.done(owner.store(stored, range(BLOCKS)))
    owner.check()
    back = [(block * 7) % BLOCKS for block in stored]
    reader.done(reader.load(range(BLOCKS), back))
    for mine, other in zip(reader.tensors, owner.tensors, strict=True):
        assert mine.cpu()[back].equal(other.cpu())
    owner.check()  # reading has changed nothing


def test_who_joined_cannot_store(ranks: tuple[Rig, Rig]) -> None:
    _, reader = ranks
    with pytest.raises(InvalidJobError, match="only reads the region"):
        reader.core.submit_store(1, ids([0]), [1], [0], ids([0]), current_stream())
    assert reader.core.stats()["stores"] == 0


def test_the_driver_cannot_allocate_what_is_shared(gpu: None) -> None:
    with pytest.raises(ConfigError, match="cannot be the driver's") as caught:
        Rig(GROUPS, share_region=True, pinning="allocate")
    assert caught.value.field == "pinning"
