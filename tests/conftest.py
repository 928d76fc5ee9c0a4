"""Fixtures for tests that start vLLM, each time in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.engine_runs import EngineCase, EngineRun, RunEngine
from support.process import RELEASES, ROOT, ModuleServer, run_module

OFFLINE = "KVOFFLOAD_OFFLINE"


def _fetch_module() -> ModuleType:
    location = ROOT / "scripts" / "fetch_vllm.py"
    spec = importlib.util.spec_from_file_location("fetch_vllm", location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def vllm_release() -> Callable[[str], Path]:
    """The folder with a vLLM release's Python files; fetched if it is not there.

    With KVOFFLOAD_OFFLINE set, a release that is not there skips the test.
    """
    fetch_vllm = _fetch_module()

    def folder(version: str) -> Path:
        if not fetch_vllm.is_present(version, RELEASES) and os.environ.get(OFFLINE):
            pytest.skip(f"vLLM {version} is not in .vllm, and {OFFLINE} is set")
        try:
            path: Path = fetch_vllm.fetch(version, RELEASES)
        except subprocess.CalledProcessError as error:
            pytest.fail(f"vLLM {version} could not be downloaded (set {OFFLINE} to skip): {error}")
        return path

    return folder


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunEngine]:
    """Serve a case with an offloading configuration, or without (None: run once and kept).

    One process has one engine after another, but for cases that need a process of their own.
    """
    shared = ModuleServer("support.engine_case")
    models = str(tmp_path_factory.mktemp("models"))
    references: dict[str, EngineRun] = {}

    def run(
        case: EngineCase,
        extra: dict[str, Any] | None,
        transfer: dict[str, Any] | None = None,
        hook: str | None = None,
        fresh: bool = False,
    ) -> EngineRun:
        key = json.dumps(asdict(case), sort_keys=True)
        if extra is None and key in references:
            return references[key]
        arguments = asdict(case) | {"models": models, "extra": extra, "hook": hook}
        if transfer is not None:
            arguments["transfer"] = transfer
        line = json.dumps(arguments)
        if case.own_process or case.environment or fresh:
            done = EngineRun(**run_module("support.engine_case", [line]))
        else:
            done = EngineRun(**shared.ask(line))
        if extra is None:
            references[key] = done
        return done

    yield run
    shared.close()
