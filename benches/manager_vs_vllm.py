"""Our manager and the installed vLLM's, side by side, through the same Python calls.

    python benches/manager_vs_vllm.py            a table, and whether the targets are met
    python benches/manager_vs_vllm.py --json     the same rows as one JSON list
    python benches/manager_vs_vllm.py --quick    small pools and fewer replays, for a first look

`benches/README.md` says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

BATCH = 256
FILL = 4096
STAGES = (
    "lookup",
    "prepare_store",
    "complete_store",
    "prepare_load",
    "complete_load",
    "on_request_finished",
)
TARGET_RATIO = {"lru": 15.0, "arc": 8.0}
TARGET_WORST_MS = 1.0

Times = dict[str, list[int]]
Clock = Callable[[], int]


@dataclass(frozen=True)
class Case:
    """One pool: its policy, its size, and how much of it is being read by other requests."""

    policy: str
    slots: int
    pinned_percent: int
    pins: str

    def pinned(self, keys: list[bytes]) -> list[bytes]:
        """The chunks to pin, given all chunks of the pool with the oldest first."""
        if self.pins == "oldest":
            return keys[: len(keys) * self.pinned_percent // 100]
        # Spread evenly over the whole order: a step is taken whenever the share passes 100 %.
        share = self.pinned_percent
        return [key for i, key in enumerate(keys) if i * share % 100 + share >= 100]


@dataclass(frozen=True)
class Row:
    """One operation in one case. Times per block are medians, worst times are per call."""

    policy: str
    slots: int
    pinned_percent: int
    operation: str
    ours_ns_per_block: float
    vllm_ns_per_block: float
    ratio: float
    ours_worst_ms: float
    vllm_worst_ms: float
    pins: str
    calls: int
    vllm_calls: int
    replays: int
    ours_bytes_per_slot: float


def new_contexts(n: int) -> Iterator[Any]:
    """Request contexts as vLLM's connector makes them."""
    from vllm.v1.kv_offload.base import ReqContext

    return (ReqContext(f"r{i}") for i in range(n))


def make_keys(n: int) -> list[bytes]:
    """Random, distinct keys of 36 bytes: a 32-byte block hash and group 0."""
    rng = random.Random(36)
    keys = [rng.randbytes(32) + bytes(4) for _ in range(n)]
    assert len(set(keys)) == n
    return keys


def fill(manager: Any, keys: list[bytes]) -> None:
    """Store `keys`, oldest first, as requests that have finished."""
    for start in range(0, len(keys), FILL):
        part = keys[start : start + FILL]
        (context,) = new_contexts(1)
        manager.on_new_request(context)
        # The head of a request ends up youngest, so offer each part from its youngest.
        stored = manager.prepare_store(part[::-1], context).keys_to_store
        manager.complete_store(set(stored), context)
        manager.on_request_finished(context)


