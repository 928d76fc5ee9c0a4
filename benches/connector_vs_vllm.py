"""Our connector and the installed vLLM's own on the scheduler's thread, side by side.

    python benches/connector_vs_vllm.py            a table, and whether the targets are met
    python benches/connector_vs_vllm.py --json     the rows as one JSON list
    python benches/connector_vs_vllm.py --quick    a small pool and fewer replays, for a first look

The real scheduler runs; the workers' answers are made up at once, so that nothing but the calls to
the connector is measured. `benches/README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the model has no weights
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

BLOCK = 16
CHUNKS = 2000
TARGETS = {"hit": 10.0, "idle_step": 5.0, "store": 20.0}
TARGET_WORST_MS = 1.0
#: The calls of vLLM's scheduler to a connector.
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "take_events",
)


@dataclass(frozen=True)
class Row:
    """One case: all calls of one step or of several, and the longest single one of ours."""

    case: str
    ours_ms: float
    vllm_ms: float
    ratio: float
    ours_worst_call_ms: float
    vllm_worst_call_ms: float
    calls: int
    replays: int


class Timed:
    """Times every call of the scheduler to its connector, while it is on."""

    def __init__(self, connector: Any) -> None:
        self.times: list[tuple[str, int]] = []
        self.on = False
        for name in HOOKS:
            if hasattr(connector, name):
                setattr(connector, name, self._wrap(name, getattr(connector, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return call(*args, **kwargs)
            start = clock()
            answer = call(*args, **kwargs)
            self.times.append((name, clock() - start))
            return answer

        return timed


class Engine:
    """The real scheduler with one connector; workers that finish every copy at once."""

    def __init__(self, ours: bool, slots: int, *, max_num_seqs: int, blocks: int) -> None:
        from support.rig import versions
        from support.rig.fake_model import Group
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        versions.MAX_MODEL_LEN = 65536
        self.ours = ours
        page = BLOCK * 2 * 2 * 8 * 2
        groups = [Group(["full.0", "full.1"])]
        extra: dict[str, Any] = {"cpu_bytes_to_use": slots * 2 * page}
        kv_config = versions.make_kv_cache_config(
            groups, block_size=BLOCK, num_blocks=blocks, head_size=8
        )
        config = versions.make_vllm_config(
            extra,
            block_size=BLOCK,
            num_blocks=blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=CHUNKS * BLOCK + 64,
            ranks=1,
            rank=0,
            async_scheduling=False,
            engine_id=f"bench-{time.monotonic_ns()}",
            connector=versions.OUR_CONNECTOR if ours else "OffloadingConnector",
        )
        # Publishing events is another matter, and off by default.
        config.kv_events_config = None
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.timed = Timed(self.scheduler.connector)

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queues a request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def step(self) -> Any:
        """One step; every copy that was ordered is reported as done with it."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        metadata = scheduled.kv_connector_metadata
        names = list(scheduled.num_scheduled_tokens)
        done, loaded = self._finish_copies(metadata)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[self._sample(name) for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_recving=loaded or None, kv_connector_worker_meta=done
            ),
        )
        self.scheduler.update_from_output(scheduled, output)
        return scheduled

    def _sample(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        return [7] if request.num_computed_tokens >= request.num_tokens else []

    def _finish_copies(self, metadata: Any) -> tuple[Any, set[str]]:
        if self.ours:
            from kvoffload_rs.vllm.connector.messages import Reports

            orders = [*metadata.loads, *metadata.stores]
            ends = [(0, order.job, None) for order in orders]
            return (Reports(ends) if ends else None), {order.request for order in metadata.loads}
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        done = OffloadingWorkerMetadata()
        jobs = [*metadata.load_jobs, *metadata.store_jobs]
        for job in jobs:
            done.mark_completed(job)
        return (done if jobs else None), {job.req_id for job in metadata.load_jobs.values()}

    def drain(self) -> None:
        """Steps until nothing is left."""
        for _ in range(100_000):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def measure(self, what: Callable[[], Any]) -> list[tuple[str, int]]:
        """The calls that the scheduler makes meanwhile."""
        gc.collect()
        gc.disable()
        self.timed.times.clear()
        self.timed.on = True
        try:
            what()
        finally:
            self.timed.on = False
            gc.enable()
        return list(self.timed.times)


def tokens(seed: int, count: int) -> list[int]:
    """A prompt; another seed shares no block with it."""
    rng = random.Random(seed)
    return [rng.randrange(10, 900) for _ in range(count)]


def hit(ours: bool, slots: int) -> list[tuple[str, int]]:
    """A prompt of 2,000 chunks that are all on the host: from the lookup to the load job."""
    engine = Engine(ours, slots, max_num_seqs=8, blocks=CHUNKS + 100)
    prompt = tokens(1, CHUNKS * BLOCK + 8)
    engine.add("first", prompt, 1)
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", prompt, 1)
    times = engine.measure(lambda: scheduled_loads(engine))
    engine.drain()
    return times


def scheduled_loads(engine: Engine) -> None:
    """A step that must begin one load."""
    metadata = engine.step().kv_connector_metadata
    count = len(metadata.loads if engine.ours else metadata.load_jobs)
    assert count == 1, "the prompt was not found on the host"


def idle_step(ours: bool, slots: int) -> list[tuple[str, int]]:
    """256 running requests that decode: nothing to store, nothing to load."""
    engine = Engine(ours, slots, max_num_seqs=256, blocks=256 * 8)
    for number in range(256):
        engine.add(f"r{number}", tokens(number, 4 * BLOCK + 3), 60)
    while any(not request.num_output_tokens for request in engine.scheduler.requests.values()):
        engine.step()
    for _ in range(4):
        engine.step()  # whatever the prompts left to do
    times = engine.measure(engine.step)
    engine.drain()
    return times


def store(ours: bool, slots: int) -> list[tuple[str, int]]:
    """A prompt of 2,000 chunks into a full pool: as many others have to go."""
    engine = Engine(ours, slots, max_num_seqs=8, blocks=CHUNKS + 100)
    for number in range(slots // CHUNKS + 1):
        engine.add(f"fill{number}", tokens(number + 10, CHUNKS * BLOCK + 8), 1)
        engine.drain()
    engine.add("new", tokens(5, CHUNKS * BLOCK + 8), 1)
    times = engine.measure(engine.step)
    engine.drain()
    return times


CASES = {"hit": hit, "idle_step": idle_step, "store": store}


def compare(case: str, slots: int, replays: int) -> Row:
    """Both connectors, by turns: the fastest replay of each call, and the slowest of those."""
    kept: dict[bool, list[list[tuple[str, int]]]] = {True: [], False: []}
    for _ in range(replays):
        for ours in (True, False):
            kept[ours].append(CASES[case](ours, slots))
    best = {ours: fastest(runs) for ours, runs in kept.items()}
    ours_ms, vllm_ms = (sum(best[ours]) / 1e6 for ours in (True, False))
    return Row(
        case=case,
        ours_ms=round(ours_ms, 4),
        vllm_ms=round(vllm_ms, 4),
        ratio=round(vllm_ms / ours_ms, 2),
        ours_worst_call_ms=round(max(best[True]) / 1e6, 4),
        vllm_worst_call_ms=round(max(best[False]) / 1e6, 4),
        calls=len(best[True]),
        replays=replays,
    )


def fastest(runs: list[list[tuple[str, int]]]) -> list[int]:
    """Each call's fastest time over the replays, which must make the same calls."""
    names = [[name for name, _ in run] for run in runs]
    assert all(one == names[0] for one in names), "the replays made other calls"
    return [min(run[i][1] for run in runs) for i in range(len(names[0]))]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON list")
    parser.add_argument("--quick", action="store_true", help="a small pool, two replays")
    parser.add_argument("--replays", type=int, help="how often each case is played")
    arguments = parser.parse_args()
    slots = 10_000 if arguments.quick else 100_000
    replays = arguments.replays or (2 if arguments.quick else 7)
    rows = [compare(case, slots, replays) for case in CASES]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    import vllm

    print(f"vLLM {vllm.__version__}, {slots} slots, {CHUNKS} chunks, {replays} replays")
    print(
        f"{'case':>10} {'ours ms':>9} {'vLLM ms':>9} {'ratio':>7} {'target':>7} {'worst call':>11}"
    )
    for row in rows:
        met = row.ratio >= TARGETS[row.case] and row.ours_worst_call_ms <= TARGET_WORST_MS
        print(
            f"{row.case:>10} {row.ours_ms:>9.3f} {row.vllm_ms:>9.3f} {row.ratio:>7.1f} "
            f"{TARGETS[row.case]:>7.0f} {row.ours_worst_call_ms:>11.3f} {'' if met else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
