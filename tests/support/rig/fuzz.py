"""Random engines and random traffic for our connector; what fails is made small by hypothesis.

Started as ``python -m support.rig.fuzz STEPS SEED``; prints one line ``RESULT {...}``.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from . import versions
from .kit import BLOCK, FULL, HYBRID, LATENT, LOCAL, MAMBA, UNEVEN, Settings, end, make_rig, prompt
from .planned import Fate, PlannedTransfers
from .rig import Rig

GROUPS = {
    "full": [FULL],
    "hybrid": HYBRID,
    "local": LOCAL,
    "uneven": UNEVEN,
    "latent": LATENT,
    "states": MAMBA,
}
#: Of one random engine.
LEAST_OPS, MOST_OPS = 30, 70


@dataclass(frozen=True)
class Engine:
    """What a random engine is like."""

    groups: str
    blocks_per_chunk: int
    ranks: int
    ahead: bool
    slots: int
    gpu_blocks: int
    prompt_only: bool
    policy: str
    defer_deadline_s: float


#: KV groups, blocks per chunk, ranks, a scheduler that runs ahead: all of them, one after another.
KINDS = [
    kind
    for kind in itertools.product(GROUPS, (1, 2), (1, 2), (False, True))
    if kind[0] != "states" or (kind[1] == 1 and versions.CAN_KEEP_STATES)
]


def engines(
    groups: str, blocks_per_chunk: int, ranks: int, ahead: bool
) -> st.SearchStrategy[Engine]:
    """Engines of one kind."""
    return st.builds(
        Engine,
        groups=st.just(groups),
        blocks_per_chunk=st.just(blocks_per_chunk),
        ranks=st.just(ranks),
        ahead=st.just(ahead),
        slots=st.integers(4, 24),
        gpu_blocks=st.integers(22, 60),
        prompt_only=st.booleans(),
        policy=st.sampled_from(["lru", "arc"]),
        defer_deadline_s=st.sampled_from([30.0, 0.001]),
    )


FATES = st.builds(Fate, st.integers(0, 6), st.integers(0, 9).map(lambda n: n == 9))
#: (family of prompts, blocks of it, tokens beyond, blocks of its own, tokens to generate)
REQUESTS = st.tuples(
    st.integers(0, 1),
    st.sampled_from([4, 6, 5, 3, 2, 1, 0]),
    st.integers(0, BLOCK - 1),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([1, 2, 5, 18, 40]),
)
ADD = st.tuples(st.just("add"), REQUESTS)
STEP = st.tuples(st.just("step"), st.integers(1, 12))
LOSE = st.tuples(st.sampled_from(["evict", "evict", "forget"]), st.just(0))
RETURN = st.tuples(st.just("return"), REQUESTS)
RARE = st.tuples(
    st.sampled_from(["abort", "abort", "stop", "drain", "reset pool", "new weights"]),
    st.integers(0, 7),
)
#: What happens most is listed more than once.
OPS = st.one_of(st.just(("nothing", 0)), ADD, ADD, STEP, STEP, STEP, LOSE, RETURN, RETURN, RARE)


class Drive:
    """One random engine under way."""

    def __init__(self, engine: Engine, fates: list[Fate], late: list[bool]) -> None:
        self.engine = engine
        self.rig = make_rig(
            Settings(engine.blocks_per_chunk, "", "", versions.OUR_CONNECTOR),
            engine.slots,
            num_blocks=engine.gpu_blocks,
            groups=GROUPS[engine.groups],
            ranks=engine.ranks,
            async_scheduling=engine.ahead,
            prompt_only=engine.prompt_only,
            policy=engine.policy,
            max_num_batched_tokens=96,
            extra={
                "defer_deadline_s": engine.defer_deadline_s,
                "block_size": None,
                "blocks_per_chunk": engine.blocks_per_chunk,
            },
        )
        self.names = itertools.count()
        fate, overdue = itertools.cycle(fates), itertools.cycle(late)
        self.planned = []
        for rank, worker in enumerate(self.rig.workers):
            side = worker.worker_side
            pages = self.rig.model.pages[rank]
            planned = PlannedTransfers(
                side._transfers, lambda _store: next(fate), lambda: next(overdue), pages
            )
            side._transfers = planned
            self.planned.append(planned)

    def step(self, steps: int = 1) -> None:
        """Some steps, each with all its checks."""
        for _ in range(steps):
            self.rig.step()
            self.check()

    def check(self) -> None:
        """What holds between any two steps."""
        rig = self.rig
        rig.core.validate()
        pool = rig.manager.stats()
        assert pool["free"] + pool["ready"] + pool["writing"] <= pool["slots"], pool
        counts = rig.core.stats()
        for kind in ("loads", "stores"):
            ended = sum(counts[f"{kind}_{how}"] for how in ("done", "failed", "voided"))
            assert counts[f"{kind}_begun"] >= ended, counts
        assert counts["stray_reports"] == 0, counts
        assert rig.watch is not None
        assert rig.core.num_jobs >= len(rig.watch.live), "a job was forgotten before its end"

    def drain(self) -> None:
        """Until nothing is left to do."""
        for _ in range(3000):
            if not self.rig._busy():
                break
            self.step()
        self.rig.drain(1.0)
        assert not self.rig.tracked(), self.rig.tracked()

    def alive(self, number: int) -> str | None:
        """One of the requests that have not ended."""
        alive = [name for name, one in self.rig.scheduler.requests.items() if not one.is_finished()]
        return alive[number % len(alive)] if alive else None

    def holds_without_running(self) -> bool:
        """Whether a request has blocks and does not run: it loads, or has loaded and now waits.

        vLLM cannot drop those, and refuses to reset.
        """
        blocks = self.rig.scheduler.kv_cache_manager.get_block_ids
        return any(
            one.status.name != "RUNNING" and any(blocks(name))
            for name, one in self.rig.scheduler.requests.items()
        )

    def do(self, what: str, detail: Any) -> None:
        """One operation."""
        rig = self.rig
        if what == "add":
            family, blocks, tail, own, tokens = detail
            name = f"r{next(self.names)}"
            text = prompt(f"f{family}", 7)[: blocks * BLOCK + tail]
            text += prompt(f"own{family}", own, tail=1)
            rig.add(name, text, max_tokens=tokens)
        elif what == "return":
            # Of what somebody has stored a moment ago, the GPU has nothing left.
            self.do("evict", 0)
            self.do("add", detail)
            self.step(3)
            self.do("evict", 0)
            self.do("add", detail)
        elif what == "step":
            self.step(detail)
        elif what in ("abort", "stop"):
            name = self.alive(detail)
            if name is not None:
                rig.abort(name) if what == "abort" else rig.stop(name)
        elif what == "drain":
            self.drain()
        elif what == "forget":
            self.drain()
            rig.forget_gpu()
        elif what == "evict":
            pool = rig.scheduler.kv_cache_manager.block_pool
            pool.evict_blocks({one.block_id for one in pool.blocks if not one.ref_cnt})
        elif what == "reset pool":
            rig.scheduler.reset_connector_cache()
        elif what == "new weights":
            for _ in range(100):
                if not self.holds_without_running():
                    rig.reset_everything()
                    break
                self.step()
        self.check()

    def finish(self) -> None:
        """Everything comes to its end, and nothing is left over."""
        self.drain()
        faults = sum(planned.failed for planned in self.planned)
        counts = self.rig.core.stats()
        if faults and not counts["loads_voided"] + counts["stores_voided"]:
            assert counts["loads_failed"] + counts["stores_failed"] > 0, "a fault went uncounted"
        end(self.rig)


def main() -> None:
    """Random engines until there were enough steps."""
    wanted, first_seed = int(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    totals: dict[str, int] = {"steps": 0, "engines": 0}

    def play(
        engine: Engine, fates: list[Fate], late: list[bool], ops: list[tuple[str, Any]]
    ) -> None:
        drive = Drive(engine, fates, late)
        try:
            for op in ops:
                drive.do(*op)
            drive.finish()
        finally:
            note(totals, drive)
            drive.rig.shutdown()

    for round_ in itertools.count():
        if totals["steps"] >= wanted:
            break
        random_engines = given(
            engines(*KINDS[(first_seed + round_) * 13 % len(KINDS)]),
            st.lists(FATES, min_size=1, max_size=8),
            st.lists(st.integers(0, 5).map(lambda n: n == 5), min_size=1, max_size=4),
            st.lists(OPS, min_size=LEAST_OPS, max_size=MOST_OPS),
        )
        limits = settings(
            max_examples=4,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        seed(first_seed + round_)(limits(random_engines(play)))()
    print("RESULT " + json.dumps(totals))


def note(totals: dict[str, int], drive: Drive) -> None:
    """Adds up what happened."""
    rig: Rig = drive.rig
    totals["steps"] += rig.totals.steps
    totals["engines"] += 1
    counts = rig.core.stats()
    for name in ("loads_done", "loads_failed", "loads_voided", "stores_done", "stores_failed"):
        totals[name] = totals.get(name, 0) + counts[name]
    for name in ("deferred_writing", "deferred_loading", "flushes", "deadlines"):
        totals[name] = totals.get(name, 0) + counts[name]
    totals["preemptions"] = totals.get("preemptions", 0) + rig.totals.preemptions
    engine = drive.engine
    for kind in (engine.groups, f"{engine.ranks} ranks", "ahead" if engine.ahead else "in step"):
        totals[kind] = totals.get(kind, 0) + rig.totals.steps


if __name__ == "__main__":
    main()
