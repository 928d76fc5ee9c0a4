"""KvOffloadConnector in the real engine on a CPU: every token is what it is without offloading.

A control whose loads copy nothing must answer differently, so that equality means something. Faults
are injected, too: the engine lives, computes what could not be loaded, and says what happened.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine_runs import EngineCase, EngineRun, RunEngine
from support.process import ProcessFailed

pytestmark = pytest.mark.engine

BLOCK = 32
SLOT_BYTES = 4 * 16384  # one block of the four layers of the tests' models
BY_PLUGIN = {"kv_connector": "KvOffloadConnector"}  # found through the entry point
BY_MODULE = BY_PLUGIN | {"kv_connector_module_path": "kvoffload_rs.vllm"}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
CONNECTOR = BY_MODULE | RECOMPUTE
PLENTY = {"cpu_bytes_to_use": "64MiB", "verify": "all"}


def faults(**plan: Any) -> dict[str, Any]:
    """Settings with injected faults."""
    return {"fault_injection": {"seed": 1} | plan}


SLOW = faults(max_delay_us=3000)

ROOM = {"num_gpu_blocks_override": 24}  # the fewest that a request of the hybrid model needs
COMES_BACK = EngineCase("comes_back")
HYBRID = EngineCase("comes_back", model="hybrid", engine=ROOM)
ROUNDS = EngineCase("rounds", engine=ROOM)
ABORTED = EngineCase("aborted", engine=ROOM)
MODELS = pytest.mark.parametrize("model", ["full", "hybrid"])
ASYNC = "async_scheduling"
MODES = pytest.mark.parametrize(
    ("model", "hook"),
    [
        pytest.param("full", None, id="full"),
        pytest.param("hybrid", None, id="hybrid"),
        pytest.param("full", ASYNC, id="full, async"),
        pytest.param("hybrid", ASYNC, id="hybrid, async"),
    ],
)


def assert_same(run: EngineRun, reference: EngineRun) -> None:
    """Every token equals the run without offloading, which is not one token over and over."""
    assert all(len(set(tokens)) > 4 for tokens in reference.outputs.values())
    assert run.differs_from(reference) == []


def assert_came_back(run: EngineRun, reference: EngineRun) -> None:
    """The evicted prompt came from the host pool; without it, it was computed again."""
    assert reference.cached["again"] == 0
    assert run.cached["again"] == 6 * BLOCK
    assert run.metrics["vllm:external_prefix_cache_hits"] >= 6 * BLOCK
    assert run.metrics["vllm:kvoffload_loads_begun"] > 0
    assert run.metrics["vllm:kvoffload_moved_store_bytes"] > 0


def counts_of(run: EngineRun) -> dict[str, int]:
    """The connector's counters; all jobs that began have ended."""
    counts = run.connector
    assert counts is not None
    for kind in ("loads", "stores"):
        ends = sum(counts[f"{kind}_{end}"] for end in ("done", "failed", "voided"))
        assert counts[f"{kind}_begun"] == ends
    return counts


def assert_no_faults(run: EngineRun) -> None:
    """Loads and stores were made, and all of them ended well."""
    counts = counts_of(run)
    assert counts["loads_done"] > 0
    assert counts["stores_done"] > 0
    trouble = ("loads_failed", "stores_failed", "loads_voided", "stores_voided", "stray_reports")
    assert {name: counts[name] for name in trouble if counts[name]} == {}


def assert_nothing_left(run: EngineRun) -> None:
    """No request, no job, nothing pinned or half written, on neither side."""
    assert run.left_over is not None
    assert {name: count for name, count in run.left_over.items() if count} == {}
    assert run.pool is not None
    assert run.pool["free"] + run.pool["ready"] == run.pool["slots"]


# --- without faults ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_plugin(run_engine: RunEngine) -> EngineRun:
    """A run with as few settings as possible, in a new process."""
    return run_engine(COMES_BACK, PLENTY, BY_PLUGIN, fresh=True)


def test_found_by_the_plugin(run_engine: RunEngine, by_plugin: EngineRun) -> None:
    """The name alone is enough."""
    reference = run_engine(COMES_BACK, None)
    assert_same(by_plugin, reference)
    assert_came_back(by_plugin, reference)
    assert_no_faults(by_plugin)
    assert_nothing_left(by_plugin)


