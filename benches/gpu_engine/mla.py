"""MLA with two ranks: host memory keeps what both hold once, and gives it to both.

The connector gets memory for one copy of the prompts, which must then all come from there with
equal tokens. With a copy for each rank the same memory holds half: not all of them come back.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_engine import memory, processes
from gpu_engine.engine import GRAPHS, Answer, Engine, Setup, prompt
from gpu_engine.latent import LATENT_SHAPES, write_latent_model
from gpu_engine.tables import table
from gpu_engine.tokens import differing, lengths

LIMIT_S = 180.0
BLOCK = 16
RANKS = 2
TOKENS = 24
SPARE = 1.25
"""Host memory over what one copy of the prompts needs; a copy for each rank needs 2."""

#: Kind of a child, its backend, and its settings.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("none", {}),
    "connector": ("connector", {}),
    "connector-control": ("connector", {"fault_injection": {"loads": "nothing"}}),
    "connector-separate": ("connector", {"share_replicated_kv": False}),
}


def prompt_lengths(shape: str, count: int, longest: int) -> list[int]:
    """As for Llama. On a CPU one token more than whole blocks: vLLM decodes it, because its CPU
    build cannot compute more than one after a latent that is there already."""
    found = lengths(count, longest)
    return [length // BLOCK * BLOCK + 1 for length in found] if shape == "cpu" else found


def whole_blocks(length: int) -> int:
    """Tokens of a prompt that can come from a cache: whole blocks, and not the last token."""
    return (length - 1) // BLOCK * BLOCK


def child(job: dict[str, Any]) -> None:
    """One engine that answers every prompt cold, from the GPU, and from the host."""
    engine = Engine(Setup(**job["setup"]))
    prompts = [
        prompt(f"mla{number}", length, job["last_token"])
        for number, length in enumerate(job["lengths"])
    ]
    processes.say({"row": "engine", **engine.facts()})
    offloading = engine.setup.backend != "none"
    cold = _one_by_one(engine, prompts)
    hit = _one_by_one(engine, prompts)
    if offloading:
        engine.drop()
        # The KV cache is in other processes: other prompts overwrite all of it, and are not stored.
        blocks = engine.facts()["gpu_blocks"]
        longest = max(job["lengths"])
        for number in range(blocks * BLOCK // longest + 2):
            engine.serve([prompt(f"flood{number}", longest, job["last_token"])], offload=False)
        engine.drop()
    again = _one_by_one(engine, prompts)
    engine.drain()
    processes.say(
        {
            "row": "answers",
            "cold": [answer.tokens for answer in cold],
            "hit": [answer.tokens for answer in hit],
            "again": [answer.tokens for answer in again],
            "hit_cached": [answer.cached for answer in hit],
            "again_cached": [answer.cached for answer in again],
            "memory": memory.host_memory(memory.children()),
            "connector": _connector_counts(engine),
        }
    )
    engine.close()


def _one_by_one(engine: Engine, prompts: Sequence[list[int]]) -> list[Answer]:
    return [engine.serve([tokens_of], TOKENS)[1][0] for tokens_of in prompts]


def _connector_counts(engine: Engine) -> dict[str, int]:
    """Our connector's counters, which are on the scheduler's side; empty without it."""
    core = engine.llm.llm_engine.engine_core.engine_core
    side = getattr(core.scheduler.connector, "scheduler_side", None)
    return dict(side.core.metrics()) if side is not None else {}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--runner", type=int, default=1, choices=(1, 2))
    parser.add_argument("--graphs", default="none", choices=GRAPHS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=tuple(KINDS))
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest prompt")
    parser.add_argument("--shape", default="small", choices=("small", "cpu"))
    parser.add_argument(
        "--attention", default="TRITON_MLA", help="vLLM's backend; this one is without libraries"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one engine")


def parent(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """One kind after another: each needs all ranks' GPUs."""
    write_latent_model(f"mla-{options.shape}", Path(Setup.models), weights=True)
    found = {kind: _run(options, logs, kind) for kind in options.kinds}
    wanted = prompt_lengths(options.shape, options.requests, options.longest)
    verdict = judge(found, [whole_blocks(length) for length in wanted])
    return {"lengths": wanted, "verdict": verdict, "children": found, "ok": verdict["ok"]}


