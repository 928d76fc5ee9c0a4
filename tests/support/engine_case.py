"""Serves one workload on the real engine, on a CPU, and prints one line ``RESULT {...}``.

Started as ``python -m support.engine_case '{"workload": ..., ...}'``; see ``Case`` for the fields.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32
FIRST_TOKEN, LAST_TOKEN = 3, 2000


@dataclass
class Case:
    """One run."""

    workload: str
    models: str
    model: str = "full"
    extra: dict[str, Any] | None = None  # kv_connector_extra_config; None: no offloading
    own_process: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


class Server:
    """The engine, and what it answered so far."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def serve(self, requests: dict[str, list[int]], tokens: int = 16) -> None:
        """Serve all ``requests`` at once, greedily."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in requests.values()]
        answers = self.llm.generate(prompts, sampling, use_tqdm=False)
        for name, answer in zip(requests, answers, strict=True):
            self.outputs[name] = list(answer.outputs[0].token_ids)
            self.cached[name] = int(answer.num_cached_tokens or 0)


def prompt(seed: str, length: int) -> list[int]:
    """A prompt of ``length`` tokens; another seed shares no prefix with it."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def comes_back(server: Server) -> None:
    """One prompt, then others until its KV is gone from the GPU, then the first again."""
    first = prompt("a", 200)
    server.serve({"first": first})
    server.serve({"hot": first})
    for i in range(6):
        server.serve({f"flood{i}": prompt(f"flood{i}", 200)})
    server.serve({"again": first})
    server.serve({"longer": first + server.outputs["first"] + prompt("b", 9)})


def crowd(server: Server) -> None:
    """Conversations of several users at once, whose turns repeat what was said before."""
    said = {f"user{i}": prompt(f"system{i % 2}", 64) + prompt(f"user{i}", 70) for i in range(6)}
    for turn in range(4):
        server.serve({f"{user}.{turn}": text for user, text in said.items()}, tokens=12)
        for user in said:
            said[user] += server.outputs[f"{user}.{turn}"] + prompt(f"{user}.{turn}", 11)
    server.serve({"alone": prompt("alone", 100)})
    for i in range(3):  # fills the GPU with blocks that are not offloaded: no prompt has a full one
        server.serve({f"flood{i}": prompt(f"flood{i}", BLOCK - 1)}, tokens=200)
    server.serve({"alone again": prompt("alone", 100)})


def preempted(server: Server) -> None:
    """Four requests that grow until the GPU's blocks run out, twice."""
    for turn in range(2):
        server.serve({f"{turn}.{i}": prompt(f"p{i}", 100) for i in range(4)}, tokens=120)
        for i in range(4):
            server.serve({f"{turn}.flood{i}": prompt(f"flood{i}", 200)})


WORKLOADS: dict[str, Callable[[Server], None]] = {
    workload.__name__: workload for workload in (comes_back, crowd, preempted)
}


def start_engine(case: Case) -> Any:
    """The engine with 16 blocks of 32 tokens, unless ``case.engine`` says otherwise."""
    from support.tiny_models import make_model
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if case.extra is not None:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=case.extra,
        )
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 16,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    model = make_model(case.model, Path(case.models))
    return LLM(model=str(model), kv_transfer_config=transfer, **(settings | case.engine))


def metrics_of(llm: Any) -> dict[str, float]:
    """Counters and gauges by name, and the sum of each histogram; labels are added up."""
    figures: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if value is None:
            value = getattr(metric, "sum", None)
        if isinstance(value, int | float):
            figures[metric.name] = figures.get(metric.name, 0.0) + value
    return figures


def pool_of(llm: Any) -> dict[str, int] | None:
    """The manager's own counters, if the scheduler lives in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    manager = connector.connector_scheduler.manager if connector is not None else None
    return None if manager is None else manager.stats()


def main() -> None:
    """Run the case that the command line describes."""
    case = Case(**json.loads(sys.argv[1]))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(case.own_process))
    start = time.monotonic()
    llm = start_engine(case)
    started = time.monotonic()
    server = Server(llm)
    WORKLOADS[case.workload](server)
    result = {
        "outputs": server.outputs,
        "cached": server.cached,
        "metrics": metrics_of(llm),
        "pool": pool_of(llm),
        "start_seconds": round(started - start, 2),
        "serve_seconds": round(time.monotonic() - started, 2),
    }
    print("RESULT " + json.dumps(result), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # the engine's own process imports this module again
    main()