@pytest.mark.parametrize(
    ("model", "engine", "extra"),
    [
        pytest.param("full", {}, SLOW, id="slow copies"),
        pytest.param("full", {"max_num_batched_tokens": 64}, SLOW, id="chunked prefill"),
        pytest.param("full", {}, {"blocks_per_chunk": 2}, id="two blocks per chunk"),
        pytest.param("full", {}, {"block_size": 96} | SLOW, id="three, slow"),
        pytest.param("hybrid", ROOM, SLOW, id="hybrid, slow"),
        pytest.param("hybrid", ROOM, {"blocks_per_chunk": 2} | SLOW, id="hybrid, two, slow"),
    ],
)
def test_what_was_evicted_comes_back(
    run_engine: RunEngine, model: str, engine: dict[str, Any], extra: dict[str, Any]
) -> None:
    """A prompt whose KV left the GPU is served from the host pool, with the same tokens."""
    reference = run_engine(COMES_BACK if model == "full" else HYBRID, None)
    case = EngineCase("comes_back", model=model, engine=engine)
    run = run_engine(case, PLENTY | extra, CONNECTOR)
    assert not run.async_scheduling  # the platform's default
    assert_same(run, reference)
    assert_came_back(run, reference)
    assert_no_faults(run)
    assert_nothing_left(run)


@pytest.mark.parametrize("case", [COMES_BACK, HYBRID], ids=["full", "hybrid"])
def test_control_differs(run_engine: RunEngine, case: EngineCase) -> None:
    """Loads that copy nothing are seen in exactly the answers that used them."""
    reference = run_engine(case, None)
    extra = {"cpu_bytes_to_use": "64MiB"} | faults(loads="nothing")
    run = run_engine(case, extra, CONNECTOR)
    assert run.cached["again"] == 6 * BLOCK
    assert set(run.differs_from(reference)) == {"again", "longer"}


@pytest.mark.parametrize("hook", [None, ASYNC], ids=["sync", "async"])
def test_preemption_with_all_tokens_stored(run_engine: RunEngine, hook: str | None) -> None:
    """Requests that outgrow the GPU lose their blocks and come back, with what they generated."""
    case = EngineCase("preempted")
    extra = PLENTY | SLOW | {"offload_prompt_only": False}
    run = run_engine(case, extra, CONNECTOR, hook)
    assert run.async_scheduling == (hook == ASYNC)
    assert_same(run, run_engine(case, None))
    assert_no_faults(run)
    assert_nothing_left(run)
    assert run.metrics["vllm:num_preemptions"] > 0
    # Four prompts of 100 tokens have 12 chunks, and four floods of 200 have 24.
    assert counts_of(run)["stores_chunks"] > 12 + 24


def test_sixteen_at_once(run_engine: RunEngine) -> None:
    """Requests that share prefixes wait for each other's loads instead of loading twice."""
    case = EngineCase("sixteen", engine={"max_num_seqs": 16, "num_gpu_blocks_override": 40})
    run = run_engine(case, PLENTY | SLOW, CONNECTOR)
    assert_same(run, run_engine(case, None))
    assert_no_faults(run)
    assert_nothing_left(run)
    assert all(run.cached[f"1.{i}"] >= 3 * BLOCK for i in range(16))
    assert counts_of(run)["deferred_loading"] > 0


def test_crowd_in_a_tiny_pool(run_engine: RunEngine) -> None:
    """ARC, and so few slots that the pool evicts all the time."""
    case = EngineCase("crowd")
    extra = {"cpu_bytes_to_use": 12 * SLOT_BYTES, "verify": "all", "eviction_policy": "arc"}
    run = run_engine(case, extra | faults(max_delay_us=10_000), CONNECTOR)
    assert_same(run, run_engine(case, None))
    assert_no_faults(run)
    assert_nothing_left(run)
    assert run.pool is not None
    assert run.pool["slots"] == 12
    assert run.pool["evicted"] > 0


@MODES
def test_aborts(run_engine: RunEngine, model: str, hook: str | None) -> None:
    """Requests that are aborted while they wait, load, compute or store do not harm the others."""
    case = replace(ABORTED, model=model)
    run = run_engine(case, PLENTY | faults(max_delay_us=20_000), CONNECTOR, hook)
    assert run.async_scheduling == (hook == ASYNC)
    assert_same(run, run_engine(case, None))
    assert_no_faults(run)
    assert_nothing_left(run)
    assert run.aborted_loads > 0


