"""Children: one process an engine, rows of JSON among whatever else they print."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "ROW "
HERE = Path(__file__).resolve().parent

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's parts are looked at from its process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class ChildFailed(RuntimeError):
    """A child ended early, or took too long."""


def say(row: Mapping[str, Any]) -> None:
    """Prints a row, in a child."""
    print(MARK + json.dumps(row), flush=True)


class Child:
    """A running child.

    Args:
        kind: which measurement.
        job: its arguments, as JSON.
        log: file for everything it prints.
        runner: model runner, 1 or 2.
        environment: more variables.
    """

    def __init__(
        self,
        kind: str,
        job: Mapping[str, Any],
        log: Path,
        *,
        runner: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.begin = time.monotonic()
        variables = {**os.environ, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
        variables |= environment or {}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE), "child", kind, json.dumps(job)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._rows: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def row(self, limit_s: float) -> dict[str, Any]:
        """The next row.

        Raises:
            ChildFailed: there is none in time.
        """
        try:
            row = self._rows.get(timeout=max(limit_s, 0.001))
        except queue.Empty:
            self.end()
            raise ChildFailed(f"no answer within {limit_s:.0f} s: {self.log}") from None
        if row is None:
            code = self._process.wait()
            raise ChildFailed(f"ended with status {code}: {self.log}\n{tail(self.log)}")
        return row

    def rest(self, limit_s: float) -> list[dict[str, Any]]:
        """Every row until the child says that it is complete, `limit_s` after its start at most.

        Raises:
            ChildFailed: it took longer or failed.
        """
        rows: list[dict[str, Any]] = []
        while True:
            try:
                row = self._rows.get(timeout=max(self.begin + limit_s - time.monotonic(), 0.001))
            except queue.Empty:
                self.end()
                raise ChildFailed(f"not done within {limit_s:.0f} s: {self.log}") from None
            if row is None:
                code = self._process.wait()
                raise ChildFailed(f"ended with status {code}: {self.log}\n{tail(self.log)}")
            if row["row"] == "end":
                return rows
            rows.append(row)

    def ask(self, command: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Sends a command and waits for its row."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self.row(limit_s)

    def wait(self, limit_s: float = 30.0) -> None:
        """Lets the child end by itself, and ends it and what it started after `limit_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        self.end()

    def end(self) -> None:
        """Ends the child, with what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                # Another line may have been begun on the same one.
                at = line.find(MARK)
                if at >= 0:
                    with contextlib.suppress(json.JSONDecodeError):
                        self._rows.put(json.loads(line[at + len(MARK) :]))
        self._rows.put(None)


def run(
    kind: str,
    job: Mapping[str, Any],
    log: Path,
    *,
    runner: int,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs a child to its end and returns its rows.

    Raises:
        ChildFailed: it failed or took longer than `limit_s`.
    """
    child = Child(kind, job, log, runner=runner, environment=environment)
    try:
        return child.rest(limit_s)
    finally:
        child.wait()


def mentions(log: Path, words: Sequence[str], most: int = 3) -> list[str]:
    """The first lines of a log that hold one of the words."""
    if not log.exists():
        return []
    lines = log.read_text(errors="replace").splitlines()
    return [line[-300:] for line in lines if any(word in line for word in words)][:most]


def tail(log: Path, characters: int = 3000) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""
