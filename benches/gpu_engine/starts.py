"""Starts with CUDA graphs while a large region is registered in the background.

The control's threads keep the capture mode that threads are born with, in which a capture breaks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_engine import processes
from gpu_engine.engine import GRAPHS, Engine, Setup, prompt
from gpu_engine.models import write_model
from gpu_engine.tables import table
from gpu_engine.watch import summary

LIMIT_S = 120.0
LENGTHS = (333, 777, 1501, 2999)
TOKENS = 24
FULL_GPU = 0.97

#: What CUDA and our errors say of a broken capture.
CAPTURE_WORDS = ("StreamCapture", "STREAM_CAPTURE", "stream is capturing", "during capture")


def child(job: dict[str, Any]) -> None:
    """One start and a few answers, at once: the region may still be registered meanwhile."""
    engine = Engine(Setup(**job["setup"]))
    stats = engine.watch.stats()
    processes.say({"row": "engine", **engine.facts(), "registered_at_start": stats})
    prompts = [
        prompt(f"start{number}", min(length, job["longest"] - number), 31_000)
        for number, length in enumerate(LENGTHS)
    ]
    answers: dict[str, list[list[int]]] = {}
    cached: list[int] = []
    for kind in ("cold", "hit", "again"):
        if kind == "again" and engine.setup.backend != "none":
            engine.drop(scrub=True)
            engine.watch.take()
        given = [engine.serve([tokens], TOKENS)[1][0] for tokens in prompts]
        answers[kind] = [answer.tokens for answer in given]
        cached = [answer.cached for answer in given]
    engine.drain()
    processes.say(
        {
            "row": "answers",
            **answers,
            "again_cached": cached,
            "again_loads": summary(engine.watch.take(), store=False),
            "stats": engine.watch.stats(),
        }
    )
    engine.close()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--controls", type=int, default=3, help="starts with the fault, at most")
    parser.add_argument("--gib", type=int, default=40, help="GiB of the region")
    parser.add_argument("--graphs", default="full", choices=GRAPHS)
    parser.add_argument("--runner", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--no-full-gpu", action="store_true", help="leave out the start at 0.97")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one start")


def parent(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """The reference of each runner, the starts in turns, the full GPU, and the controls."""
    write_model(options.shape, options.heads, Path(Setup.models), weights=True)
    references = {runner: _run(options, logs, "reference", runner) for runner in options.runner}
    runs = []
    for number in range(options.starts):
        runner = options.runner[number % len(options.runner)]
        runs.append(_judged(_run(options, logs, f"start{number}", runner), references[runner]))
    answer: dict[str, Any] = {"references": list(references.values()), "starts": runs}
    good = all(run["right"] for run in runs) and not any(
        "error" in reference for reference in references.values()
    )
    if not options.no_full_gpu:
        runner = options.runner[-1]
        full = _judged(_run(options, logs, "full-gpu", runner), references[runner])
        answer["full_gpu"] = full
        good = good and full["right"]
    controls: list[dict[str, Any]] = []
    for number in range(options.controls):
        runner = options.runner[number % len(options.runner)]
        run = _run(options, logs, f"control{number}", runner)
        controls.append(_judged(run, references[runner]))
        if controls[-1].get("says"):
            break
    answer["controls"] = controls
    broke = any(run.get("says") for run in controls)
    return answer | {"control_broke": broke, "ok": good and (broke or not controls)}


def _run(options: argparse.Namespace, logs: Path, name: str, runner: int) -> dict[str, Any]:
    llm: dict[str, Any] = {"max_model_len": 3072, "max_num_seqs": 64}
    if options.shape == "cpu":
        llm |= {"max_model_len": 512, "num_gpu_blocks_override": 128, "block_size": 32}
    elif name == "full-gpu":
        llm["gpu_memory_utilization"] = FULL_GPU
    else:
        llm |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30}
    setup = Setup(
        model=options.shape,
        kv_heads=options.heads,
        runner=runner,
        backend="none" if name == "reference" else "kvoffload",
        host_bytes=options.gib << 30,
        weights=True,
        graphs=options.graphs,
        faults={"keep_capture_mode": 1} if name.startswith("control") else None,
        llm=llm,
    )
    job = {"setup": asdict(setup), "longest": llm["max_model_len"] - TOKENS - 16}
    log = logs / f"starts-v{runner}-{name}.log"
    try:
        rows = processes.run("starts", job, log, runner=runner, limit_s=options.limit)
    except processes.ChildFailed as error:
        says = processes.mentions(log, CAPTURE_WORDS)
        return {"name": name, "runner": runner, "error": str(error), "says": says}
    says = processes.mentions(log, CAPTURE_WORDS)
    return {"name": name, "runner": runner, "says": says, "engine": rows[0], "answers": rows[1]}


def _judged(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Whether a start gave the reference's answers, all of them from host memory in the end."""
    if "error" in run or "error" in reference:
        return run | {"right": False}
    ours, theirs = run["answers"], reference["answers"]
    registered = run["engine"]["registered_at_start"]
    return run | {
        "right": ours["cold"] == theirs["cold"]
        and ours["hit"] == theirs["hit"]
        and ours["again"] == theirs["hit"]
        and ours["again_loads"]["jobs"] >= len(ours["again"]),
        "captured_while_registering": any(
            capture["registered_before"] < capture["region_bytes"]
            for capture in run["engine"]["captures"]
        ),
        "registered_share_at_start": round(
            registered.get("registered_bytes", 0) / max(registered.get("region_bytes", 1), 1), 3
        ),
    }


def show(answer: dict[str, Any]) -> str:
    """One line a start."""
    rows: list[Sequence[object]] = []
    notes = []
    runs = [*answer["references"], *answer["starts"], *answer["controls"]]
    if "full_gpu" in answer:
        runs.append(answer["full_gpu"])
    for run in runs:
        engine = run.get("engine", {})
        rows.append(
            (
                run["name"],
                f"v{run['runner']}",
                engine.get("start_s"),
                engine.get("worker_s"),
                engine.get("cudagraph_mode"),
                "; ".join(str(capture["seconds"]) for capture in engine.get("captures", [])),
                run.get("captured_while_registering"),
                run.get("registered_share_at_start"),
                run.get("right"),
            )
        )
        if "error" in run:
            notes.append(f"{run['name']}: {run['error'][-600:]}")
    headings = ["start", "runner", "seconds", "worker_s", "graphs", "capture_s"]
    headings += ["while_registering", "registered", "right"]
    says = [line for run in answer["controls"] for line in run.get("says", [])]
    notes.append(f"the control's capture broke: {answer['control_broke']} {says[:1]}")
    return "\n".join([table(headings, rows), *notes])
