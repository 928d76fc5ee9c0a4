"""The spec: settings, capacity, and what differs between vLLM's generations."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvoffload_rs.errors import CapacityError, ConfigError
from kvoffload_rs.vllm import KvOffloadSpec, compat
from shapes import BYTES_PER_BLOCK, MEMORY, make_spec
from vllm.v1.kv_offload import base

# --- settings ------------------------------------------------------------------------------------


def test_it_is_a_spec_of_vllm() -> None:
    made = make_spec()
    assert isinstance(made, base.OffloadingSpec)
    assert getattr(made, "replicated_layout", False) is False  # 0.26 has no such layout
    assert made.settings.cpu_bytes == MEMORY


def test_both_roles_and_all_ranks_agree() -> None:
    for memory in (MEMORY, "1%", "512KiB"):
        made = [
            make_spec({"cpu_bytes_to_use": memory}, rank=rank, world_size=4, blocks_per_chunk=2)
            for rank in range(4)
        ]
        assert len({s.num_slots for s in made}) == 1
        assert made[0].get_manager().stats()["slots"] == made[0].num_slots
    slot = -(-BYTES_PER_BLOCK * 2 // 64) * 64
    assert make_spec(world_size=4, blocks_per_chunk=2).num_slots == MEMORY // (slot * 4)


@pytest.mark.parametrize("memory", [None, 0, "0", -5, 100])
def test_too_little_memory(memory: object) -> None:
    with pytest.raises(CapacityError) as caught:
        make_spec({"cpu_bytes_to_use": memory}, world_size=2)
    assert f"one slot needs {2 * 320} bytes" in str(caught.value)


def test_more_memory_than_there_is() -> None:
    with pytest.raises(CapacityError, match="only"):
        make_spec({"cpu_bytes_to_use": "1000 TiB"})


def test_no_kv_cache() -> None:
    with pytest.raises(CapacityError, match="no KV cache"):
        make_spec(bytes_per_block=0)


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(pp_size=2, world_size=2)
    assert caught.value.field == "pipeline_parallel_size"


@pytest.mark.parametrize(
    "extra",
    [
        {"eviction_policy": "fifo"},
        {"secondary_tiers": [{"type": "fs"}]},
        {"canonical_layout": True},
        {"cpu_byte_to_use": 1},
        {"sync_load_budget_byte": 1},
    ],
)
def test_bad_settings(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_spec(extra)


def test_unknown_keys_are_warned_of_once(logged: Any) -> None:
    for _ in range(2):
        make_spec({"my_own_note": 1, "backpressure": {}})
    messages = [r.getMessage() for r in logged.records if r.levelno == logging.WARNING]
    warnings = [message for message in messages if message.startswith("kvoffload:")]
    assert len(warnings) == 2
    assert "'my_own_note'" in warnings[0]
    assert "'backpressure'" in warnings[1]


def test_faults_of_a_rank_that_does_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such rank"):
        make_spec({"fault_injection": {"rank": 1, "fail_every_load": 2}})


def test_fault_injection_is_loud(logged: Any) -> None:
    make_spec({"fault_injection": {"seed": 1}})
    assert any("FAULT INJECTION IS ON" in r.getMessage() for r in logged.records)


def test_the_settings_are_logged(logged: Any) -> None:
    made = make_spec()
    assert any(f"{made.num_slots} slots of" in r.getMessage() for r in logged.records)


@pytest.mark.parametrize("word", ["false", "no", False, 0])
def test_false_reaches_vllms_connector_as_false(word: object) -> None:
    made = make_spec({"offload_prompt_only": word, "self_describing_kv_events": word})
    assert made.offload_prompt_only is False
    assert made.kv_events_config.self_describing_kv_events is False
    assert make_spec().offload_prompt_only is True
    told = make_spec({"self_describing_kv_events": "true"}).kv_events_config
    assert told.self_describing_kv_events is True


def test_settings_reach_the_manager() -> None:
    made = make_spec({"eviction_policy": "arc", "store_threshold": 2}, events=True)
    manager = made.get_manager()
    assert manager is made.get_manager()
    assert manager._core.policy == "arc"
    contexts = [base.ReqContext(req_id=str(i)) for i in range(2)]
    offers = [manager.prepare_store([b"key"], ctx) for ctx in contexts]
    assert [len(offer.keys_to_store) for offer in offers if offer] == [0, 1]
    manager.complete_store([b"key"], contexts[1])
    assert len(list(manager.take_events())) == 1


def test_metrics_are_declared_by_the_class() -> None:
    assert set(KvOffloadSpec.build_metric_definitions({"store_threshold": "2"})) == set(
        compat.metric_definitions(2)
    )
    assert set(KvOffloadSpec.build_metric_definitions({})) < set(compat.metric_definitions(2))
    with pytest.raises(ConfigError):
        KvOffloadSpec.build_metric_definitions({"store_threshold": "often"})


def test_configuration_labels_match_their_values() -> None:
    info = make_spec().get_manager().config_info()
    assert len(info) == 1
    assert tuple(info[0]) == KvOffloadSpec.config_info_keys({})


# --- the older generation's configuration --------------------------------------------------------


def old_configs(extra: dict[str, Any], packed: bool = False) -> tuple[Any, Any]:
    """What vLLM up to 0.24 makes a spec from: two groups of 16 tokens, 2 context-parallel ranks."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, engine_id="old"),
        parallel_config=SimpleNamespace(
            rank=1,
            world_size=2,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=2,
            prefill_context_parallel_size=1,
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )
    tensor = SimpleNamespace(size=800, block_stride=80 if packed else 0)
    caches = SimpleNamespace(
        kv_cache_groups=[group, group], kv_cache_tensors=[tensor] * 3, num_blocks=10
    )
    return config, caches


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "HAS_CONFIG", False)


