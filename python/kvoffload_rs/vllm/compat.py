"""Everything that differs between vLLM versions (0.21 to 0.33), found by looking for features.

Two generations exist. Up to 0.24 a spec is made from `(vllm_config, kv_cache_config)`, gives
*handlers* (one per direction, chosen by the media of source and destination), and its manager
answers a lookup with True, False or None. From 0.26 a spec is made from one `OffloadingConfig`,
gives one *worker*, and its manager answers with a `LookupResult`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import vllm
from vllm.v1.kv_offload import base

from kvoffload_rs.errors import ConfigError

# Below vLLM's own logger, which is the one that has a handler.
logger = logging.getLogger("vllm.kvoffload_rs")

#: Medium of host memory, as metrics and routing name it.
HOST_MEDIUM = "CPU"

#: True from 0.26: one worker with `submit_store` and `submit_load`.
HAS_WORKERS = hasattr(base, "OffloadingWorker")

#: True from 0.26: the spec is made from one `OffloadingConfig`.
HAS_CONFIG = len(inspect.signature(base.OffloadingSpec.__init__).parameters) == 2

WorkerBase: Any
HandlerBase: Any
TransferResult: Any
if HAS_WORKERS:
    WorkerBase, HandlerBase, TransferResult = base.OffloadingWorker, object, base.TransferResult
else:
    from vllm.v1.kv_offload.worker import worker as _worker

    WorkerBase, HandlerBase = object, _worker.OffloadingHandler
    TransferResult = _worker.TransferResult

#: What a lookup answers for (absent, readable, being written).
ANSWERS: tuple[object, object, object]
if hasattr(base, "LookupResult"):
    ANSWERS = (base.LookupResult.MISS, base.LookupResult.HIT, base.LookupResult.HIT_PENDING)
else:
    ANSWERS = (False, True, None)

#: Integer type of block and slot ids: int64 up to 0.28, int32 from 0.30.
ID_DTYPE = base.GPULoadStoreSpec([], [], []).block_ids.dtype

#: Medium of a KV event: a string up to 0.26, an enum from 0.28.
EVENT_MEDIUM: Any = base.Medium.CPU if hasattr(base, "Medium") else HOST_MEDIUM

#: The tier a hit came from, as vLLM names it; asked for from 0.32 on.
LOAD_SOURCE: Any
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    LOAD_SOURCE = CacheHitSource.HOST
except ImportError:
    LOAD_SOURCE = None

#: From 0.24 a request has an end, and its accesses are applied to the policy then, once.
HAS_REQUEST_END = hasattr(base.OffloadingManager, "on_request_finished")

#: The connectors of 0.24 to 0.30 announce a request's end, and in addition touch its whole prefix
#: with every lookup and store. Counting both would make one request look like many to ARC, so the
#: touches are dropped. 0.21 has nothing but touches, and from 0.32 no connector touches.
DROP_TOUCHES = HAS_REQUEST_END and not hasattr(base.ReqContext, "set_offload_key_position")

#: In 0.24 and 0.26, a model with Mamba layers beside others that has any KV connector is continued
#: from the longest local hit of any group, whether there is a state at its end or not. Its tokens
#: are wrong, though the connector loads nothing. 0.28 and later fall back to what all groups have.
CONTINUES_WITHOUT_STATE: bool
try:
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    CONTINUES_WITHOUT_STATE = hasattr(
        HybridKVCacheCoordinator, "find_longest_cache_hit_per_group"
    ) and not hasattr(KVCacheManager, "get_computed_blocks_for_connector")
except ImportError:  # a later release, which calls them otherwise
    CONTINUES_WITHOUT_STATE = False


def request_context() -> Any:
    """What `on_new_request` answers: offload as vLLM does by default."""
    return base.RequestOffloadingContext()


def key_positions(context: Any) -> dict[bytes, int] | None:
    """The end token of each key of a request, which vLLM records from 0.32 on.

    The dictionary itself is read, because the public accessor costs a Python call per key.
    """
    positions: dict[bytes, int] | None = getattr(context, "_offload_key_positions", None)
    return positions


# --- metrics -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricNames:
    """Names of the metrics that vLLM's CPU spec has in the installed version, None if it lacks one.

    Attributes:
        usage: share of the slots that is being read or written.
        write_usage: share that is being written.
        read_usage: share that is being read.
        allocation_size: chunks per store.
        stores_skipped: chunks not stored because they were not offered often enough.
    """

    usage: str | None
    write_usage: str | None
    read_usage: str | None
    allocation_size: str | None
    stores_skipped: str | None


def _metric_names() -> MetricNames | None:
    try:
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics as Names
    except ImportError:
        return None  # 0.21: a manager has no metrics
    return MetricNames(
        usage=getattr(Names, "CPU_CACHE_USAGE_PERC", None),
        write_usage=getattr(Names, "CPU_CACHE_WRITE_USAGE_PERC", None),
        read_usage=getattr(Names, "CPU_CACHE_READ_USAGE_PERC", None),
        allocation_size=getattr(Names, "CPU_ALLOCATION_SIZE", None),
        stores_skipped=getattr(Names, "STORES_SKIPPED", None),
    )


#: None in 0.21, where managers have no metrics.
METRICS: MetricNames | None = _metric_names()


def new_stats() -> Any:
    """An empty set of statistics for `get_stats`. Not for 0.21."""
    # Not at the top: this module loads the spec factory, and with it possibly this package.
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    return OffloadingConnectorStats()


def metric_definitions(store_threshold: int) -> dict[str, Any]:
    """Declares the metrics that `KvOffloadManager.get_stats` emits: those of vLLM's CPU spec."""
    if METRICS is None:
        return {}
    try:
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    except Exception:
        # It loads vLLM's kernels, which a platform may lack. A metric that is emitted but not
        # declared would stop the API server, so declare the same names here.
        return _own_metric_definitions(METRICS, store_threshold)
    definitions: dict[str, Any] = CPUOffloadingSpec.build_metric_definitions(
        {"store_threshold": store_threshold}
    )
    return definitions


