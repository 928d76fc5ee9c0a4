"""Random traffic on random engines: the real scheduler, our connector, copies that are planned.

Every delay and every failure is part of the example, so hypothesis makes what fails small. All
kinds of engines take turns: one or two ranks, one or several KV groups, a scheduler that runs
ahead.
`KVOFFLOAD_FUZZ_STEPS` asks for more steps, `KVOFFLOAD_FUZZ_SEED` for other ones.
"""

from __future__ import annotations

import os

import pytest
from support.process import run_module

pytestmark = pytest.mark.versions

STEPS = int(os.environ.get("KVOFFLOAD_FUZZ_STEPS", "10000"))
WANTED = (
    *("preemptions", "flushes", "deadlines", "deferred_writing", "deferred_loading"),
    *("loads_done", "loads_failed", "loads_voided", "stores_done", "stores_failed"),
    *("full", "hybrid", "local", "uneven", "latent", "states", "2 ranks", "ahead"),
)
SEED = int(os.environ.get("KVOFFLOAD_FUZZ_SEED", "0"))


def test_rules_hold_after_every_step() -> None:
    """Right bytes and tokens, no slot or block given twice, every job reported once, no leak."""
    timeout_s = 300 + STEPS / 50
    totals = run_module("support.rig.fuzz", [str(STEPS), str(SEED)], timeout_s=timeout_s)
    assert totals["steps"] >= STEPS
    if STEPS >= 10_000:
        # What happened: a test of nothing passes, too.
        never = [what for what in WANTED if not totals.get(what)]
        assert not never, totals
