"""Starts one engine in a process of its own, follows its events and never leaves it behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvoffload_rs.cli.progress import Progress
from kvoffload_rs.errors import ConfigError, KvOffloadError

COMMAND = (sys.executable, "-m", "kvoffload_rs.cli.engine_run")

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # One thread per engine: more do not help a tiny model, and busy machines slow them down.
    "OMP_NUM_THREADS": "1",
    # Block hashes are then the same in every run.
    "PYTHONHASHSEED": "0",
}

SILENCE_S = 600.0
"""An engine that reports nothing for so long counts as hung."""

_EXIT_S = 60.0
_TAIL_LINES = 20


class EngineError(KvOffloadError):
    """An engine of the demo died, hung or reported an error."""


def run_engine(
    name: str, job: dict[str, Any], directory: Path, progress: Progress
) -> dict[str, Any]:
    """Run one engine over ``job`` and return its result.

    The job file and the engine's log are written into ``directory``. Whatever happens, no process
    is left when this returns. Raises EngineError with the end of the log, or ConfigError if the
    engine refused a setting.
    """
    stem = name.replace(" ", "-")
    job_file, log_file = directory / f"{stem}.json", directory / f"{stem}.log"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    progress.starting(name, len(job["requests"]))
    result: dict[str, Any] | None = None
    with log_file.open("wb") as log:
        # A session of its own: Ctrl-C reaches this process only, which then ends the whole group.
        process = subprocess.Popen(
            [*COMMAND, str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        try:
            for event in _events(process, name, log_file):
                match event["event"]:
                    case "ready":
                        progress.ready(event["seconds"])
                    case "progress":
                        progress.done(event["done"])
                    case "result":
                        result = event
                    case "error":
                        kind = ConfigError if event["kind"] == "config" else EngineError
                        raise kind(f"{name}: {event['message']}")
            status = _wait(process)
        finally:
            _end(process)
    if status != 0 or result is None:
        raise EngineError(f"{name}: the engine {_how_it_ended(status)}. {_tail(log_file)}")
    return result


def _events(
    process: subprocess.Popen[bytes], name: str, log_file: Path
) -> Iterator[dict[str, Any]]:
    """The engine's events until it closes its output or ends."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    buffer = b""
    last = time.monotonic()
    while True:
        if not select.select([pipe], [], [], 0.5)[0]:
            # Something that the engine started may hold the pipe open after its end.
            if process.poll() is not None:
                return
            if time.monotonic() - last > SILENCE_S:
                raise EngineError(
                    f"{name}: the engine reported nothing for {SILENCE_S:.0f} s and was ended. "
                    f"{_tail(log_file)}"
                )
            continue
        part = os.read(pipe, 1 << 16)
        if not part:
            return
        last = time.monotonic()
        *lines, buffer = (buffer + part).split(b"\n")
        yield from map(json.loads, lines)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status of a process that closed its output; None if it does not exit."""
    try:
        return process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the engine and everything it started: politely, then by force."""
    for sign, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        # The group outlives its leader while any process is left in it.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        deadline = time.monotonic() + patience_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    if process.stdout is not None:
        process.stdout.close()


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return f"did not exit within {_EXIT_S:.0f} s after its last request"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _tail(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(["The end of its log (--keep-logs keeps it all):", "", *lines[-_TAIL_LINES:]])