def _own_metric_definitions(names: MetricNames, store_threshold: int) -> dict[str, Any]:
    gauges = {
        names.usage: "Share of the host KV slots in use by running transfers.",
        names.write_usage: "Share of the host KV slots being written.",
        names.read_usage: "Share of the host KV slots being read.",
    }
    definitions: dict[str, Any] = {
        name: base.OffloadingGaugeMetadata(documentation=text)
        for name, text in gauges.items()
        if name is not None
    }
    if names.allocation_size is not None:
        definitions[names.allocation_size] = base.OffloadingHistogramMetadata(
            documentation="Host KV slots asked for by one store.",
            buckets=tuple(4.0**i for i in range(10)),
        )
    if names.stores_skipped is not None and store_threshold >= 2:
        definitions[names.stores_skipped] = base.OffloadingCounterMetadata(
            documentation="Chunks not stored because they were not offered often enough."
        )
    return definitions


def config_info_keys() -> tuple[str, ...]:
    """Labels of the configuration metric that `config_info` fills (0.33)."""
    info = _info_class()
    return tuple(info.config_info_keys()) if info is not None else ()


def config_info(config: Any, num_slots: int, slot_bytes: int) -> Mapping[str, Any]:
    """Values of the configuration metric (0.33): the labels of vLLM's own CPU spec.

    Args:
        config: the `OffloadingConfig`.
        num_slots: slots of the pool.
        slot_bytes: bytes of one slot on all ranks.
    """
    info = _info_class()
    if info is None:
        return {}
    values: Mapping[str, Any] = info.from_config(config, num_slots, slot_bytes).as_config_info()
    return values


def _info_class() -> Any:
    try:
        from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo
    except ImportError:
        return None
    return CPUOffloadingInfo


# --- what a spec is made from --------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFacts:
    """What a spec has to know about its engine; the same in every process but for `rank`.

    Attributes:
        extra: `kv_connector_extra_config`.
        engine_id: id of the engine, of one data-parallel replica.
        rank: this worker's rank (0 in the scheduler's process).
        world_size: ranks of the engine.
        pipeline_size: pipeline stages.
        bytes_per_block: KV bytes of one GPU block on one rank, all layers.
        tokens_per_block: tokens of one GPU block, for each KV group.
        kv_events: vLLM publishes KV events.
    """

    extra: Mapping[str, Any]
    engine_id: str
    rank: int
    world_size: int
    pipeline_size: int
    bytes_per_block: int
    tokens_per_block: tuple[int, ...]
    kv_events: bool


def engine_facts(config: Any, kv_cache_config: Any = None) -> EngineFacts:
    """Reads the facts from whatever the installed vLLM makes a spec from."""
    if HAS_CONFIG:
        return EngineFacts(
            extra=config.extra_config,
            engine_id=config.engine_id,
            rank=config.parallel.rank,
            world_size=config.parallel.world_size,
            pipeline_size=config.parallel.pp_size,
            bytes_per_block=config.worker_kv_bytes_per_block,
            tokens_per_block=tuple(group.tokens_per_block for group in config.groups),
            kv_events=config.enable_kv_cache_events,
        )
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    context_parallel = (
        parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    )
    events = config.kv_events_config
    return EngineFacts(
        extra=transfer.kv_connector_extra_config,
        engine_id=transfer.engine_id,
        rank=parallel.rank,
        world_size=parallel.world_size,
        pipeline_size=parallel.pipeline_parallel_size,
        bytes_per_block=_bytes_per_block(kv_cache_config),
        tokens_per_block=tuple(
            group.kv_cache_spec.block_size * context_parallel
            for group in kv_cache_config.kv_cache_groups
        ),
        kv_events=events is not None and events.enable_kv_cache_events,
    )


