"""Serves workloads on the real engine, on a CPU, and prints one line ``RESULT {...}`` for each.

Started as ``python -m support.engine_case '{"workload": ..., ...}'``, see ``Case`` for the fields;
or without an argument, with one such object per line of standard input: one engine after another
in one process, because an engine starts in two seconds once vLLM is loaded.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    transfer: dict[str, Any] = field(
        default_factory=lambda: {"kv_connector": "OffloadingConnector"}
    )
    hook: str | None = None  # something to do to the connector's code before the engine starts
    own_process: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


class Server:
    """The engine, and what it answered so far."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.aborted_loads = 0

    def serve(self, requests: dict[str, list[int]], tokens: int = 16) -> None:
        """Serve all ``requests`` at once, greedily."""
        prompts = [{"prompt_token_ids": prompt} for prompt in requests.values()]
        answers = self.llm.generate(prompts, self._sampling(tokens), use_tqdm=False)
        for name, answer in zip(requests, answers, strict=True):
            self._take(name, answer)

    def serve_stepwise(
        self,
        requests: dict[str, list[int]],
        between: Callable[[int], None] = lambda step: None,
        aborts: Mapping[str, int] | None = None,
    ) -> None:
        """The same, with a call after each step, numbered from 1; ``aborts`` names requests that
        are aborted after a step, unless they are over, and whose answers are not kept."""
        aborts = aborts or {}
        engine = self.llm.llm_engine
        for name, text in requests.items():
            engine.add_request(name, {"prompt_token_ids": text}, self._sampling(16))
        step = 0
        over = set()
        while engine.has_unfinished_requests():
            for answer in engine.step():
                if answer.finished:
                    over.add(answer.request_id)
                    if answer.request_id not in aborts:
                        self._take(answer.request_id, answer)
            step += 1
            between(step)
            doomed = {name for name, at in aborts.items() if at == step} - over
            if doomed:
                self.aborted_loads += len(doomed & requests_that_load(self.llm))
                engine.abort_request(sorted(doomed))

    def flood(self, name: str, count: int = 4) -> None:
        """Fill the GPU with other prompts."""
        for i in range(count):
            self.serve({f"{name}.flood{i}": prompt(f"{name}.flood{i}", 200)})

    def empty(self) -> bool:
        """Empty the caches, the host pool's included."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def restart(self) -> None:
        """The same while requests run: they lose their KV and start again."""
        assert self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def change_weights(self) -> None:
        """Change the model, so that KV from before is wrong."""
        self.llm.apply_model(_change_norms)

    def _sampling(self, tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def _take(self, name: str, answer: Any) -> None:
        self.outputs[name] = list(answer.outputs[0].token_ids)
        self.cached[name] = int(answer.num_cached_tokens or 0)


def _change_norms(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("input_layernorm.weight"):
            weight.data.mul_(torch.rand(weight.shape, generator=generator) + 0.5)


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


def rounds(server: Server) -> None:
    """More prompts than the GPU holds, in turn: after the first round all come from the host."""
    for turn in range(4):
        for i in range(0, 6, 2):
            server.serve({f"{turn}.{j}": prompt(f"round{j}", 200) for j in (i, i + 1)})


def sixteen(server: Server) -> None:
    """Sixteen requests at once that share prefixes, twice."""
    for turn in range(2):
        server.serve(
            {
                f"{turn}.{i}": prompt(f"system{i % 3}", 96) + prompt(f"user{i}", 20 + 5 * i)
                for i in range(16)
            },
            tokens=12,
        )
        server.flood(str(turn))


def aborted(server: Server) -> None:
    """Requests of which some are aborted at random moments, while the others go on."""
    rng = random.Random("aborts")
    texts = {str(i): prompt(f"system{i % 3}", 96) + prompt(f"user{i}", 90) for i in range(9)}
    for turn in range(5):
        requests = {f"{turn}.{name}": text for name, text in texts.items()}
        doomed = rng.sample(sorted(requests), 4)
        server.serve_stepwise(requests, aborts={name: rng.randrange(1, 30) for name in doomed})
        server.flood(str(turn), 2)


def emptied(server: Server) -> None:
    """The model changes, and the caches are emptied; then while a prompt is loaded, and while two
    are computed, which start again."""
    first = prompt("a", 200)
    server.serve({"first": first})
    server.flood("a")
    server.serve({"again": first})
    server.change_weights()
    assert server.empty()
    server.serve({"changed": first})
    server.flood("b")
    server.serve({"changed again": first})
    server.flood("c")
    server.serve_stepwise(
        {"while loading": first}, between=lambda step: step == 1 and server.empty()
    )
    server.flood("d")
    server.serve({"after": first})
    server.serve_stepwise(
        {"running": first, "running too": prompt("b", 150)},
        between=lambda step: step == 8 and server.restart(),
    )
    server.flood("e")
    server.serve({"in the end": first})


def not_emptied(server: Server) -> None:
    """The control of ``emptied``: the model changes, and only the GPU's cache is emptied."""
    first = prompt("a", 200)
    server.serve({"first": first})
    server.flood("a")
    server.change_weights()
    assert server.llm.reset_prefix_cache()
    server.serve({"changed": first})


def one_by_one(server: Server) -> None:
    """Six prompts, one at a time, and again once the GPU's cache is empty: 36 full blocks of 16."""
    for turn in range(2):
        for i in range(6):
            # One token more, which is computed whatever is cached: vLLM decodes it, because its CPU
            # build cannot compute more than one after KV with a latent that is there already.
            server.serve({f"{turn}.{i}": prompt(f"one{i}", 6 * 16 + 1)})
        settle(server.llm)
        assert server.llm.reset_prefix_cache()


