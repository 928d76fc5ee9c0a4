"""Runs a module of ``tests`` in a process of its own and reads the one result line it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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


def run_module(
    module: str, arguments: Sequence[str], *, path: Sequence[Path] = (), timeout_s: float = 600.0
) -> dict[str, Any]:
    """Run ``module`` with ``path`` and ``tests`` first on the path; return its result.

    Raises ``ProcessFailed`` with the end of the output if there is none.
    """
    environment: Mapping[str, str] = os.environ | QUIET_VLLM
    folders = [*map(str, path), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    # -P: the current directory must not hide a package of the path above.
    command = [sys.executable, "-P", "-W", "ignore", "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        env=environment,
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
