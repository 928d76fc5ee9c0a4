"""The scheduler's side: every decision is made in Rust, with one call per step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from kvoffload_rs import _core
from kvoffload_rs.errors import CapacityError
from kvoffload_rs.vllm import compat
from kvoffload_rs.vllm.connector import events
from kvoffload_rs.vllm.connector.facts import check_states, group_facts
from kvoffload_rs.vllm.connector.messages import Order, RankFacts, Reports, StepOrders
from kvoffload_rs.vllm.connector.metrics import KvOffloadStats
from kvoffload_rs.vllm.spec import KvOffloadSpec

#: Failures of one kind that are logged; the rest is only counted.
_MOST_WARNINGS = 20
#: Seconds between two sets of statistics.
_STATS_EVERY = 0.25


class SchedulerSide:
    """What is loaded and stored for which request.

    Args:
        spec: settings and capacity.
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`.

    Raises:
        ConfigError: a KV group or a setting is not supported.
    """

    def __init__(self, spec: KvOffloadSpec, vllm_config: Any, kv_cache_config: Any) -> None:
        settings, facts = spec.settings, spec.facts
        groups = group_facts(kv_cache_config, facts.tokens_per_block)
        per_hash = compat.tokens_per_hash(spec.config)
        check_states(groups, per_hash, vllm_config.speculative_config is not None)
        self._spec = spec
        self._events = facts.kv_events
        self._can_fail_loads = len(groups) == 1 or compat.HAS_FAILED_RECVING
        self._failures = 0
        self._next_stats = 0.0
        self._moved = Reports()
        #: Requests that have not ended, by id.
        self._requests: dict[str, Any] = {}
        self._settings: dict[str, Any] = {
            "blocks_per_chunk": spec.chunk,
            "tokens_per_hash": per_hash,
            "num_ranks": facts.world_size,
            "one_region": spec.shares_region,
            "prompt_only": settings.offload_prompt_only,
            # What another request loads is in the GPU's prefix cache afterwards, if there is one.
            "share_loads": bool(vllm_config.cache_config.enable_prefix_caching),
            "defer_deadline_s": settings.defer_deadline_s,
            "policy": settings.eviction_policy,
            "events": facts.kv_events,
            "store_threshold": settings.store_threshold,
            "max_tracker_size": settings.max_tracker_size,
            "write_deadline_s": settings.write_deadline_s,
        }
        self._groups = [group.as_tuple() for group in groups]
        self.core = _core.Requests(self._groups, num_slots=spec.num_slots, **self._settings)

    # --- start --------------------------------------------------------------------------------

    def check_ranks(self, ranks: Iterable[RankFacts]) -> None:
        """Compares what the workers have with what this side hands out.

        Raises:
            CapacityError: a rank has other slots or chunks.
        """
        ranks = sorted(ranks, key=lambda facts: facts.rank)
        # Pipeline stages have other layers each, so that the same memory holds other numbers of
        # slots: the smallest number is there on all of them.
        stages = self._spec.facts.pipeline_size > 1
        slots = min((facts.num_slots for facts in ranks), default=self.core.num_slots)
        if stages and slots < self.core.num_slots and not self.core.num_requests:
            self.core = _core.Requests(self._groups, num_slots=slots, **self._settings)
        slots = self.core.num_slots
        for facts in ranks:
            enough = facts.num_slots >= slots if stages else facts.num_slots == slots
            if not enough or facts.blocks_per_chunk != self._spec.chunk:
                raise CapacityError(
                    f"rank {facts.rank} has {facts.num_slots} slots of {facts.blocks_per_chunk} "
                    f"block(s), the scheduler hands out {slots} of {self._spec.chunk}",
                    field="cpu_bytes_to_use",
                    value=facts.num_slots,
                    hint="All ranks must run the same version with the same settings.",
                )

    # --- requests -----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request arrives."""
        self._requests[request.request_id] = request
        self.core.add(
            request.request_id,
            request.num_prompt_tokens,
            **request_limits(request.request_id, request.kv_transfer_params),
        )

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond the computed ones can be loaded; None: ask again."""
        self._ensure_known(request)
        skip = getattr(request, "skip_reading_prefix_cache", False)
        total = computed if skip else request.num_tokens
        tokens, reason = self.core.lookup(request.request_id, request.block_hashes, computed, total)
        compat.logger.debug(
            "kvoffload: request %s: %s of %d tokens beyond %d computed ones%s",
            request.request_id,
            "asks again for some" if tokens is None else tokens,
            total - computed,
            computed,
            f", not more: {reason}" if reason else "",
        )
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """The engine gave blocks to a request, and begins to load so many tokens."""
        self._ensure_known(request)
        self.core.allocated(request.request_id, blocks.blocks, external)

    def request_finished(self, request: Any) -> None:
        """A request has ended; what is left of it is stored."""
        if self._requests.pop(request.request_id, None) is not None:
            self.core.finish(request.request_id, request.block_hashes, request.num_computed_tokens)

    # --- steps --------------------------------------------------------------------------------

    def build_connector_meta(self, output: Any) -> StepOrders:
        """What the workers are told with a step."""
        cached = output.scheduled_cached_reqs
        copies = getattr(output, "kv_cache_block_copies", None) or ()
        written = list(getattr(output, "new_block_ids_to_zero", None) or ())
        loads, stores, flush, spoiled, void = self.core.step(
            [
                (new.req_id, new.block_ids, new.num_computed_tokens)
                for new in output.scheduled_new_reqs
            ],
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.resumed_req_ids,
            output.preempted_req_ids,
            written + [copy.dst_block_id for copy in copies],
            [copy.src_block_id for copy in copies],
            output.num_scheduled_tokens,
            self._requests,
        )
        return StepOrders(
            [Order(*load) for load in loads],
            [Order(*store) for store in stores],
            flush,
            void,
            spoiled,
        )

    def update_connector_output(self, output: Any) -> None:
        """Takes the workers' reports."""
        reports = output.kv_connector_worker_meta
        if not isinstance(reports, Reports):
            return
        self._moved.stored.add(reports.stored)
        self._moved.loaded.add(reports.loaded)
        for job, is_store, request, chunks, failures, _void in self.core.report(reports.ends):
            if failures:
                self._tell_failure(job, is_store, request, chunks, failures)

    def has_work(self) -> bool:
        """Whether the engine must go on stepping although no request runs."""
        return bool(self.core.has_work())

    def reset(self) -> bool:
        """Empties the pool; nothing from before is stored or found again.

        False if loads are under way. They fail and are computed instead, unless this vLLM cannot do
        that, or a worker has just reported one: those serve what they were promised.
        """
        loads = self.core.reset(self._can_fail_loads)
        if loads and not self._can_fail_loads:
            compat.logger.warning(
                "kvoffload: the host pool was emptied while %d load(s) were under way, which vLLM "
                "%s cannot compute again for a model with several KV groups: their requests use KV "
                "from before the reset. Pause the engine first, or use vLLM 0.30 or later",
                loads,
                compat.version_text(),
            )
        return not loads

    # --- what others want to know -------------------------------------------------------------

    def take_events(self) -> list[Any]:
        """vLLM's KV events for what was stored and evicted."""
        if not self._events:
            return []
        return events.to_vllm(self.core.take_events())

    def take_stats(self) -> KvOffloadStats | None:
        """What happened since the start; None shortly after the last call, because vLLM asks in
        every step. The last step before a pause is told: what it shows stays for as long."""
        now = time.monotonic()
        if now < self._next_stats and (self._requests or self.has_work()):
            return None
        self._next_stats = now + _STATS_EVERY
        moved, self._moved = self._moved, Reports()
        return KvOffloadStats.since(self.core.metrics(), moved)

    def _ensure_known(self, request: Any) -> None:
        if request.request_id not in self._requests:
            # A connector that is one of several may not be told of every request.
            self.on_new_request(request)

    def _tell_failure(
        self, job: int, is_store: bool, request: str | None, chunks: int, failures: Any
    ) -> None:
        self._failures += 1
        if self._failures > _MOST_WARNINGS:
            return
        rank, reason = failures[0]
        what = "the chunks are not kept" if is_store else "its tokens are computed instead"
        compat.logger.warning(
            "kvoffload: %s job %d of %d chunks for request %s failed on rank %d: %s; %s%s",
            "store" if is_store else "load",
            job,
            chunks,
            request or "(over)",
            rank,
            reason,
            what,
            "; further failures are only counted" if self._failures == _MOST_WARNINGS else "",
        )


def request_limits(name: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request's wishes from its `kv_transfer_params`; what is no valid wish is told and ignored.

    Keys: `max_load_tokens`, `max_offload_tokens` (as vLLM's own connector has them),
    `kvoffload_skip` (`"load"`, `"store"` or true for both), `kvoffload_priority` (`"low"`: its
    chunks take free slots only; `"normal"`).
    """
    limits: dict[str, Any] = {}
    if not params:
        return limits

    def ignore(key: str, wanted: str) -> None:
        compat.logger.warning(
            "kvoffload: request %s: %s is %r, which is ignored: it must be %s",
            name,
            key,
            params[key],
            wanted,
        )

    for key, into in (
        ("max_load_tokens", "max_load_tokens"),
        ("max_offload_tokens", "max_store_tokens"),
    ):
        value = params.get(key)
        if type(value) is int and value >= 0:
            limits[into] = value
        elif value is not None:
            ignore(key, "a whole number, 0 or more")
    skip = params.get("kvoffload_skip")
    if skip in ("load", "store", True):
        limits["skip_load"] = skip != "store"
        limits["skip_store"] = skip != "load"
    elif skip not in (None, False):
        ignore("kvoffload_skip", '"load", "store" or a truth value')
    priority = params.get("kvoffload_priority")
    if priority == "low":
        limits["low_priority"] = True
    elif priority not in (None, "normal"):
        ignore("kvoffload_priority", '"low" or "normal"')
    return limits