def test_reset(run_engine: RunEngine) -> None:
    """After the model has changed and the caches were emptied, nothing from before is served: not
    even what is being loaded, or computed, at that moment."""
    case = EngineCase("emptied")
    reference = run_engine(case, None)
    run = run_engine(case, PLENTY | faults(max_delay_us=20_000), CONNECTOR)
    assert_same(run, reference)
    assert_nothing_left(run)
    assert run.outputs["changed"] != run.outputs["again"]
    assert {name: count for name, count in run.cached.items() if "flood" not in name} == {
        "first": 0,
        "again": 6 * BLOCK,
        "changed": 0,
        "changed again": 6 * BLOCK,
        "while loading": 0,
        "after": 6 * BLOCK,
        "running": 6 * BLOCK,
        "running too": 0,
        "in the end": 6 * BLOCK,
    }
    assert counts_of(run)["loads_voided"] == 1
    assert any("a reset came while it was loading" in line for line in run.log)
    # Without emptying the host pool, the answer is wrong.
    control = run_engine(EngineCase("not_emptied"), PLENTY, CONNECTOR)
    assert control.cached["changed"] == 6 * BLOCK
    assert control.outputs["changed"] != reference.outputs["changed"]


def test_engine_in_its_own_process(run_engine: RunEngine) -> None:
    """As ``vllm serve`` runs it; what crosses the border is pickled."""
    reference = run_engine(COMES_BACK, None)
    case = replace(COMES_BACK, own_process=True)
    run = run_engine(case, PLENTY | SLOW, BY_PLUGIN | RECOMPUTE)
    assert_same(run, reference)
    assert_came_back(run, reference)
    assert run.metrics["vllm:kvoffload_loads_done"] == 1
    assert run.metrics["vllm:kvoffload_moved_load_bytes"] == 6 * SLOT_BYTES
    assert run.metrics["vllm:kvoffload_pool_pinned"] == 0
    assert run.metrics["vllm:kvoffload_pool_writing"] == 0


def test_tensor_parallel(run_engine: RunEngine) -> None:
    """Two workers, each with half of the heads and its own region; on one of them loads fail."""
    case = replace(ROUNDS, own_process=True, engine=ROOM | {"tensor_parallel_size": 2})
    on_one = faults(rank=1, max_delay_us=3000, fail_every_load=3, fail_every_store=5)
    run = run_engine(case, PLENTY | on_one, CONNECTOR)
    # The sums of two halves are not those of the whole, but no token is so close.
    assert_same(run, run_engine(ROUNDS, None))
    metrics = run.metrics
    assert metrics["vllm:kvoffload_loads_done"] > 0
    assert metrics["vllm:kvoffload_loads_failed"] > 0
    assert metrics["vllm:kvoffload_stores_failed"] > 0
    assert metrics["vllm:kvoffload_stray_reports"] == 0
    assert metrics["vllm:kvoffload_pool_pinned"] == 0
    assert metrics["vllm:kvoffload_pool_writing"] == 0