def is_replicated(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether all ranks hold the same KV, and are processes of one machine.

    That is so with tensor parallelism alone, if all layers keep MLA's latent, which has no heads to
    be divided. Context parallelism divides its tokens.
    """
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if ranks == 1 or parallel.world_size != ranks:
        return False
    if parallel.distributed_executor_backend != "mp":
        return False
    others = ("decode_context_parallel_size", "prefill_context_parallel_size", "nnodes_within_dp")
    if any(getattr(parallel, name, 1) != 1 for name in others):
        return False
    # A draft model with heads may be in the same group, of which the scheduler sees one layer only.
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and not draft.use_mla:
        return False
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

    specs: list[Any] = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        several = isinstance(spec, UniformTypeKVCacheSpecs)
        specs += spec.kv_cache_specs.values() if several else [spec]
    # The exact type: others of its kind need not be the same on all ranks.
    return bool(specs) and all(type(spec) is MLAAttentionSpec for spec in specs)


def _bytes_per_block(kv_cache_config: Any) -> int:
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors or kv_cache_config.num_blocks <= 0:
        return 0
    if getattr(tensors[0], "block_stride", 0):
        # Packed (0.24): every tensor is a view of one allocation and gives the size of the whole.
        return int(tensors[0].size) // int(kv_cache_config.num_blocks)
    return int(sum(tensor.size for tensor in tensors)) // int(kv_cache_config.num_blocks)


def blocks_per_chunk(
    facts: EngineFacts, config: Any, block_size: int | None, blocks: int | None
) -> int:
    """The chunk size in blocks.

    From 0.26 vLLM has worked it out. Before, only `block_size` (tokens) exists in vLLM, which
    checks it with a bare assertion; here both keys are supported and checked.

    Args:
        facts: of the engine.
        config: what the spec is made from.
        block_size: the setting of that name.
        blocks: the setting `blocks_per_chunk`.

    Raises:
        ConfigError: the chunk is no whole number of blocks, or the groups' blocks differ.
    """
    if HAS_CONFIG:
        return int(config.cache.blocks_per_chunk)
    if block_size is None:
        return blocks or 1
    sizes = sorted(set(facts.tokens_per_block))
    if len(sizes) != 1:
        raise ConfigError(
            f"block_size is {block_size} tokens, but the KV groups have blocks of {sizes} tokens",
            field="block_size",
            value=block_size,
            hint="Give the chunk size in blocks instead, with blocks_per_chunk.",
        )
    if block_size % sizes[0]:
        raise ConfigError(
            f"block_size is {block_size} tokens, which is no multiple of the {sizes[0]} tokens "
            "of a block",
            field="block_size",
            value=block_size,
            hint=f"Use {-(-block_size // sizes[0]) * sizes[0]}, or set blocks_per_chunk.",
        )
    return block_size // sizes[0]


def apply_settings(
    spec: Any, *, chunk: int, offload_prompt_only: bool, self_describing_kv_events: bool
) -> list[str]:
    """Sets the attributes of a spec that vLLM's connector reads.

    vLLM's base class reads both truth values with `bool`, for which "false" is true.

    Returns:
        The settings that this version's connector does not know.
    """
    unknown = []
    if hasattr(spec, "block_size_factor"):
        # Up to 0.24. The base class sets 1 for `blocks_per_chunk`, which it does not know; the
        # connector reads the attribute only after the spec is made.
        spec.block_size_factor = chunk
    if hasattr(spec, "offload_prompt_only"):
        spec.offload_prompt_only = offload_prompt_only
    else:
        unknown.append("offload_prompt_only")
    if hasattr(spec, "kv_events_config"):
        spec.kv_events_config = replace(
            spec.kv_events_config, self_describing_kv_events=self_describing_kv_events
        )
    else:
        unknown.append("self_describing_kv_events")
    return unknown


# --- keys of kv_connector_extra_config -----------------------------------------------------------

#: Keys that vLLM reads and `kvoffload_rs.config` does not: first version, first version without.
_VLLM_KEYS: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "backpressure": ((0, 32), None),
    "cache_policy_module_path": ((0, 28), None),
    "connectors": ((0, 21), None),
    "enable_cross_layers_blocks": ((0, 24), (0, 30)),
    "sync_load_budget_bytes": ((0, 33), None),
    "tier_poll_interval_s": ((0, 33), None),
}

#: Keys among them that only vLLM's own specs read.
_OTHER_SPECS = ("backpressure", "cache_policy_module_path", "tier_poll_interval_s")


def vllm_version() -> tuple[int, int] | None:
    """Major and minor version of the installed vLLM; None for a build without a number."""
    match = re.match(r"(\d+)\.(\d+)", getattr(vllm, "__version__", ""))
    return (int(match.group(1)), int(match.group(2))) if match else None


def known_keys(version: tuple[int, int] | None) -> tuple[frozenset[str], dict[str, str]]:
    """The keys that this vLLM reads itself, and those with no effect here, with the reason.

    Args:
        version: of vLLM; None takes every key for one that it reads.
    """
    read: set[str] = set()
    unread: dict[str, str] = {}
    for key, (since, until) in _VLLM_KEYS.items():
        if key in _OTHER_SPECS:
            unread[key] = "it belongs to vLLM's own offloading specs"
        elif version is not None and version < since:
            unread[key] = f"vLLM reads it from {since[0]}.{since[1]} on"
        elif version is not None and until is not None and version >= until:
            unread[key] = f"vLLM reads it no more since {until[0]}.{until[1]}"
        else:
            read.add(key)
    return frozenset(read), unread


# --- the connector -------------------------------------------------------------------------------

#: True from 0.30: a worker names the requests whose loads failed. Before, only blocks can be named,
#: which works for models with one KV group.
HAS_FAILED_RECVING: bool

# The layout in which one block of all layers is in one piece, where layouts can be chosen (0.30);
# before, `prefer_cross_layer_blocks` asks for the same.
_ONE_PIECE: str | None

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base

    HAS_FAILED_RECVING = hasattr(connector_base, "KVConnectorTransferResults")
    _ONE_PIECE = (
        None if hasattr(connector_base.KVConnectorBase_V1, "prefer_cross_layer_blocks") else "BLHNC"
    )
except ImportError:
    HAS_FAILED_RECVING, _ONE_PIECE = False, None


def preferred_layout(vllm_config: Any) -> str | None:
    """The layout in which one block of all layers is in one piece; None: vLLM's own choice.

    vLLM's CPU backend for MLA says that it can have it, and then fails (0.32).
    """
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    if current_platform.is_cpu() and model is not None and model.use_mla:
        return None
    return _ONE_PIECE


def version_text() -> str:
    """The installed vLLM's version, for people."""
    return str(getattr(vllm, "__version__", "of an unknown version"))


def is_one_of_several(vllm_config: Any) -> bool:
    """Whether a connector is made by another one: that gives it a configuration of its own."""
    from vllm.config import get_current_vllm_config_or_none

    whole = get_current_vllm_config_or_none()
    if whole is None or whole.kv_transfer_config is None:
        return False
    return bool(
        whole.kv_transfer_config.kv_connector != vllm_config.kv_transfer_config.kv_connector
    )


def tokens_per_hash(config: Any) -> int:
    """Tokens that one block hash of a request covers; from 0.26."""
    return int(config.cache.tokens_per_hash)


def make_spec(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Our spec, from what a connector is made from.

    Raises:
        ConfigError: vLLM is older than 0.26.
    """
    from kvoffload_rs.vllm.spec import KvOffloadSpec

    if not HAS_CONFIG:
        raise ConfigError(
            f"KvOffloadConnector needs vLLM 0.26 or later, this is {version_text()}",
            field="kv_connector",
            value="KvOffloadConnector",
            hint='Use "kv_connector": "OffloadingConnector" with "spec_name": "KvOffloadSpec".',
        )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )

    config = build_offloading_config(vllm_config, kv_cache_config)
    replicated = is_replicated(vllm_config, kv_cache_config)
    return KvOffloadSpec(config, pipeline_stages=True, replicated=replicated)


def kv_cache_registrar(spec: Any, vllm_config: Any, kv_cache_config: Any) -> Any:
    """vLLM's own worker of an offloading connector, for the one thing that it knows best: how each
    attention backend lays out its KV cache. It hands a description to `spec.get_worker`."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )

    wanted = inspect.signature(OffloadingConnectorWorker.__init__).parameters
    given = {"spec": spec, "vllm_config": vllm_config, "kv_cache_config": kv_cache_config}
    return OffloadingConnectorWorker(**{name: given[name] for name in given if name in wanted})


def transfer_results(done: set[str], failed: set[str]) -> Any:
    """What `get_transfer_results` answers (from 0.30)."""
    return connector_base.KVConnectorTransferResults(
        finished_recving=done | failed, failed_recving=failed
    )
