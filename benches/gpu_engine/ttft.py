"""Time to the first token: computed, from the GPU's prefix cache, and from host memory.

The weights are vLLM's dummy ones, whose answers are all alike: `tokens` compares answers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_engine import processes
from gpu_engine.engine import Engine, Setup, prompt
from gpu_engine.tables import spread, table
from gpu_engine.watch import one_dma_rates, summary

LIMIT_S = 240.0
HOST_BYTES = {8: 40_000_000_000, 1: 20_000_000_000}


def child(job: dict[str, Any]) -> None:
    """One engine: a row about its start, then one for each length of the prompt."""
    dma = one_dma_rates() or {}
    engine = Engine(Setup(**job["setup"]))
    late = engine.watch.wait_registered()
    processes.say(
        {"row": "engine", **engine.facts(), "one_dma": dma, "registered_late_s": round(late, 2)}
    )
    lengths = job["prompts"]
    for length in (300, min(lengths)):  # to warm up
        engine.serve([prompt(f"warm{length}", length, job["last_token"])])
    for length in lengths:
        processes.say(_measure(engine, length, job["reps"], job["last_token"], dma))
    engine.close()


def _measure(
    engine: Engine, length: int, reps: int, last: int, dma: dict[str, float]
) -> dict[str, Any]:
    times: dict[str, list[float]] = {"cold": [], "gpu_hit": [], "host": []}
    cached: dict[str, list[int]] = {"cold": [], "gpu_hit": [], "host": []}
    loads, stores = [], []
    for rep in range(reps):
        tokens = prompt(f"{length}.{rep}", length, last)
        engine.watch.take()
        for kind in times:
            if kind == "host":
                engine.drop()
            seconds, (answer,) = engine.serve([tokens])
            times[kind].append(seconds * 1e3)
            cached[kind].append(answer.cached)
            engine.drain()  # the last stores are not submitted before the next step
            if kind == "cold":
                jobs = engine.watch.take()
                stores.append(summary(jobs, store=True, one_dma=dma.get("d2h")))
        loads.append(summary(engine.watch.take(), store=False, one_dma=dma.get("h2d")))
        engine.drop()
    hits = [found >= length - 64 for found in cached["host"]]
    return {
        "row": "ttft",
        "prompt": length,
        "reps": reps,
        **{f"{kind}_ms": spread(values) for kind, values in times.items()},
        "cached": cached,
        "host_hits_nearly_whole": all(hits),
        "load": _middle(loads),
        "store": _middle(stores),
        "loads": loads,
        "stores": stores,
        "stats": engine.watch.stats(),
    }


def _middle(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure."""
    full = [entry for entry in summaries if entry["jobs"]]
    names = full[0] if full else {}
    return {
        name: round(statistics.median(entry[name] for entry in full), 3)
        for name in names
        if full[0][name] is not None
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--runner", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--backends", default="native,kvoffload", help="none,native,kvoffload")
    parser.add_argument("--prompts", type=int, nargs="+", default=[65_024, 8_192])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one engine")
    parser.add_argument("--host-bytes", type=int, help="host pool; 40 GB for 8 heads, 20 for 1")


def parent(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Every engine in turn; the order of the backends changes with every setting."""
    runs: list[dict[str, Any]] = []
    backends = options.backends.split(",")
    for heads in options.heads:
        for runner in options.runner:
            for backend in backends:
                runs.append(_run(options, logs, heads, runner, backend))
            backends = backends[::-1]
    return {"runs": runs, "ok": all("error" not in run for run in runs)}


def _run(
    options: argparse.Namespace, logs: Path, heads: int, runner: int, backend: str
) -> dict[str, Any]:
    llm: dict[str, Any] = {"max_model_len": max(options.prompts) + 976}
    if options.shape == "cpu":
        llm |= {"num_gpu_blocks_override": 64, "block_size": 32}
    else:
        llm |= {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 16_384}
    setup = Setup(
        model=options.shape,
        kv_heads=heads,
        runner=runner,
        backend=backend,
        host_bytes=options.host_bytes or HOST_BYTES.get(heads, 20_000_000_000),
        llm=llm,
    )
    job = {
        "setup": asdict(setup),
        "prompts": options.prompts,
        "reps": options.reps,
        "last_token": 31_000,
    }
    label = {"heads": heads, "runner": runner, "backend": backend}
    log = logs / f"ttft-{heads}-v{runner}-{backend}.log"
    try:
        rows = processes.run("ttft", job, log, runner=runner, limit_s=options.limit)
    except processes.ChildFailed as error:
        return {**label, "error": str(error)}
    engine, *measured = rows
    return {**label, "engine": engine, "prompts": measured}


def show(answer: dict[str, Any]) -> str:
    """A table of the medians, and one line for every engine."""
    cells: list[Sequence[object]] = []
    notes = []
    for run in answer["runs"]:
        name = (run["heads"], f"v{run['runner']}", run["backend"])
        if "error" in run:
            notes.append(f"{name}: {run['error'][-600:]}")
            continue
        engine = run["engine"]
        notes.append(
            f"{name}: start {engine['start_s']} s, of it worker {engine['worker_s']} s, "
            f"runner V{engine['runner']}, layout {engine['layout']}"
        )
        for row in run["prompts"]:
            load, store = row["load"], row["store"]
            cells.append(
                (
                    *name,
                    row["prompt"],
                    *(row[f"{kind}_ms"]["median"] for kind in ("cold", "gpu_hit", "host")),
                    row["cached"]["host"][-1],
                    *(load.get(key) for key in ("event_ms", "wall_ms", "dma_ms")),
                    *(store.get(key) for key in ("event_ms", "wall_ms", "dma_ms")),
                )
            )
            if run["backend"] != "none" and not row["host_hits_nearly_whole"]:
                notes.append(f"{name}: NOT read back whole: cached {row['cached']['host']}")
    headings = ["heads", "runner", "backend", "prompt", "cold", "gpu_hit", "host", "cached"]
    headings += ["load_ev", "load_wall", "load_dma", "store_ev", "store_wall", "store_dma"]
    return "\n".join([table(headings, cells), "(times in ms)", *notes])