def _run(options: argparse.Namespace, logs: Path, kind: str) -> dict[str, Any]:
    backend, extra = KINDS[kind]
    name = f"mla-{options.shape}"
    wanted = prompt_lengths(options.shape, options.requests, options.longest)
    blocks = sum(whole_blocks(length) // BLOCK for length in wanted)
    llm: dict[str, Any] = {
        "tensor_parallel_size": RANKS,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,  # not every pair of GPUs may map the other's memory
        "max_model_len": options.longest + 112,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK,
        "dtype": LATENT_SHAPES[name].dtype,  # vLLM would make something smaller of float32
        # Every prompt with its answer, so that a hit on the GPU is one, and no more.
        "num_gpu_blocks_override": blocks + len(wanted) * 4 + options.longest // BLOCK,
    }
    # The ranks are new processes: a fork of one that has asked CUDA for its devices cannot use it.
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if options.shape == "cpu":
        llm |= {
            "attention_config": {"backend": "CPU_MLA"},
            # vLLM 0.32's own kernel for CPUs turns queries that are parts of a row wrongly.
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        }
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    else:
        llm |= {
            "attention_config": {"backend": options.attention},
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 4 << 30,
        }
    setup = Setup(
        model=name,
        runner=options.runner,
        backend=backend,
        host_bytes=int(blocks * SPARE) * BLOCK * LATENT_SHAPES[name].kv_bytes_per_token,
        weights=True,
        graphs=options.graphs,
        extra=extra,
        llm=llm,
    )
    job = {"setup": asdict(setup), "lengths": wanted, "last_token": 31_000}
    try:
        rows = processes.run(
            "mla",
            job,
            logs / f"mla-{kind}.log",
            runner=options.runner,
            limit_s=options.limit,
            environment=environment,
        )
    except processes.ChildFailed as failure:
        return {"error": str(failure)}
    return {"engine": rows[0], "answers": rows[1]}


def judge(found: Mapping[str, Mapping[str, Any]], wanted: Sequence[int]) -> dict[str, Any]:
    """Requests that differ, tokens that came from host memory, and whether that is right.

    Args:
        found: what the children said, by kind.
        wanted: tokens of each prompt that host memory can give.
    """
    errors = {kind: run["error"] for kind, run in found.items() if "error" in run}
    answers = {kind: run["answers"] for kind, run in found.items() if "error" not in run}
    problems = list(errors)
    rows: dict[str, dict[str, Any]] = {}
    reference = answers.get("reference")
    for kind, run in answers.items():
        counts = run["connector"]
        rows[kind] = {
            "hit_cached": sum(run["hit_cached"]),
            "host_cached": sum(run["again_cached"]) if kind != "reference" else None,
            "slots": counts.get("pool_slots"),
            "loads": counts.get("loads_done"),
            "stores": counts.get("stores_done"),
            **run["memory"],
        }
        if reference:
            rows[kind] |= {
                "cold": differing(run["cold"], reference["cold"]),
                "gpu_hit": differing(run["hit"], reference["hit"]),
                "from_host": differing(run["again"], _expected(run, reference)),
            }
            ways = ["cold", "gpu_hit", "from_host"]
            if kind == "connector-control":
                # vLLM has no prefix cache for MLA on a CPU: there the hits are the host's, too.
                ways = ["cold", "gpu_hit"] if any(reference["hit_cached"]) else ["cold"]
            problems += [f"{kind}: {way}" for way in ways if rows[kind][way]]
    if reference:
        different = len({tuple(tokens) for tokens in reference["hit"]})
        problems += [] if different > len(wanted) // 2 else ["answers all alike"]
        if "connector-control" in rows and not rows["connector-control"]["from_host"]:
            problems.append("the control does not differ")
    for kind in ("connector", "connector-control"):
        if kind in answers and answers[kind]["again_cached"] != list(wanted):
            problems.append(f"{kind}: not everything came from host memory")
    if "connector" in rows and rows["connector"]["region_ranks"] != RANKS:
        problems.append("connector: the ranks do not share a region")
    if "connector-separate" in rows:
        if sum(answers["connector-separate"]["again_cached"]) >= sum(wanted):
            problems.append("connector-separate: all came from memory for half")
        if rows["connector-separate"]["region_ranks"]:
            problems.append("connector-separate: the ranks share a region")
    return {
        "requests": len(wanted),
        "host_tokens": sum(wanted),
        "kinds": rows,
        "errors": errors,
        "problems": problems,
        "ok": not problems,
    }


def _expected(run: Mapping[str, Any], reference: Mapping[str, Any]) -> list[list[int]]:
    """The reference's answers to prompts that come from a cache, or are computed, as in a run."""
    ways = ["hit" if cached else "cold" for cached in run["again_cached"]]
    return [reference[way][number] for number, way in enumerate(ways)]


def show(answer: dict[str, Any]) -> str:
    """A row for each kind."""
    verdict = answer["verdict"]
    names = ["cold", "gpu_hit", "from_host", "hit_cached", "host_cached", "slots", "stores"]
    names += ["loads", "pss_mib", "region_mib", "region_ranks"]
    rows = [[kind, *(row.get(name) for name in names)] for kind, row in verdict["kinds"].items()]
    note = (
        f"({verdict['requests']} requests; cold, gpu_hit, from_host: answered differently; "
        f"{verdict['host_tokens']} tokens can come from host memory)"
    )
    errors = [f"{kind}: {error[-600:]}" for kind, error in verdict["errors"].items()]
    return "\n".join([table(["kind", *names], rows), note, *verdict["problems"], *errors])
