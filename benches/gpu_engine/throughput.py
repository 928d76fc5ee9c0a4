"""New prompts in bulk, with and without storing their KV.

`engines`: two engines at once on one GPU, one without offloading; only one is given work at a time.
`policy`: one engine whose requests say whether vLLM's connector may store them. "Off" then still
includes the connector's steps and its lookups, and the KV cache layout that the connector chose.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_engine import processes
from gpu_engine.engine import Engine, Setup, prompt
from gpu_engine.tables import spread, table
from gpu_engine.watch import one_dma_rates, summary

PROMPTS, LENGTH, TOKENS = 64, 4096, 32
START_S, BATCH_S = 240.0, 90.0
KV_BYTES = 40 << 30


def child(job: dict[str, Any]) -> None:
    """An engine that serves one batch for each line of its standard input."""
    dma = one_dma_rates() or {}
    engine = Engine(Setup(**job["setup"]))
    late = engine.watch.wait_registered()
    processes.say(
        {"row": "engine", **engine.facts(), "one_dma": dma, "registered_late_s": round(late, 2)}
    )
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        prompts = [
            prompt(f"{command['seed']}.{number}", job["length"]) for number in range(job["prompts"])
        ]
        engine.watch.take()
        before = engine.watch.preemptions
        seconds, answers = engine.serve(prompts, job["tokens"], offload=command["offload"])
        drained = engine.drain()
        processes.say(
            {
                "row": "batch",
                "seconds": seconds,
                "drain_s": round(drained, 3),
                "cached": sum(answer.cached for answer in answers),
                "preemptions": engine.watch.preemptions - before,
                "store": summary(engine.watch.take(), store=True, one_dma=dma.get("d2h")),
            }
        )
    engine.close()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--pairs", type=int, default=12, help="pairs, after one to warm up")
    parser.add_argument("--mode", default="engines", choices=("engines", "policy"))
    parser.add_argument("--runner", type=int, default=2, choices=(1, 2))
    parser.add_argument(
        "--backend", default="kvoffload", choices=("kvoffload", "connector", "native")
    )
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--graphs", default="none", choices=("none", "full", "default"))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no pair after these")
    parser.add_argument("--host-bytes", type=int, default=40_000_000_000)


def parent(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Pairs of batches, one with and one without offloading, in turns off-on and on-off."""
    begin = time.monotonic()
    on = off = None
    engines: dict[str, Any] = {}
    pairs: list[dict[str, Any]] = []
    error = None
    try:
        on = _start(options, options.backend, logs)
        engines["on"] = on.row(START_S)
        if options.mode == "engines":
            off = _start(options, "none", logs)
            engines["off"] = off.row(START_S)
        for number in range(options.pairs + 1):
            if time.monotonic() - begin > options.minutes * 60:
                break
            pair: dict[str, Any] = {}
            for kind in ("off", "on") if number % 2 else ("on", "off"):
                child = on if kind == "on" or off is None else off
                # The same prompts on both engines; on one engine they must be new every time.
                seed = f"{number}" if off is not None else f"{number}{kind}"
                command = {"do": "batch", "seed": seed, "offload": kind == "on"}
                pair[kind] = child.ask(command, BATCH_S)
                time.sleep(0.1)
            if number:
                pairs.append(pair)
        for engine in (on, off):
            if engine is not None:
                with contextlib.suppress(processes.ChildFailed):  # everything is measured
                    engine.ask({"do": "end"}, 30.0)
    except processes.ChildFailed as failure:
        error = str(failure)
    finally:
        for engine in (on, off):
            if engine is not None:
                engine.wait(0.0 if error else 30.0)
    answer: dict[str, Any] = {"mode": options.mode, "engines": engines, "pairs": pairs}
    if error:
        answer["error"] = error
    if pairs:
        seconds = {kind: [pair[kind]["seconds"] for pair in pairs] for kind in ("off", "on")}
        ratios = [pair["on"]["seconds"] / pair["off"]["seconds"] for pair in pairs]
        answer |= {f"{kind}_s": spread(values, 3) for kind, values in seconds.items()}
        answer["ratio"] = spread(ratios, 4)
        answer["ratio_of_medians"] = round(answer["on_s"]["median"] / answer["off_s"]["median"], 4)
    answer["ok"] = error is None and len(pairs) >= min(12, options.pairs)
    return answer


def _start(options: argparse.Namespace, backend: str, logs: Path) -> processes.Child:
    llm: dict[str, Any] = {"max_model_len": options.length + 64}
    if options.shape == "cpu":
        llm |= {"num_gpu_blocks_override": 256, "block_size": 32}
    else:
        # The same number of GPU blocks in both, whatever else is in the GPU's memory.
        llm |= {
            "gpu_memory_utilization": 0.4,
            "kv_cache_memory_bytes": KV_BYTES,
            "max_num_batched_tokens": 16_384,
        }
    setup = Setup(
        model=options.shape,
        kv_heads=options.heads,
        runner=options.runner,
        backend=backend,
        host_bytes=options.host_bytes,
        graphs=options.graphs,
        llm=llm,
    )
    job = {
        "setup": asdict(setup),
        "prompts": options.prompts,
        "length": options.length,
        "tokens": TOKENS,
    }
    log = logs / f"throughput-v{options.runner}-{backend}.log"
    return processes.Child("throughput", job, log, runner=options.runner)


def show(answer: dict[str, Any]) -> str:
    """Medians and quartiles."""
    lines = []
    if "ratio" in answer:
        rows = [
            (kind, *(answer[key][part] for part in ("median", "q1", "q3")))
            for kind, key in (("off", "off_s"), ("on", "on_s"), ("on/off", "ratio"))
        ]
        lines.append(table(["seconds", "median", "q1", "q3"], rows))
        lines.append(
            f"{len(answer['pairs'])} pairs, ratio of medians {answer['ratio_of_medians']}; "
            f"last stores: {answer['pairs'][-1]['on']['store']}"
        )
    if answer["mode"] == "policy":
        lines.append("off: the same engine; its connector looks up, steps and stores nothing")
    if "error" in answer:
        lines.append(answer["error"])
    return "\n".join(lines)
