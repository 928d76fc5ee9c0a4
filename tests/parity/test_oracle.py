"""Our manager against vLLM 0.32.0's: the same lives, the same decisions.

`KVOFFLOAD_ORACLE_OPS` sets the number of manager calls of a whole run (default: one million).
"""

from __future__ import annotations

import os

import pytest

vllm = pytest.importorskip("vllm", reason="the oracle is vLLM's own manager")
if vllm.__version__.split("+")[0] != "0.32.0":
    pytest.skip(f"the oracle is vLLM 0.32.0, not {vllm.__version__}", allow_module_level=True)

from oracle_driver import Driver  # noqa: E402
from oracle_mutants import MISTAKES, Mistake, MutantSide  # noqa: E402
from oracle_sides import Divergence, Setup, Tally, VllmSide  # noqa: E402
from ours_side import OurSide  # noqa: E402

OPERATIONS = int(os.environ.get("KVOFFLOAD_ORACLE_OPS", "1000000"))
SEEDS = 5

SETUPS = [
    Setup(policy, slots, **options)
    for policy in ("lru", "arc")
    for slots, options in (
        # Tiny pools refuse and evict all the time.
        (1, {"max_chunks": 3}),
        (2, {"max_chunks": 3}),
        (3, {"max_chunks": 4}),
        (4, {"groups": (0, 1)}),
        (8, {}),
        (8, {"events": False, "store_threshold": 1}),
        (12, {"groups": (0, 1, 2)}),
        (16, {"groups": (0, 1, 255, 256, 70_000), "hash_bytes": (4, 7, 32, 61)}),
        # The admission threshold, with a tracker that forgets and with one that does not.
        (8, {"store_threshold": 2, "max_tracker_size": 10}),
        (16, {"store_threshold": 2, "max_tracker_size": 6, "max_chunks": 3}),
        (16, {"store_threshold": 3, "groups": (0, 1), "max_tracker_size": 24}),
        (12, {"store_threshold": 3}),
        # Medium pools: hits, promotions to ARC's frequent list, few refusals.
        (40, {"live_requests": 8, "max_chunks": 16, "hash_bytes": (32,)}),
        (64, {"live_requests": 12, "max_chunks": 24, "groups": (0, 3)}),
        (200, {"live_requests": 16, "max_chunks": 48}),
        (400, {"live_requests": 24, "max_chunks": 64, "groups": (0, 1, 2)}),
    )
]
EACH = -(-OPERATIONS // (len(SETUPS) * SEEDS))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_same_decisions_as_vllm(setup: Setup) -> None:
    """Every answer, event, figure and the whole state agree, over several random lives."""
    tally = Tally()
    for seed in range(SEEDS):
        tally.add(Driver(setup, seed, OurSide(setup), VllmSide(setup)).run(EACH))
    assert tally.operations >= EACH * SEEDS
    if EACH >= 2_000:
        _assert_that_much_happened(setup, tally)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_driver_accepts_vllm_against_itself(setup: Setup) -> None:
    """Two of vLLM's own managers agree, so a difference is never the driver's."""
    tally = Driver(setup, 99, VllmSide(setup), VllmSide(setup)).run(8_000)
    _assert_that_much_happened(setup, tally)


@pytest.mark.parametrize(
    ("mistake", "setup"), MISTAKES, ids=[f"{m.__name__}-{s.policy}" for m, s in MISTAKES]
)
def test_the_driver_catches(mistake: Mistake, setup: Setup) -> None:
    """One mistake in a manager is found within a small part of one setup's operations."""
    with pytest.raises(Divergence) as caught:
        for seed in range(SEEDS):
            Driver(setup, seed, MutantSide(setup, mistake), VllmSide(setup)).run(6_000)
    # Found by comparing answers, not by breaking the driver or an assertion of vLLM's.
    assert "one side raised" not in str(caught.value)


def _assert_that_much_happened(setup: Setup, tally: Tally) -> None:
    """A life in which nothing is evicted, refused or loaded would prove nothing."""
    assert min(tally.hits, tally.misses, tally.later, tally.stored, tally.finished) > 20, tally
    assert min(tally.loaded, tally.failed_stores, tally.resets) > 0, tally
    if setup.slots <= 64:
        assert tally.evicted > 10, tally
    if setup.slots <= 12:
        assert tally.refused > 10, tally
    if setup.policy == "arc" and setup.slots > 2:
        assert tally.adaptations > 0, tally
