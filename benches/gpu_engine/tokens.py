"""Equal tokens: answers from KV that came back from host memory, and from an engine without any.

Compared are runs in which the engine computes the same shapes: an answer from host memory with one
from the GPU's prefix cache, one request at a time. Runs of several requests at once are made in
vLLM's batch-invariant mode with a small GPU cache; the reference's own differences are reported
beside (its `noise`), and any difference of ours counts as a failure only where that is nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_engine import processes
from gpu_engine.engine import GRAPHS, Answer, Engine, Setup, prompt
from gpu_engine.models import write_model
from gpu_engine.tables import table
from gpu_engine.watch import summary

LIMIT_S = 180.0
BLOCK = 16
TOKENS, CROWD_TOKENS = 24, 64
SMALL_CACHE = 700
"""GPU blocks of the crowded engine: a third of what its requests need."""

#: Kind of a child, its backend, and its injected faults.
KINDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "reference": ("none", None),
    "ours": ("kvoffload", None),
    "control": ("kvoffload", {"loads": "nothing"}),
    "connector": ("connector", None),
    "connector-control": ("connector", {"loads": "nothing"}),
    "connector-failing": ("connector", {"fail_every_load": 3}),
    "crowd-reference": ("none", None),
    "crowd": ("kvoffload", None),
}


def lengths(count: int, longest: int) -> list[int]:
    """Lengths from 300 (less for a short `longest`) up, no whole number of blocks.

    With such a prompt a hit leaves the same tokens to compute, wherever it was found.
    """
    shortest = min(300, longest // 2)
    step = (longest - shortest) / max(count - 1, 1)
    return [
        length - 3 if length % BLOCK == 0 else length
        for length in (int(shortest + step * number) for number in range(count))
    ]


def child(job: dict[str, Any]) -> None:
    """One engine that answers every prompt in several ways."""
    engine = Engine(Setup(**job["setup"]))
    prompts = [
        prompt(f"tokens{number}", length, job["last_token"])
        for number, length in enumerate(lengths(job["requests"], job["longest"]))
    ]
    processes.say({"row": "engine", **engine.facts()})
    if job["kind"].startswith("crowd"):
        row = _crowd(engine, prompts)
    else:
        row = _single(engine, prompts, job["last_token"])
    processes.say(
        {
            "row": "answers",
            **row,
            "preemptions": engine.watch.preemptions,
            "failures": engine.watch.failures,
            "stats": engine.watch.stats(),
        }
    )
    engine.close()


def _answers(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def _one_by_one(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    return [engine.serve([tokens_of], tokens)[1][0] for tokens_of in prompts]


def _single(engine: Engine, prompts: list[list[int]], last: int) -> dict[str, Any]:
    """One request at a time: cold, from the GPU, and (unless it is the reference) from the host.

    Then new requests together with the known ones, which arrive while others are decoded.
    """
    offloading = engine.setup.backend != "none"
    cold = _one_by_one(engine, prompts, TOKENS)
    hit = _one_by_one(engine, prompts, TOKENS)
    if offloading:
        engine.drop(scrub=True)
        engine.watch.take()
    again = _one_by_one(engine, prompts, TOKENS)
    engine.drain()
    loads = summary(engine.watch.take(), store=False)
    if offloading:
        engine.drop(scrub=True)
    fresh = [prompt(f"fresh{number}", min(len(prompts[0]), 301), last) for number in range(4)]
    counts = [3 * TOKENS] * len(fresh) + [TOKENS] * len(prompts)
    _, mixed = engine.serve([*fresh, *prompts], counts)
    engine.drain()
    return {
        "cold": _answers(cold),
        "hit": _answers(hit),
        "again": _answers(again),
        "mixed": _answers(mixed[len(fresh) :]),
        "hit_cached": [answer.cached for answer in hit],
        "again_cached": [answer.cached for answer in again],
        "again_loads": loads,
        "mixed_loads": summary(engine.watch.take(), store=False),
    }


def _crowd(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Everything at once with too few GPU blocks, twice, and one at a time before."""
    alone = []
    for tokens_of in prompts:
        alone += engine.serve([tokens_of], CROWD_TOKENS)[1]
        engine.drop()
    engine.watch.take()
    crowds = []
    for _ in range(2):
        _, answers = engine.serve(prompts, CROWD_TOKENS)
        engine.drain()
        crowds.append(_answers(answers))
    return {
        "alone": _answers(alone),
        "crowd": crowds[0],
        "crowd_again": crowds[1],
        "crowd_loads": summary(engine.watch.take(), store=False),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this measurement."""
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--runner", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--graphs", nargs="+", default=["none", "full"], choices=GRAPHS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=tuple(KINDS))
    parser.add_argument(
        "--sync", action="store_true", help="the scheduler does not run a step ahead"
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest prompt")
    parser.add_argument("--shape", default="small")
    parser.add_argument("--parallel", type=int, default=2, help="engines at once on the GPU")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one engine")


def parent(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Every combination; several engines at once, because nothing is timed."""
    for heads in options.heads:  # before two children write the same file
        write_model(options.shape, heads, Path(Setup.models), weights=True)
    cases = [
        (heads, runner, graphs)
        for heads in options.heads
        for runner in options.runner
        for graphs in options.graphs
    ]
    with ThreadPoolExecutor(options.parallel) as pool:
        futures = {
            (case, kind): pool.submit(_run, options, logs, case, kind)
            for case in cases
            for kind in options.kinds
        }
        done = {key: future.result() for key, future in futures.items()}
    runs = []
    for case in cases:
        found = {kind: done[case, kind] for kind in options.kinds}
        heads, runner, graphs = case
        label = {"heads": heads, "runner": runner, "graphs": graphs}
        runs.append({**label, "verdict": judge(found), "children": found})
    return {"runs": runs, "ok": all(run["verdict"]["ok"] for run in runs)}


def _run(
    options: argparse.Namespace, logs: Path, case: tuple[int, int, str], kind: str
) -> dict[str, Any]:
    heads, runner, graphs = case
    backend, faults = KINDS[kind]
    crowded = kind.startswith("crowd")
    llm: dict[str, Any] = {
        "max_model_len": options.longest + 112,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
    }
    if options.sync:
        llm["async_scheduling"] = False
    if options.shape == "cpu":
        llm |= {"num_gpu_blocks_override": 40 if crowded else 256, "block_size": 32}
    else:
        llm |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30}
        if crowded:
            llm["num_gpu_blocks_override"] = SMALL_CACHE
    setup = Setup(
        model=options.shape,
        kv_heads=heads,
        runner=runner,
        backend=backend,
        weights=True,
        graphs=graphs,
        faults=faults,
        llm=llm,
    )
    job = {
        "kind": kind,
        "setup": asdict(setup),
        "requests": options.requests,
        "longest": options.longest,
        "last_token": 31_000,
    }
    log = logs / f"tokens-{heads}-v{runner}-{graphs}-{kind}.log"
    error = ""
    # Invariant kernels need Triton. Without them the noise says how far a difference counts.
    modes = [True, False] if crowded and options.shape != "cpu" else [False]
    for invariant in modes:
        variables = {"VLLM_BATCH_INVARIANT": "1"} if invariant else {}
        try:
            rows = processes.run(
                "tokens", job, log, runner=runner, limit_s=options.limit, environment=variables
            )
        except processes.ChildFailed as failure:
            error = str(failure)
            log = log.with_name(f"{log.stem}-again.log")
        else:
            return {"invariant": invariant, "engine": rows[0], "answers": rows[1]}
    return {"error": error}


