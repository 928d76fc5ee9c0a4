"""What vLLM calls: each method goes to the side that this process has.

vLLM makes one connector in the scheduler's process and one in every worker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvoffload_rs.errors import ConfigError
from kvoffload_rs.vllm import compat
from kvoffload_rs.vllm.connector.messages import RankFacts, StepOrders
from kvoffload_rs.vllm.connector.metrics import KvOffloadPromMetrics, KvOffloadStats
from kvoffload_rs.vllm.connector.scheduler import SchedulerSide
from kvoffload_rs.vllm.connector.worker import WorkerSide


class KvOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads KV chunks to host memory; scheduler and worker state are in Rust.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        role: which side this process has.
        kv_cache_config: vLLM's `KVCacheConfig`.

    Raises:
        ConfigError: vLLM is too old, or a setting or the model is not supported.
        CapacityError: the memory holds no slot, or is more than the machine has.
    """

    _cache_hit_source = compat.LOAD_SOURCE

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        spec = compat.make_spec(vllm_config, kv_cache_config)
        self._is_one_of_several = compat.is_one_of_several(vllm_config)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            _warn_of_failure_policy(vllm_config.kv_transfer_config)
            self.scheduler_side = SchedulerSide(spec, vllm_config, kv_cache_config)
        else:
            self.worker_side = WorkerSide(spec, vllm_config, kv_cache_config)

    @property
    def _scheduler(self) -> SchedulerSide:
        if self.scheduler_side is None:
            raise _wrong_side("a worker", "scheduler")
        return self.scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        if self.worker_side is None:
            raise _wrong_side("the scheduler", "worker")
        return self.worker_side

    # --- what vLLM asks before it starts ------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """A block of all layers in one piece is one copy (up to 0.28)."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is computed again."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout in which a block of all layers is in one piece, where there is a choice."""
        return compat.preferred_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvOffloadStats:
        """Statistics from their numbers."""
        return KvOffloadStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KvOffloadPromMetrics:
        """The Prometheus side of the statistics."""
        return KvOffloadPromMetrics(*args, **kwargs)

    def get_handshake_metadata(self) -> RankFacts | None:
        """What this rank has; the scheduler compares it.

        Not as one of several connectors: vLLM gives the first one's answer to all of them, and some
        end the engine over an answer that is not theirs.
        """
        if self.worker_side is None or self._is_one_of_several:
            return None
        return self.worker_side.facts()

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """What the ranks have.

        Raises:
            CapacityError: they do not agree.
        """
        self._scheduler.check_ranks(
            facts for facts in metadata.values() if isinstance(facts, RankFacts)
        )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """The same, by pipeline stage and rank."""
        self.set_xfer_handshake_metadata(metadata)

    # --- scheduler ----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request arrives."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens that can be loaded or None for later, whether they will be)."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were given to a request."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """What the workers are told with a step."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Its blocks may be freed: stores that still read them are known."""
        self._scheduler.request_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for models with several KV groups."""
        self._scheduler.request_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping for copies."""
        return self._scheduler.has_work()

    def take_events(self) -> Iterable[Any]:
        """KV events of the host pool."""
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        """Empties the host pool; False if something from before is still in use."""
        return self._scheduler.reset()

    def get_kv_connector_stats(self) -> KvOffloadStats | None:
        """Counters, from the scheduler's side."""
        return None if self.scheduler_side is None else self.scheduler_side.take_stats()

    # --- worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> None:
        """The KV caches, by layer."""
        self._worker.register(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """The KV cache of all layers in one tensor (up to 0.28)."""
        self._worker.register(kv_cache, attn_backend)

    def unregister_kv_caches(self) -> None:
        """The KV cache is about to lose its memory (from 0.33): nothing may read or write it."""
        self._worker.drain()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything of a step is written."""
        self._worker.flush(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins: its new blocks are clear, its forward pass is not on the stream yet."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began with `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its load is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored whole."""

    def wait_for_save(self) -> None:
        """Nothing: stores begin with the next step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(none, requests whose loads are over). Stores are reported to the scheduler's side."""
        self._worker.collect()
        done, _ = self._worker.take_loaded()
        return None, done or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same with failed loads (from 0.30)."""
        self._worker.collect()
        done, undone = self._worker.take_loaded()
        return compat.transfer_results(done, undone if self._worker.reports_requests else set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, for models with one KV group."""
        return self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        """What became of jobs on this rank."""
        return None if self.worker_side is None else self.worker_side.take_reports()

    # --- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the copies and gives the host memory back."""
        if self.worker_side is not None:
            self.worker_side.shutdown()


def _warn_of_failure_policy(transfer_config: Any) -> None:
    if getattr(transfer_config, "kv_load_failure_policy", None) != "recompute":
        compat.logger.warning(
            "kvoffload: kv_load_failure_policy is not 'recompute': A LOAD THAT FAILS WILL FAIL ITS "
            'REQUEST. Add "kv_load_failure_policy": "recompute" to --kv-transfer-config, and '
            "it is computed instead"
        )


def _wrong_side(here: str, there: str) -> ConfigError:
    return ConfigError(
        f"this is {here}'s connector: the call belongs to a {there}'s",
        field="role",
        hint="vLLM makes one connector for each role: report it if vLLM made this call.",
    )
