"""The real scheduler of each supported vLLM release, without a GPU.

It drives our spec through vLLM's connector, and our connector. One process per release, connector
and chunk size runs every scenario of ``support/rig/*scenarios.py``; each scenario is a test here.
Every step checks every byte that attention would have read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
# What only our connector can do.
OUR_SCENARIOS = (
    "failed_loads",
    "failed_loads_async",
    "failed_loads_on_one_rank",
    "failed_loads_hybrid",
    "failed_stores",
    "failed_stores_on_one_rank",
    "load_that_hangs",
    "load_that_hangs_on_one_rank",
    "reports_repeated",
    "ranks_out_of_step",
    "reset_during_load_hybrid",
    "ends_with_slow_copies",
    "chunked_local",
    "other_block_sizes",
    "states",
    "states_async",
    "replicated",
    "replicated_with_failures",
    "replicated_with_resets",
    "deferral_with_deadline",
    "all_wait_for_each_other",
)
CHUNK_SIZES = (1, 2)
CONNECTORS = {
    "OffloadingConnector": (VERSIONS, SCENARIOS),
    "KvOffloadConnector": (VERSIONS[2:], SCENARIOS + OUR_SCENARIOS),
}
# Packages that a release imports and a current environment lacks.
STUBBED = {"0.21.0": [TESTS / "support" / "stubs"]}

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def driven(vllm_release: Callable[[str], Path]) -> Iterator[Callable[[str, str, int], Results]]:
    """Results of all scenarios by name, for a connector, a release and a chunk size.

    Each of these runs once.
    """
    kept: dict[tuple[str, str, int], Future[Results]] = {}

    def run(connector: str, version: str, blocks_per_chunk: int, folder: Path) -> Results:
        arguments = ["--connector", connector, "--blocks-per-chunk", str(blocks_per_chunk)]
        path = [folder, *STUBBED.get(version, [])]
        result = run_module("support.rig.drive", arguments, path=path)
        assert result["version"].startswith(version), result["version"]
        scenarios: Results = result["scenarios"]
        assert list(scenarios) == list(CONNECTORS[connector][1]), "the lists above are not right"
        return scenarios

    def drive(connector: str, version: str, blocks_per_chunk: int) -> Results:
        folder = vllm_release(version)
        if (connector, version, blocks_per_chunk) not in kept:
            # Most of a process's time goes into imports, on one core: two at once.
            for size in CHUNK_SIZES:
                future = pool.submit(run, connector, version, size, folder)
                kept[connector, version, size] = future
        return kept[connector, version, blocks_per_chunk].result()

    with ThreadPoolExecutor(len(CHUNK_SIZES)) as pool:
        yield drive


@pytest.mark.parametrize(
    ("connector", "version", "blocks_per_chunk", "scenario"),
    [
        (connector, version, blocks_per_chunk, scenario)
        for connector, (versions, scenarios) in CONNECTORS.items()
        for version in versions
        for blocks_per_chunk in CHUNK_SIZES
        for scenario in scenarios
    ],
)
def test_real_scheduler(
    driven: Callable[[str, str, int], Results],
    connector: str,
    version: str,
    blocks_per_chunk: int,
    scenario: str,
) -> None:
    """The scenario ran to its end: right bytes, nothing left over."""
    result = driven(connector, version, blocks_per_chunk)[scenario]
    if "skipped" in result:
        pytest.skip(f"vLLM {version}: {result['skipped']}")
    assert "error" not in result, result["error"]
