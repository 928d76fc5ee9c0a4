"""The real vLLM engine on a CPU: with offloading, every token is what it is without.

A control whose loads copy nothing must answer differently, so that equality means something.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_runs import EngineCase, EngineRun, RunEngine

pytestmark = pytest.mark.engine

BLOCK = 32
SLOT_BYTES = 4 * 16384  # one block of the four layers of the tests' models
BY_MODULE = {"spec_name": "KvOffloadSpec", "spec_module_path": "kvoffload_rs.vllm"}
BY_PLUGIN = {"spec_name": "KvOffloadSpec"}  # found through the entry point
PLENTY = {"cpu_bytes_to_use": "64MiB"}
VERIFIED = {"verify": "all"}
SLOW = {"fault_injection": {"seed": 1, "max_delay_us": 3000}}

COMES_BACK = EngineCase("comes_back")
HYBRID = EngineCase("comes_back", model="hybrid", engine={"num_gpu_blocks_override": 24})


def assert_same(run: EngineRun, reference: EngineRun) -> None:
    """Every token equals the run without offloading, which is not one token over and over."""
    assert all(len(set(tokens)) > 4 for tokens in reference.outputs.values())
    assert run.differs_from(reference) == []


def assert_came_back(run: EngineRun, reference: EngineRun) -> None:
    """The evicted prompt came from the host pool; without it, it was computed again."""
    assert reference.cached["again"] == 0
    assert run.cached["again"] == 6 * BLOCK
    assert run.metrics["vllm:external_prefix_cache_hits"] >= 6 * BLOCK
    assert run.metrics["vllm:kv_offload_load_bytes"] > 0
    assert run.metrics["vllm:kv_offload_store_bytes"] > 0


def assert_idle(run: EngineRun) -> None:
    """Nothing is pinned or half written when all requests are done."""
    pool = run.pool
    assert pool is not None
    assert pool["pinned"] == 0
    assert pool["free"] + pool["ready"] + pool["writing"] == pool["slots"]


@pytest.mark.parametrize(
    ("case", "extra"),
    [
        pytest.param(COMES_BACK, BY_PLUGIN, id="found by the plug-in"),
        pytest.param(COMES_BACK, BY_MODULE | SLOW, id="slow copies"),
        pytest.param(COMES_BACK, BY_MODULE | {"blocks_per_chunk": 2}, id="two blocks per chunk"),
        pytest.param(COMES_BACK, BY_MODULE | {"block_size": 96} | SLOW, id="three, slow"),
        pytest.param(COMES_BACK, BY_MODULE | {"eviction_policy": "arc"}, id="arc"),
        pytest.param(
            EngineCase("comes_back", engine={"max_num_batched_tokens": 64}),
            BY_MODULE | SLOW,
            id="chunked prefill",
        ),
        pytest.param(HYBRID, BY_MODULE, id="hybrid"),
        pytest.param(HYBRID, BY_MODULE | {"blocks_per_chunk": 2} | SLOW, id="hybrid, two, slow"),
    ],
)
def test_what_was_evicted_comes_back(
    run_engine: RunEngine, case: EngineCase, extra: dict[str, Any]
) -> None:
    """A prompt whose KV left the GPU is served from the host pool, with the same tokens."""
    reference = run_engine(case, None)
    run = run_engine(case, PLENTY | VERIFIED | extra)
    assert_same(run, reference)
    assert_came_back(run, reference)
    assert_idle(run)


def test_engine_in_its_own_process(run_engine: RunEngine) -> None:
    """As ``vllm serve`` runs it; what crosses the border is pickled."""
    reference = run_engine(COMES_BACK, None)
    case = EngineCase("comes_back", own_process=True)
    run = run_engine(case, PLENTY | VERIFIED | BY_PLUGIN | SLOW)
    assert_same(run, reference)
    assert_came_back(run, reference)


def test_tensor_parallel(run_engine: RunEngine) -> None:
    """Two workers, each with half of the heads and its own region."""
    case = EngineCase("comes_back", own_process=True, engine={"tensor_parallel_size": 2})
    reference = run_engine(case, None)
    run = run_engine(case, PLENTY | VERIFIED | BY_MODULE | SLOW)
    assert_same(run, reference)
    assert_came_back(run, reference)


@pytest.mark.parametrize("loads", ["nothing", "neighbour"])
@pytest.mark.parametrize("case", [COMES_BACK, HYBRID], ids=["full", "hybrid"])
def test_control_differs(run_engine: RunEngine, case: EngineCase, loads: str) -> None:
    """Loads that copy nothing, or another slot, are seen in exactly the answers that used them."""
    reference = run_engine(case, None)
    run = run_engine(case, PLENTY | BY_MODULE | {"fault_injection": {"seed": 1, "loads": loads}})
    assert run.cached["again"] == 6 * BLOCK
    assert set(run.differs_from(reference)) == {"again", "longer"}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_crowd_in_a_tiny_pool(run_engine: RunEngine, policy: str) -> None:
    """Several requests at once and so few slots that the pool evicts and refuses."""
    case = EngineCase("crowd")
    extra = {
        "cpu_bytes_to_use": 12 * SLOT_BYTES,
        "eviction_policy": policy,
        "fault_injection": {"seed": 2, "max_delay_us": 30_000},
    }
    run = run_engine(case, BY_MODULE | VERIFIED | extra)
    assert_same(run, run_engine(case, None))
    assert_idle(run)
    assert run.pool is not None
    assert run.pool["slots"] == 12
    assert run.pool["evicted"] > 0
    assert run.pool["refused"] > 0
    assert run.cached["alone again"] == 3 * BLOCK
    assert run.metrics["vllm:external_prefix_cache_hits"] > 0


@pytest.mark.parametrize("prompt_only", [True, False])
def test_preemption(run_engine: RunEngine, prompt_only: bool) -> None:
    """Requests that outgrow the GPU are preempted and come back, in part from the host."""
    case = EngineCase("preempted")
    reference = run_engine(case, None)
    extra = {"offload_prompt_only": prompt_only}
    run = run_engine(case, PLENTY | VERIFIED | BY_MODULE | SLOW | extra)
    assert_same(run, reference)
    assert_idle(run)
    assert run.metrics["vllm:num_preemptions"] > 0
    assert run.metrics["vllm:external_prefix_cache_hits"] > 0