def replay(
    make: Callable[[], Any],
    case: Case,
    resident: list[bytes],
    fresh: list[bytes],
    budget: float,
    now: Clock,
) -> tuple[Times, int]:
    """One run of the sequence on a new manager: nanoseconds of every call of every stage.

    It ends after all of `fresh` was stored, or when the calls have taken `budget` seconds. Answers
    the size of our manager's bookkeeping too.
    """
    manager = make()
    fill(manager, resident)
    (reader,) = new_contexts(1)
    manager.on_new_request(reader)
    pinned = case.pinned(resident)
    if pinned:
        manager.prepare_load(pinned, reader)

    cycles = len(fresh) // BATCH
    batches = [fresh[i * BATCH : (i + 1) * BATCH] for i in range(cycles)]
    completions = [set(batch) for batch in batches]
    contexts = list(new_contexts(cycles))
    for context, batch in zip(contexts, batches, strict=True):
        if hasattr(context, "set_offload_key_position"):
            for i, key in enumerate(batch):
                context.set_offload_key_position(key, (i + 1) * 16)
        manager.on_new_request(context)

    times: Times = {stage: [] for stage in STAGES}
    deadline = now() + budget * 1e9
    gc.collect()
    gc.disable()
    try:
        for batch, done, context in zip(batches, completions, contexts, strict=True):
            start = now()
            for key in batch:
                manager.lookup(key, context)
            looked_up = now()
            output = manager.prepare_store(batch, context)
            prepared = now()
            manager.complete_store(done, context)
            stored = now()
            for key in batch:
                manager.lookup(key, context)
            found = now()
            manager.prepare_load(batch, context)
            loading = now()
            manager.complete_load(done, context)
            loaded = now()
            manager.on_request_finished(context)
            finished = now()
            if len(output.evicted_keys) != BATCH:
                raise AssertionError("the pool was not full")
            times["lookup"] += (looked_up - start, found - stored)
            times["prepare_store"].append(prepared - looked_up)
            times["complete_store"].append(stored - prepared)
            times["prepare_load"].append(loading - found)
            times["complete_load"].append(loaded - loading)
            times["on_request_finished"].append(finished - loaded)
            if finished > deadline:
                break
    finally:
        gc.enable()
    times["full_cycle"] = [
        sum(parts)
        for parts in zip(
            times["lookup"][::2],
            times["lookup"][1::2],
            *(times[stage] for stage in STAGES[1:]),
            strict=True,
        )
    ]
    return times, manager._core.metadata_bytes() if hasattr(manager, "_core") else 0


def per_block_ns(runs: list[Times], operation: str, calls: int) -> float:
    """Median over the replays of the mean time per block, over the first `calls` calls."""
    return median(sum(run[operation][:calls]) / (calls * BATCH) for run in runs)


def worst_ms(runs: list[Times], operation: str) -> float:
    """The slowest call, where each call counts with its fastest replay."""
    calls = zip(*(run[operation] for run in runs), strict=True)
    return max(min(call) for call in calls) / 1e6


def run_case(
    case: Case, keys: list[bytes], cycles: int, replays: int, budget: float, now: Clock
) -> list[Row]:
    """Measure both managers in one case."""
    from kvoffload_rs.vllm.manager import KvOffloadManager
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    resident = keys[: case.slots]
    fresh = keys[case.slots : case.slots + cycles * BATCH]
    ours: list[Times] = []
    theirs: list[Times] = []
    # In turns, so that a machine that slows down slows both; one at a time, for memory's sake.
    for _ in range(replays):
        times, size = replay(
            lambda: KvOffloadManager(case.slots, policy=case.policy),
            case,
            resident,
            fresh,
            float("inf"),
            now,
        )
        ours.append(times)
        # The first replay finds out how many cycles vLLM's time allows.
        part = fresh[: len(theirs[0]["prepare_store"]) * BATCH] if theirs else fresh
        times, _ = replay(
            lambda: CPUOffloadingManager(case.slots, cache_policy=case.policy),
            case,
            resident,
            part,
            float("inf") if theirs else budget,
            now,
        )
        theirs.append(times)
    rows = []
    for operation in (*STAGES, "full_cycle"):
        calls, both = len(ours[0][operation]), len(theirs[0][operation])
        our_ns, their_ns = (per_block_ns(runs, operation, both) for runs in (ours, theirs))
        rows.append(
            Row(
                policy=case.policy,
                slots=case.slots,
                pinned_percent=case.pinned_percent,
                operation=operation,
                ours_ns_per_block=round(our_ns, 1),
                vllm_ns_per_block=round(their_ns, 1),
                ratio=round(their_ns / our_ns, 2),
                ours_worst_ms=round(worst_ms(ours, operation), 4),
                vllm_worst_ms=round(worst_ms(theirs, operation), 4),
                pins=case.pins if case.pinned_percent else "none",
                calls=calls,
                vllm_calls=both,
                replays=replays,
                ours_bytes_per_slot=round(size / case.slots, 1),
            )
        )
    return rows