WORKLOADS: dict[str, Callable[[Server], None]] = {
    workload.__name__: workload
    for workload in (
        comes_back,
        crowd,
        preempted,
        rounds,
        sixteen,
        aborted,
        emptied,
        not_emptied,
        one_by_one,
    )
}


@contextmanager
def report_twice() -> Iterator[None]:
    """Hook: each worker reports every job twice."""
    from kvoffload_rs.vllm.connector.worker import WorkerSide

    take = WorkerSide.take_reports

    def twice(side: WorkerSide) -> Any:
        reports = take(side)
        if reports is not None:
            reports.ends *= 2
        return reports

    WorkerSide.take_reports = twice  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkerSide.take_reports = take  # type: ignore[method-assign]


@contextmanager
def async_scheduling() -> Iterator[None]:
    """Hook: schedules a step while the one before it runs, which vLLM turns off on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    kept, check = vars(CpuPlatform)["check_and_update_config"], CpuPlatform.check_and_update_config

    def keep_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(keep_on)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = kept


HOOKS: dict[str | None, Callable[[], AbstractContextManager[None]]] = {
    None: nullcontext,
    "async_scheduling": async_scheduling,
    "report_twice": report_twice,
}


class Log(logging.Handler):
    """Keeps vLLM's warnings of this process, which are those of the engine if it is here."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(record.getMessage())


def start_engine(case: Case) -> Any:
    """The engine with 16 blocks of 32 tokens, unless ``case.engine`` says otherwise."""
    from support.tiny_models import make_model
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if case.extra is not None:
        transfer = KVTransferConfig(
            kv_role="kv_both", kv_connector_extra_config=case.extra, **case.transfer
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


def connector_of(llm: Any) -> Any:
    """The scheduler's connector, if the scheduler lives in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return getattr(getattr(core, "scheduler", None), "connector", None)


def requests_that_load(llm: Any) -> set[str]:
    """The requests that KvOffloadConnector is loading, if the engine lives in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if connector_of(llm) is None:
        return set()
    loads = get_kv_transfer_group().worker_side._loads.values()
    # vLLM makes a request's name its own with a suffix.
    return {order.request.rpartition("-")[0] for _, order in loads}


def settle(llm: Any) -> None:
    """Step until the engine has nothing more to do, which requests do not wait for."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        time.sleep(0.5)  # it does so itself, and counts are a quarter of a second old at most
        Server(llm).serve({"settle": prompt("settle", 5)}, tokens=2)
        return
    give_up = time.monotonic() + 30
    while core.scheduler.has_requests():
        assert time.monotonic() < give_up, "the engine is not done"
        llm.llm_engine.step()
        time.sleep(0.001)


def state_of(llm: Any) -> dict[str, Any]:
    """The offloading connector's counters, and what is left in it."""
    connector = connector_of(llm)
    if connector is None:
        return {"pool": None, "connector": None, "left_over": None}
    if hasattr(connector, "connector_scheduler"):  # vLLM's connector with our spec
        pool = connector.connector_scheduler.manager.stats()
        return {"pool": pool, "connector": None, "left_over": None}
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side, worker = connector.scheduler_side, get_kv_transfer_group().worker_side
    side.core.validate()
    pool = side.core.pool_stats()
    left_over = {
        "jobs": side.core.num_jobs,
        "requests": side.core.num_requests,
        "requests in Python": len(side._requests),
        "pinned": pool["pinned"],
        "writing": pool["writing"],
        "waiting stores": len(worker._waiting),
        "loads": len(worker._loads),
        "late loads": len(worker._late),
        "failed jobs": len(worker._failed),
        "unreported": len(worker._reports.ends) + len(worker._done) + len(worker._bad_blocks),
    }
    return {"pool": pool, "connector": side.core.stats(), "left_over": left_over}


def run(case: Case) -> dict[str, Any]:
    """Start an engine, serve the case's workload and say what came of it."""
    os.environ.update(case.environment)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(case.own_process))
    start = time.monotonic()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import configure_logging_if_needed

    # The first engine would do so, and drop other handlers.
    configure_logging_if_needed(EngineArgs(model=case.models).create_logging_config())
    log = Log()
    logger = logging.getLogger("vllm")
    logger.addHandler(log)
    try:
        with HOOKS[case.hook]():
            llm = start_engine(case)
            started = time.monotonic()
            server = Server(llm)
            WORKLOADS[case.workload](server)
            settle(llm)
            result = {
                "outputs": server.outputs,
                "cached": server.cached,
                "aborted_loads": server.aborted_loads,
                "metrics": metrics_of(llm),
                **state_of(llm),
                "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
                "log": log.lines,
                "start_seconds": round(started - start, 2),
                "serve_seconds": round(time.monotonic() - started, 2),
            }
    finally:
        logger.removeHandler(log)
    return result | {"llm": llm}


def main() -> None:
    """Run the case of the command line, or those of standard input."""
    # vLLM prints, too: all but results goes to standard error.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.argv[1:] or sys.stdin:
        result = run(Case(**json.loads(line)))
        llm = result.pop("llm")
        print("RESULT " + json.dumps(result), file=results, flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


if __name__ == "__main__":  # the engine's own process imports this module again
    main()
