"""Runs a module of ``tests`` in a process of its own and reads the result lines it prints."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
RELEASES = ROOT / ".vllm"
MARK = "RESULT "

# What vLLM needs to stay small, quiet, off the network and reproducible. One thread per process:
# on a shared machine more threads than free cores make a step a hundred times slower.
QUIET_VLLM = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CACHE_ROOT": str(RELEASES / "cache"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class ProcessFailed(AssertionError):
    """The process ended without a result."""


def _python(module: str) -> list[str]:
    # -P: the current directory must not hide a package of PYTHONPATH.
    return [sys.executable, "-P", "-W", "ignore", "-m", module]


def _environment(path: Sequence[Path]) -> Mapping[str, str]:
    folders = [*map(str, path), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | QUIET_VLLM | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def run_module(
    module: str, arguments: Sequence[str], *, path: Sequence[Path] = (), timeout_s: float = 600.0
) -> dict[str, Any]:
    """Run ``module`` with ``path`` and ``tests`` first on the path; return its result.

    Raises ``ProcessFailed`` with the end of the output if there is none.
    """
    command = [*_python(module), *arguments]
    process = subprocess.Popen(
        command,
        env=_environment(path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        ending = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children, too
        output, _ = process.communicate()
        ending = f"killed after {timeout_s} s"
    lines = output.splitlines()
    results = [line for line in lines if line.startswith(MARK)]
    if process.returncode != 0 or len(results) != 1:
        tail = "\n".join(lines[-60:])
        raise ProcessFailed(f"{' '.join(command)}\n{ending}; the end of its output:\n{tail}")
    result: dict[str, Any] = json.loads(results[0].removeprefix(MARK))
    return result


class ModuleServer:
    """A module that stays and answers one result line for each line it is given.

    It is started with the first question, and again after one that it did not survive.
    """

    def __init__(self, module: str, *, path: Sequence[Path] = ()) -> None:
        self._module = module
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (kept open)

    def ask(self, line: str, *, timeout_s: float = 300.0) -> dict[str, Any]:
        """The answer to ``line``. Raises ``ProcessFailed`` if there is none."""
        if self._process is None:
            self._process = subprocess.Popen(
                _python(self._module),
                env=_environment(self._path),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._log.seek(0, os.SEEK_END)
        begin = self._log.tell()
        answer = ""
        try:
            print(line, file=self._process.stdin, flush=True)
            if select.select([self._process.stdout], [], [], timeout_s)[0]:
                answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if answer.startswith(MARK):
            result: dict[str, Any] = json.loads(answer.removeprefix(MARK))
            return result
        self.close()
        self._log.seek(begin)
        tail = "".join(self._log.readlines()[-60:])
        raise ProcessFailed(f"{self._module} {line}\nno answer; the end of its output:\n{tail}")

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=30)  # the end of its input ends it
        except (subprocess.TimeoutExpired, BrokenPipeError):
            os.killpg(process.pid, signal.SIGKILL)  # its children, too
            process.communicate()