def verdicts(rows: list[Row]) -> list[tuple[bool, str]]:
    """The targets that these rows can judge."""
    judged = []
    for row in rows:
        where = f"{row.policy}, {row.slots} slots, {row.pinned_percent} % pinned ({row.pins})"
        if row.operation == "full_cycle" and row.slots == 100_000 and not row.pinned_percent:
            target = TARGET_RATIO[row.policy]
            text = f"full cycle {row.ratio:.1f}x less than vLLM, target {target:.0f}x: {where}"
            judged.append((row.ratio >= target, text))
        if row.operation == "prepare_store":
            text = f"worst prepare_store of {BATCH} {row.ours_worst_ms:.3f} ms, target "
            text += f"{TARGET_WORST_MS:.0f} ms: {where}"
            judged.append((row.ours_worst_ms <= TARGET_WORST_MS, text))
    return judged


def print_table(rows: list[Row]) -> None:
    """The rows for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the same Python calls: ns per block, and the worst call in ms")
    for name in ("policy", "slots", "pinned", "operation"):
        table.add_column(name, no_wrap=True)
    for name in ("ours ns", "vLLM ns", "ratio", "ours worst", "vLLM worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy,
            f"{row.slots:,}",
            f"{row.pinned_percent} % {row.pins if row.pinned_percent else ''}",
            row.operation,
            f"{row.ours_ns_per_block:,.0f}",
            f"{row.vllm_ns_per_block:,.0f}",
            f"{row.ratio:.1f}",
            f"{row.ours_worst_ms:.3f}",
            f"{row.vllm_worst_ms:.3f}",
            end_section=row.operation == "full_cycle",
        )
    console = Console(width=120 if not sys.stdout.isatty() else None)
    console.print(table)
    per_slot = {(row.policy, row.slots): row.ours_bytes_per_slot for row in rows}
    for (policy, slots), size in per_slot.items():
        console.print(f"{policy}, {slots:,} slots: {size:.0f} bytes of our metadata a slot")
    for met, text in verdicts(rows):
        console.print(f"{'[green]met[/]' if met else '[red]MISSED[/]'} {text}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON list of rows")
    parser.add_argument("--quick", action="store_true", help="10 k and 100 k slots, 3 replays")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--policy", action="append", choices=["lru", "arc"])
    parser.add_argument("--slots", action="append", type=int)
    parser.add_argument("--pinned", action="append", type=int, help="percent; repeatable")
    parser.add_argument("--pins", choices=["spread", "oldest"], default="spread")
    parser.add_argument("--cycles", type=int, help="full cycles per replay (default: 200)")
    parser.add_argument("--replays", type=int, help="default: 7")
    parser.add_argument(
        "--vllm-seconds",
        type=float,
        help="stop vLLM's sequence after so many seconds per replay (default: 10)",
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the thread's CPU time: for a machine that others use too",
    )
    options = parser.parse_args(arguments)
    quick = options.quick
    policies = options.policy or ["lru", "arc"]
    sizes = options.slots or ([10_000, 100_000] if quick else [10_000, 100_000, 1_000_000])
    shares = options.pinned or [0, 50, 90]
    cycles = options.cycles or (40 if quick else 200)
    replays = options.replays or (3 if quick else 7)
    budget = options.vllm_seconds or (2.0 if quick else 10.0)

    now = time.thread_time_ns if options.cpu_time else time.perf_counter_ns

    keys = make_keys(max(sizes) + cycles * BATCH)
    rows: list[Row] = []
    for policy in policies:
        for slots in sizes:
            for share in shares:
                case = Case(policy, slots, share, options.pins)
                print(f"{case} ...", file=sys.stderr, flush=True)
                rows += run_case(case, keys, cycles, replays, budget, now)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print_table(rows)
    return int(options.check and not all(met for met, _ in verdicts(rows)))


if __name__ == "__main__":
    sys.exit(main())
