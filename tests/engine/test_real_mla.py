"""MLA with tensor parallelism in the real engine on a CPU: what all ranks hold is kept once.

vLLM's CPU backend for MLA works without prefix caching and chunked prefill, which it turns off, so
whatever a request does not compute came from host memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_runs import EngineCase, EngineRun, RunEngine

pytestmark = pytest.mark.engine

BLOCK = 16  # the only size that vLLM's CPU kernel takes
SLOT_BYTES = 4 * BLOCK * (512 + 64) * 4  # one block: four layers, and the model's latent in float32
RANKS, PROMPTS = 2, 6
CACHED = 6 * BLOCK  # of each prompt

CASE = EngineCase(
    "one_by_one",
    model="mla",
    own_process=True,
    engine={
        "tensor_parallel_size": RANKS,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 32,
        # Not the backend for CPUs with AMX: that one takes another block size, and bfloat16 only.
        "attention_config": {"backend": "CPU_MLA"},
        # vLLM 0.32's own CPU kernel turns queries that are parts of a row wrongly, so that answers
        # depend on what else is in the batch. PyTorch's operations do not.
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    },
)

CONNECTOR = {
    "kv_connector": "KvOffloadConnector",
    "kv_connector_module_path": "kvoffload_rs.vllm",
    "kv_load_failure_policy": "recompute",
}
# With vLLM's connector nobody sees to it that no rank stores to a slot that another still reads
# after a reset: there each rank has a copy.
SPEC = {"spec_name": "KvOffloadSpec", "spec_module_path": "kvoffload_rs.vllm"}
#: Settings and arguments of KVTransferConfig.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "connector": ({}, CONNECTOR),
    "spec": (SPEC, None),
}
BOTH = pytest.mark.parametrize("way", list(WAYS))

#: Room for all prompts, with a few slots to spare; for half of that it is too little.
SLOTS = PROMPTS * CACHED // BLOCK + 4
PROMPT_BYTES = PROMPTS * CACHED // BLOCK * SLOT_BYTES
ROOM_FOR_ONE = {"cpu_bytes_to_use": SLOTS * SLOT_BYTES}


def serve(run_engine: RunEngine, way: str, extra: dict[str, Any]) -> EngineRun:
    """The case with offloading."""
    settings, transfer = WAYS[way]
    return run_engine(CASE, settings | extra, transfer)


def second(run: EngineRun) -> list[int]:
    """Tokens of each prompt that were not computed in the second turn."""
    return [run.cached[f"1.{i}"] for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine) -> EngineRun:
    """Without offloading: nothing is cached, answers repeat, and differ from prompt to prompt."""
    run = run_engine(CASE, None)
    assert set(run.cached.values()) == {0}
    answers = [run.outputs[f"0.{i}"] for i in range(PROMPTS)]
    assert answers == [run.outputs[f"1.{i}"] for i in range(PROMPTS)]
    assert all(len(set(answer)) > 4 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == PROMPTS
    return run


def moved(run: EngineRun, way: str, kind: str) -> float:
    """Bytes that the ranks copied together, ``kind`` being ``store`` or ``load``."""
    names = {"connector": "vllm:kvoffload_moved_{}_bytes", "spec": "vllm:kv_offload_{}_bytes"}
    return run.metrics.get(names[way].format(kind), 0.0)


def test_one_copy_serves_all_ranks(run_engine: RunEngine, reference: EngineRun) -> None:
    """Memory for one copy of the prompts is enough for all of them, on both ranks."""
    way = "connector"
    run = serve(run_engine, way, ROOM_FOR_ONE | {"verify": "all"})
    assert run.differs_from(reference) == []
    assert second(run) == [CACHED] * PROMPTS
    assert moved(run, way, "store") == PROMPT_BYTES
    assert moved(run, way, "load") == RANKS * PROMPT_BYTES
    assert run.metrics["vllm:kvoffload_pool_slots"] == SLOTS
    assert run.metrics["vllm:kvoffload_stray_reports"] == 0


@BOTH
def test_a_copy_for_each_rank(run_engine: RunEngine, reference: EngineRun, way: str) -> None:
    """With the setting off, and always with the spec, the same memory holds half as many prompts:
    each is forgotten before it comes again, and stored twice by each rank."""
    run = serve(run_engine, way, ROOM_FOR_ONE | {"share_replicated_kv": False})
    assert run.differs_from(reference) == []
    assert second(run) == [0] * PROMPTS
    assert moved(run, way, "store") == 2 * RANKS * PROMPT_BYTES
    assert moved(run, way, "load") == 0
    if way == "connector":
        assert run.metrics["vllm:kvoffload_pool_slots"] == SLOTS // RANKS


def test_control_differs(run_engine: RunEngine, reference: EngineRun) -> None:
    """Loads that copy nothing are seen in exactly the answers that used them."""
    way = "connector"
    extra = ROOM_FOR_ONE | {"fault_injection": {"seed": 1, "loads": "nothing"}}
    run = serve(run_engine, way, extra)
    assert second(run) == [CACHED] * PROMPTS
    assert set(run.differs_from(reference)) == {f"1.{i}" for i in range(PROMPTS)}


def test_stored_bytes_change(run_engine: RunEngine, reference: EngineRun) -> None:
    """The rank that stored them finds it before they are used, and the prompts are computed."""
    faults = {"fault_injection": {"seed": 1, "max_delay_us": 3000, "corrupt_every_store": 2}}
    run = serve(run_engine, "connector", ROOM_FOR_ONE | {"verify": "all"} | faults)
    assert run.differs_from(reference) == []
    assert run.metrics["vllm:kvoffload_loads_failed"] == PROMPTS // 2
    assert sorted(second(run)) == [0] * (PROMPTS // 2) + [CACHED] * (PROMPTS // 2)
    assert run.metrics["vllm:kvoffload_pool_pinned"] == 0
    assert run.metrics["vllm:kvoffload_pool_writing"] == 0