def test_model_runner_v2(run_engine: RunEngine) -> None:
    """vLLM's second model runner calls the connector from other places."""
    case = replace(COMES_BACK, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    try:
        reference = run_engine(case, None)
    except ProcessFailed as failure:
        # What vLLM 0.32 says of the CPU build.
        assert "Model Runner V2 requires Triton" in str(failure)
        return
    run = run_engine(case, PLENTY | SLOW, CONNECTOR)
    assert_same(run, reference)
    assert_came_back(run, reference)
    assert_no_faults(run)
    assert_nothing_left(run)


# --- what the log says ---------------------------------------------------------------------------


def test_missing_failure_policy_is_told(run_engine: RunEngine, by_plugin: EngineRun) -> None:
    """vLLM's default fails a request whose load fails."""
    told = [line for line in by_plugin.log if "kv_load_failure_policy is not 'recompute'" in line]
    assert len(told) == 1
    assert "A LOAD THAT FAILS WILL FAIL ITS REQUEST" in told[0]
    run = run_engine(ROUNDS, PLENTY | SLOW, CONNECTOR)
    assert not any("kv_load_failure_policy" in line for line in run.log)


def test_layout(by_plugin: EngineRun) -> None:
    """The connector asks for blocks in one piece. The CPU's attention backend has one layout only,
    with a piece for each layer: vLLM says so, and so does the connector."""
    log = "\n".join(by_plugin.log)
    assert "KV connector cache layout BLHNC does not satisfy every supported set" in log
    assert "['LBHNC']. Using LBHNC instead" in log
    assert "keeps a block of all layers in 4 places, not in one" in log


# --- with faults ---------------------------------------------------------------------------------


def run_with(
    run_engine: RunEngine, model: str, extra: dict[str, Any], hook: str | None = None
) -> tuple[EngineRun, dict[str, int]]:
    """Serve prompts in turn with faults: the tokens are right, and nothing is left in the end."""
    case = replace(ROUNDS, model=model)
    run = run_engine(case, PLENTY | extra, CONNECTOR, hook)
    assert_same(run, run_engine(case, None))
    assert_nothing_left(run)
    counts = counts_of(run)
    assert counts["loads_done"] > 0  # the rest came from the host
    return run, counts


@MODES
def test_some_loads_fail(run_engine: RunEngine, model: str, hook: str | None) -> None:
    """Their requests are computed, their chunks leave the pool, and are stored again."""
    run, counts = run_with(run_engine, model, faults(fail_every_load=7), hook)
    assert run.async_scheduling == (hook == ASYNC)
    assert counts["loads_failed"] == counts["loads_begun"] // 7 == 2
    assert counts["stores_done"] == 6 + 2
    assert counts["miss_failed"] >= 2
    assert run.pool is not None
    assert run.pool["discarded"] > 0
    assert sum("an injected fault" in line for line in run.log) == 2
    assert [run.cached[f"{turn}.{i}"] for turn in range(1, 4) for i in range(6)].count(0) == 2


@MODELS
def test_some_stores_fail(run_engine: RunEngine, model: str) -> None:
    """Their chunks are not found, and stored when they are computed the next time."""
    run, counts = run_with(run_engine, model, faults(fail_every_store=5))
    assert counts["stores_failed"] == 1
    assert counts["stores_done"] == 6
    assert counts["loads_failed"] == 0
    assert run.pool is not None
    assert run.pool["store_failures"] > 0
    assert sum("the chunks are not kept" in line for line in run.log) == 1


@MODELS
def test_a_load_never_completes(run_engine: RunEngine, model: str) -> None:
    """It is given up after its deadline, and its request is computed."""
    job = 9  # the third of the second round: the first six are the stores of the first
    run, counts = run_with(run_engine, model, faults(stall_job=job) | {"load_deadline_s": 0.3})
    assert counts["loads_failed"] == 1
    assert counts["stores_failed"] == 0
    assert sum(f"not over after 0.3 s (first: job {job})" in line for line in run.log) == 1


@MODELS
def test_a_store_never_completes(run_engine: RunEngine, model: str) -> None:
    """A step that needs its blocks waits until the deadline, then its chunks are given up."""
    job = 2
    run, counts = run_with(run_engine, model, faults(stall_job=job) | {"wait_timeout_s": 0.3})
    assert counts["stores_failed"] == 1
    assert counts["loads_failed"] == 0
    assert counts["flushes"] > 0
    assert sum("its blocks were needed before they were read" in line for line in run.log) == 1
    # It goes on, and the log does not say otherwise.
    assert not any("stopping" in line for line in run.log)


@MODELS
def test_every_job_is_reported_twice(run_engine: RunEngine, model: str) -> None:
    """The second report is counted and changes nothing."""
    _, counts = run_with(run_engine, model, {}, "report_twice")
    assert counts["stray_reports"] == counts["loads_begun"] + counts["stores_begun"]
    assert counts["loads_failed"] == counts["stores_failed"] == 0


@MODELS
def test_stored_bytes_change(run_engine: RunEngine, model: str) -> None:
    """Verification finds each before it is loaded."""
    run, counts = run_with(run_engine, model, faults(corrupt_every_store=2))
    assert counts["loads_failed"] >= 3
    assert counts["stores_failed"] == 0
    told = sum("has other bytes than were stored" in line for line in run.log)
    assert told == counts["loads_failed"]
