"""The real scheduler and connector of each supported vLLM release drive our spec, without a GPU.

One process per release and chunk size runs every scenario of ``support/rig/scenarios.py``; each
scenario is a test here. Every step checks every byte that attention would have read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.process import TESTS, run_module

pytestmark = pytest.mark.versions

VERSIONS = ("0.21.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0", "0.32.0", "0.33.0")
SCENARIOS = (
    "round_trip",
    "round_trip_slow",
    "round_trip_async",
    "two_ranks",
    "outputs_too",
    "reset_in_flight",
    "reset_in_flight_async",
    "reset_after_finish",
    "reset_during_load",
    "preemption",
    "preemption_async",
    "tiny_pool",
    "abort_in_flight",
    "hybrid",
    "churn",
    "churn_async",
    "churn_hybrid",
    "control_nothing",
    "control_neighbour",
    "control_no_reset",
)
# Packages that a release imports and a current environment lacks.
STUBBED = {"0.21.0": [TESTS / "support" / "stubs"]}

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def driven(vllm_release: Callable[[str], Path]) -> Callable[[str, int], Results]:
    """Results of all scenarios by name, for a release and a chunk size; each pair runs once."""
    kept: dict[tuple[str, int], Results | BaseException] = {}

    def drive(version: str, blocks_per_chunk: int) -> Results:
        folder = vllm_release(version)
        key = (version, blocks_per_chunk)
        if key not in kept:
            arguments = [*SCENARIOS, "--blocks-per-chunk", str(blocks_per_chunk)]
            path = [folder, *STUBBED.get(version, [])]
            try:
                result = run_module("support.rig.drive", arguments, path=path)
                assert result["version"].startswith(version), result["version"]
                kept[key] = result["scenarios"]
            except AssertionError as failure:
                kept[key] = failure
        answer = kept[key]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return drive


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("version", VERSIONS)
def test_real_scheduler(
    driven: Callable[[str, int], Results], version: str, blocks_per_chunk: int, scenario: str
) -> None:
    """The scenario ran to its end: right bytes, nothing left over."""
    result = driven(version, blocks_per_chunk)[scenario]
    if "skipped" in result:
        pytest.skip(f"vLLM {version}: {result['skipped']}")
    assert "error" not in result, result["error"]
