"""`KvOffloadSpec`: what vLLM's `OffloadingConnector` is told to use.

vLLM makes one in the scheduler's process and one in every worker's. Both work out the capacity from
the same static figures, so that no slot is given out that a worker does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingSpec

from kvoffload_rs.config import Settings, check_keys, plan_capacity
from kvoffload_rs.errors import ConfigError
from kvoffload_rs.memory import machine_memory
from kvoffload_rs.values import parse_int
from kvoffload_rs.vllm import compat
from kvoffload_rs.vllm.manager import HostSlotsSpec, KvOffloadManager
from kvoffload_rs.vllm.sharing import Sharing
from kvoffload_rs.vllm.worker import DirectionHandler, KvOffloadWorker, RankTransfers

_warned: set[str] = set()


class KvOffloadSpec(OffloadingSpec):
    """Offloads KV chunks to host memory, managed and moved by Rust.

    Args:
        config: vLLM's `OffloadingConfig` (from 0.26), or its `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig` (up to 0.24).
        pipeline_stages: whoever makes it sees to it that all stages agree on the capacity.
        replicated: all ranks hold the same KV, and whoever makes it sees to it that no rank stores
            to a slot that another still reads.

    Raises:
        ConfigError: a setting is wrong, misspelt or not supported.
        CapacityError: the memory holds no slot, or is more than the machine has.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Declares every metric that the manager emits; called in the API server, too."""
        threshold = parse_int("store_threshold", extra_config.get("store_threshold") or 0, 0)
        return compat.metric_definitions(threshold)

    @classmethod
    def config_info_keys(cls, extra_config: Mapping[str, Any]) -> tuple[str, ...]:
        """Labels of the configuration metric that the manager fills (0.33)."""
        return compat.config_info_keys()

    def __init__(
        self,
        config: Any,
        kv_cache_config: Any = None,
        *,
        pipeline_stages: bool = False,
        replicated: bool = False,
    ) -> None:
        facts = compat.engine_facts(config, kv_cache_config)
        warnings = check_keys(facts.extra, *compat.known_keys(compat.vllm_version()))
        memory = machine_memory()
        settings = Settings.parse(facts.extra, memory)
        if facts.pipeline_size > 1 and not pipeline_stages:
            # The scheduler knows the first stage's bytes per block only. Where another stage holds
            # more layers, it would give out slots that this stage's workers do not have.
            raise ConfigError(
                "pipeline parallelism is not supported by KvOffloadSpec",
                field="pipeline_parallel_size",
                value=facts.pipeline_size,
                hint="Use tensor parallelism, or switch KV offloading off.",
            )
        chunk = compat.blocks_per_chunk(
            facts, config, settings.block_size, settings.blocks_per_chunk
        )
        # The driver's own memory cannot be shared.
        shared = settings.share_replicated_kv and replicated and settings.pinning != "allocate"
        self._sharing = Sharing(facts.engine_id, facts.rank, facts.world_size) if shared else None
        self._capacity = plan_capacity(
            settings.cpu_bytes,
            bytes_per_block=facts.bytes_per_block,
            blocks_per_chunk=chunk,
            regions=1 if shared else facts.world_size,
            memory=memory,
        )
        super().__init__(*((config,) if compat.HAS_CONFIG else (config, kv_cache_config)))
        unknown = compat.apply_settings(
            self,
            chunk=chunk,
            offload_prompt_only=settings.offload_prompt_only,
            self_describing_kv_events=settings.self_describing_kv_events,
        )
        warnings += [
            f"setting {key!r} has no effect: this vLLM does not have it"
            for key in unknown
            if key in facts.extra
        ]
        if settings.fault_injection:
            if settings.fault_injection.get("rank", 0) >= facts.world_size:
                raise ConfigError(
                    f"fault_injection: there is no such rank, the engine has {facts.world_size}",
                    field="fault_injection",
                    value=settings.fault_injection["rank"],
                )
            warnings.append(
                f"FAULT INJECTION IS ON: {dict(settings.fault_injection)}. Outputs will be wrong "
                "or the engine will stop. Remove 'fault_injection' outside tests"
            )
        for text in warnings:
            _warn_once(text)
        self._facts = facts
        self._settings = settings
        self._chunk = chunk
        self._manager: KvOffloadManager | None = None
        self._transfers: RankTransfers | None = None
        self._worker: KvOffloadWorker | None = None
        compat.logger.info(
            "kvoffload: %d slots of %d bytes in each of %d region(s) for %d rank(s), "
            "%d block(s) per chunk, %s",
            self._capacity.num_slots,
            self._capacity.slot_bytes,
            self._capacity.regions,
            facts.world_size,
            chunk,
            settings,
        )

    @property
    def settings(self) -> Settings:
        """The checked settings."""
        return self._settings

    @property
    def shares_region(self) -> bool:
        """Whether the ranks share one host region."""
        return self._sharing is not None

    @property
    def facts(self) -> compat.EngineFacts:
        """What is known of the engine."""
        return self._facts

    @property
    def chunk(self) -> int:
        """GPU blocks in a chunk."""
        return self._chunk

    @property
    def transfers(self) -> RankTransfers | None:
        """This rank's copies, once `get_worker` was called."""
        return self._transfers

    @property
    def num_slots(self) -> int:
        """Slots of the host pool."""
        return self._capacity.num_slots

    def get_manager(self) -> KvOffloadManager:
        """The scheduler's side; always the same one."""
        if self._manager is None:
            settings = self._settings
            self._manager = KvOffloadManager(
                self._capacity.num_slots,
                policy=settings.eviction_policy,
                events=self._facts.kv_events,
                store_threshold=settings.store_threshold,
                max_tracker_size=settings.max_tracker_size,
                partial_admission=settings.partial_admission,
                write_deadline_s=settings.write_deadline_s,
                info=self._info(),
            )
        return self._manager

    def get_worker(self, kv_caches: Any) -> KvOffloadWorker:
        """The worker's side (from 0.26); always the same one until it is shut down.

        Args:
            kv_caches: vLLM's `CanonicalKVCaches`.

        Raises:
            ConfigError: the KV cache is on a device or in a layout that is not supported.
            WorkerExistsError: the process has a worker for this engine and rank.
        """
        transfers = self._get_transfers(kv_caches)
        if self._worker is None or self._worker.transfers is not transfers:
            self._worker = KvOffloadWorker(transfers)
        return self._worker

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, DirectionHandler]]:
        """The worker's side (up to 0.24): source, destination and handler of each direction.

        Args:
            kv_caches: vLLM's `CanonicalKVCaches`.

        Raises:
            ConfigError: the KV cache is on a device or in a layout that is not supported.
            WorkerExistsError: the process has a worker for this engine and rank.
        """
        transfers = self._get_transfers(kv_caches)
        yield GPULoadStoreSpec, HostSlotsSpec, DirectionHandler(transfers, store=True)
        yield HostSlotsSpec, GPULoadStoreSpec, DirectionHandler(transfers, store=False)

    def _get_transfers(self, kv_caches: Any) -> RankTransfers:
        if self._transfers is None or self._transfers.closed:
            self._transfers = RankTransfers(
                kv_caches,
                engine_id=self._facts.engine_id,
                rank=self._facts.rank,
                capacity=self._capacity,
                blocks_per_chunk=self._chunk,
                settings=self._settings.on_rank(self._facts.rank),
                sharing=self._sharing,
            )
        return self._transfers

    def _info(self) -> Mapping[str, Any]:
        capacity = self._capacity
        if not compat.HAS_CONFIG:
            return {}
        return compat.config_info(
            self.config, capacity.num_slots, capacity.slot_bytes * capacity.regions
        )


def _warn_once(text: str) -> None:
    """Logs a warning once per process: a process may hold the specs of both roles."""
    if text not in _warned:
        _warned.add(text)
        compat.logger.warning("kvoffload: %s", text)