@pytest.mark.usefixtures("old")
def test_facts_of_the_older_generation() -> None:
    facts = compat.engine_facts(*old_configs({"a": 1}))
    assert facts == compat.EngineFacts(
        extra={"a": 1},
        engine_id="old",
        rank=1,
        world_size=2,
        pipeline_size=1,
        bytes_per_block=240,
        tokens_per_block=(32, 32),
        kv_events=True,
    )
    assert compat.engine_facts(*old_configs({}, packed=True)).bytes_per_block == 80


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    ("block_size", "blocks", "chunk"), [(None, None, 1), (32, None, 1), (96, None, 3), (None, 4, 4)]
)
def test_chunk_size_of_the_older_generation(
    block_size: int | None, blocks: int | None, chunk: int
) -> None:
    config, caches = old_configs({})
    facts = compat.engine_facts(config, caches)
    assert compat.blocks_per_chunk(facts, config, block_size, blocks) == chunk


@pytest.mark.usefixtures("old")
def test_a_chunk_is_whole_blocks() -> None:
    config, caches = old_configs({})
    facts = compat.engine_facts(config, caches)
    with pytest.raises(ConfigError, match="Use 64") as caught:
        compat.blocks_per_chunk(facts, config, 40, None)
    assert caught.value.field == "block_size"
    caches.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=8)))
    facts = compat.engine_facts(config, caches)
    with pytest.raises(ConfigError, match="blocks_per_chunk"):
        compat.blocks_per_chunk(facts, config, 32, None)


def test_attributes_are_set_only_where_they_exist() -> None:
    bare = SimpleNamespace(block_size_factor=1)
    unknown = compat.apply_settings(
        bare, chunk=4, offload_prompt_only=False, self_describing_kv_events=False
    )
    assert vars(bare) == {"block_size_factor": 4}
    assert unknown == ["offload_prompt_only", "self_describing_kv_events"]


@pytest.mark.parametrize(
    ("version", "reads"),
    [
        ((0, 21), {"connectors"}),
        ((0, 24), {"connectors", "enable_cross_layers_blocks"}),
        ((0, 30), {"connectors"}),
        ((0, 33), {"connectors", "sync_load_budget_bytes"}),
        (None, {"connectors", "enable_cross_layers_blocks", "sync_load_budget_bytes"}),
    ],
)
def test_keys_of_each_version(version: tuple[int, int] | None, reads: set[str]) -> None:
    read, unread = compat.known_keys(version)
    assert read == reads
    assert set(unread) == set(compat._VLLM_KEYS) - reads
    assert all(unread.values())


def test_the_version_is_read() -> None:
    import vllm

    version = compat.vllm_version()
    assert version is None or vllm.__version__.startswith(f"{version[0]}.{version[1]}")