def differing(one: Sequence[list[int]], other: Sequence[list[int]]) -> int:
    """How many requests were answered differently."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def judge(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of requests that differ, and whether all is as it must be."""
    errors = {kind: run["error"] for kind, run in found.items() if "error" in run}
    verdict: dict[str, Any] = {"errors": errors}
    answers = {kind: run["answers"] for kind, run in found.items() if "error" not in run}
    problems = list(errors)
    reference, ours = answers.get("reference"), answers.get("ours")
    if reference and ours:
        count = len(reference["hit"])
        verdict |= {
            "requests": count,
            "different_answers": len({tuple(tokens) for tokens in reference["hit"]}),
            "reference_noise": differing(reference["hit"], reference["again"]),
            "cold": differing(ours["cold"], reference["cold"]),
            "gpu_hit": differing(ours["hit"], reference["hit"]),
            "from_host": differing(ours["again"], reference["hit"]),
            "mixed": differing(ours["mixed"], reference["mixed"]),
            "mixed_noise": differing(reference["mixed"], reference["again"]),
            "load_jobs": ours["again_loads"]["jobs"],
            "mixed_load_jobs": ours["mixed_loads"]["jobs"],
        }
        whole = ours["again_cached"] == reference["hit_cached"] and min(ours["again_cached"]) > 0
        loaded = ours["again_loads"]["jobs"] >= count
        problems += [name for name in ("cold", "gpu_hit", "from_host") if verdict[name]]
        problems += ["reference not reproducible"] if verdict["reference_noise"] else []
        problems += [] if whole and loaded else ["not everything came from host memory"]
        problems += ["answers all alike"] if verdict["different_answers"] < count // 2 else []
    problems += _judge_connector(answers, verdict)
    control = answers.get("control")
    if reference and control:
        verdict["control"] = differing(control["again"], reference["hit"])
        problems += [] if verdict["control"] else ["the control does not differ"]
    reference, ours = answers.get("crowd-reference"), answers.get("crowd")
    if reference and ours:
        passes = ("crowd", "crowd_again")
        noise = sum(differing(reference[name], reference["alone"]) for name in passes)
        crowd = sum(differing(ours[name], reference["alone"]) for name in passes)
        verdict |= {
            "crowd": crowd,
            "crowd_noise": noise,
            "crowd_invariant": found["crowd"]["invariant"]
            and found["crowd-reference"]["invariant"],
            "crowd_load_jobs": ours["crowd_loads"]["jobs"],
            "crowd_preemptions": ours["preemptions"],
            "crowd_reference_preemptions": reference["preemptions"],
        }
        problems += ["crowd"] if crowd and not noise else []
        problems += [] if ours["crowd_loads"]["jobs"] else ["the crowd loaded nothing"]
    return verdict | {"problems": problems, "ok": not problems}


def _judge_connector(
    answers: Mapping[str, Mapping[str, Any]], verdict: dict[str, Any]
) -> list[str]:
    """The same of our connector: as it is, with loads that copy nothing, with some that fail."""
    reference = answers.get("reference")
    if not reference:
        return []
    problems = []
    plain, failing = answers.get("connector"), answers.get("connector-failing")
    for name, run in (("connector", plain), ("connector-failing", failing)):
        if not run:
            continue
        wrong = differing(run["cold"], reference["cold"]) + differing(run["hit"], reference["hit"])
        again = _expected(run, reference) if run is failing else reference["hit"]
        wrong += differing(run["again"], again)
        verdict[name] = wrong
        verdict[f"{name}_load_jobs"] = run["again_loads"]["jobs"]
        problems += [name] if wrong else []
    if plain and plain["again_cached"] != reference["hit_cached"]:
        problems.append("connector: not everything came from host memory")
    if failing:
        verdict["connector_failures"] = failing["failures"]
        problems += [] if failing["failures"] else ["connector-failing: nothing failed"]
    control = answers.get("connector-control")
    if control:
        verdict["connector_control"] = differing(control["again"], reference["hit"])
        problems += [] if verdict["connector_control"] else ["connector: the control is equal"]
    return problems


def _expected(run: Mapping[str, Any], reference: Mapping[str, Any]) -> list[list[int]]:
    """What requests answer that found their KV in host memory, or computed it after a failed load.

    The latter compute the shapes of a cold run, whose rounding gives other tokens than a hit's.
    """
    rows = zip(run["again_cached"], reference["hit"], reference["cold"], strict=True)
    return [hit if cached else cold for cached, hit, cold in rows]


def show(answer: dict[str, Any]) -> str:
    """Requests that differ, of all."""
    names = ["requests", "reference_noise", "cold", "gpu_hit", "from_host", "control"]
    names += ["mixed", "mixed_noise", "crowd", "crowd_noise", "crowd_load_jobs"]
    names += ["crowd_preemptions", "connector", "connector_control", "connector-failing"]
    names += ["connector_failures"]
    rows: list[Sequence[object]] = []
    notes = []
    for run in answer["runs"]:
        verdict = run["verdict"]
        label = (run["heads"], f"v{run['runner']}", run["graphs"])
        rows.append((*label, *(verdict.get(name) for name in names), verdict["ok"]))
        notes += [f"{label}: {problem}" for problem in verdict["problems"]]
        notes += [f"{label} {kind}: {error[-600:]}" for kind, error in verdict["errors"].items()]
    headings = ["heads", "runner", "graphs", *names, "ok"]
    return "\n".join([table(headings, rows), "(requests answered differently)", *notes])
