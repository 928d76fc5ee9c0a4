"""A worker's side: starts copies, and reports each exactly once, whatever became of it.

Stores wait for the next step, so that they do not delay the copies that sampling needs; loads start
with their own step, before its forward pass is put on the stream: a load that came after it would
wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvoffload_rs.errors import ConfigError, KvOffloadError
from kvoffload_rs.vllm import compat
from kvoffload_rs.vllm.connector.messages import Order, RankFacts, Reports, StepOrders
from kvoffload_rs.vllm.spec import KvOffloadSpec

_VOID = "a reset came while it was loading"
_SPOILED = "its blocks were cleared before they were read"
_HOLLOW = "its chunks were gone when its blocks were given out"
_LATE = "its blocks were needed before they were read"


class Blocks:
    """A job's numbers in the form of vLLM's specs, which the copies take."""

    __slots__ = ("block_ids", "block_indices", "group_sizes")

    def __init__(self, ids: bytes, sizes: list[int], firsts: list[int]) -> None:
        self.block_ids = np.frombuffer(ids, dtype=np.int32)
        self.group_sizes = sizes
        self.block_indices = firsts


class WorkerSide:
    """The copies of one rank.

    Args:
        spec: settings, capacity and the rank's copies.
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`.
    """

    def __init__(self, spec: KvOffloadSpec, vllm_config: Any, kv_cache_config: Any) -> None:
        self._spec = spec
        self._rank = spec.facts.rank
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        self._deadline = spec.settings.load_deadline_s
        #: Failed loads are named by request, not by block.
        self.reports_requests = self._num_groups > 1
        # Turns vLLM's KV caches into one description for all layouts, and hands it to our spec.
        self._registrar = compat.kv_cache_registrar(spec, vllm_config, kv_cache_config)
        self._transfers: Any = None
        #: Stores that wait for the next step.
        self._waiting: list[Order] = []
        #: Loads under way, oldest first: when each began, and what it is.
        self._loads: dict[int, tuple[float, Order]] = {}
        self._late: set[int] = set()
        #: Stores under way.
        self._stores: set[int] = set()
        #: Why a job that is still under way has failed, whatever becomes of it.
        self._failed: dict[int, str] = {}
        self._started: StepOrders | None = None
        self._reports = Reports()
        self._done: set[str] = set()
        self._undone: set[str] = set()
        self._bad_blocks: set[int] = set()

    # --- start and end ------------------------------------------------------------------------

    def register(self, kv_caches: Any, backend: Any = None) -> None:
        """Makes the region and the threads for vLLM's KV caches.

        Args:
            kv_caches: tensors by layer; or with `backend` one tensor of all layers.
            backend: the attention backend of a tensor of all layers (up to 0.28).
        """
        if backend is None:
            self._registrar.register_kv_caches(kv_caches)
        else:
            self._registrar.register_cross_layers_kv_cache(kv_caches, backend)
        self._transfers = self._spec.transfers
        self._transfers.before_drain = self._submit_waiting
        fragments = max(self._transfers.pages_per_block)
        if fragments > 1:
            compat.logger.warning(
                "kvoffload: rank %d: the attention backend keeps a block of all layers in %d "
                "places, not in one: copies have that many parts. Another attention backend may "
                "do better",
                self._rank,
                fragments,
            )

    def facts(self) -> RankFacts | None:
        """What the scheduler should know, once there is a KV cache."""
        if self._transfers is None:
            return None
        return RankFacts(
            rank=self._rank,
            num_slots=self._transfers.num_slots,
            slot_bytes=self._transfers.slot_bytes,
            chunk_shape=tuple(self._transfers.chunk_bytes),
            blocks_per_chunk=self._spec.chunk,
        )

    def shutdown(self) -> None:
        """Ends the copies. May be called again."""
        self._waiting.clear()
        if self._transfers is not None:
            self._transfers.shutdown()

    # --- a step -------------------------------------------------------------------------------

    def flush(self, orders: StepOrders) -> None:
        """Before anything of a step is written: stores of blocks that it writes have read them."""
        if not orders.flush:
            return
        wanted = set(orders.flush)
        self._submit(order for order in self._waiting if order.job in wanted)
        self._waiting = [order for order in self._waiting if order.job not in wanted]
        # Of requests that ended after their last step: nothing more will be computed for them.
        self._submit(order for order in orders.stores if order.job in wanted)
        orders.stores = [order for order in orders.stores if order.job not in wanted]
        self._fail(orders.spoiled, _SPOILED)
        try:
            self._transfers.await_ends(wanted)
        except KvOffloadError as error:
            # The step cannot wait for ever. What is read from now on is not what was to be stored.
            self._fail(wanted, _LATE)
            self._transfers.cancel(wanted)
            compat.logger.error("kvoffload: rank %d: %s; giving them up", self._rank, error)

    def begin(self, orders: StepOrders) -> None:
        """A step begins: starts its loads, and the stores of the step before. Once per step."""
        if orders is self._started:
            return
        self._started = orders
        self._submit_waiting()
        self._waiting = list(orders.stores)
        self._fail(orders.void, _VOID)
        now = time.monotonic()
        for order in orders.loads:
            if not order.slots:
                # Without blocks there was nothing to load: groups whose windows begin later.
                self._end_load(order, _HOLLOW if order.blocks else None)
                continue
            self._loads[order.job] = (now, order)
            blocks = Blocks(order.blocks, order.group_sizes, order.first_blocks)
            try:
                self._transfers.start_load(order.job, order.slots, blocks)
            except KvOffloadError as error:
                del self._loads[order.job]
                self._end_load(order, str(error))

    def collect(self) -> None:
        """Takes what has ended since the last call."""
        for job, is_store, size, seconds, error in self._transfers.outcomes():
            reason = self._failed.pop(job, None) or (None if error is None else str(error))
            if reason is None:
                moved = self._reports.stored if is_store else self._reports.loaded
                moved.jobs += 1
                moved.bytes += size
                moved.seconds += seconds
            if is_store:
                self._stores.discard(job)
                self._reports.ends.append((self._rank, job, reason))
                continue
            _, order = self._loads.pop(job)
            self._late.discard(job)
            self._end_load(order, reason)
        self._give_up_late_loads()

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, and those among them whose load failed.

        Raises:
            ConfigError: a load failed, and this vLLM has no way to recompute it for a model with
                several KV groups.
        """
        done, self._done = self._done, set()
        undone, self._undone = self._undone, set()
        if undone and self._num_groups > 1 and not compat.HAS_FAILED_RECVING:
            raise ConfigError(
                f"a load failed for request {sorted(undone)[0]!r}, and vLLM "
                f"{compat.version_text()} cannot recompute a request of a model with "
                f"{self._num_groups} KV groups",
                field="kv_load_failure_policy",
                hint="Use vLLM 0.30 or later.",
            )
        return done, undone

    def take_bad_blocks(self) -> set[int]:
        """GPU blocks that were not loaded, for models with one KV group."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> Reports | None:
        """What the scheduler must know."""
        if not self._reports.ends:
            return None
        reports, self._reports = self._reports, Reports()
        return reports

    def drain(self) -> None:
        """Waits until no copy is under way; stores that wait for the next step are made, too."""
        if self._transfers is not None:
            self._transfers.drain()

    # --- copies -------------------------------------------------------------------------------

    def _fail(self, jobs: Iterable[int], reason: str) -> None:
        """Notes that jobs have failed, if they are under way, whatever becomes of them."""
        for job in jobs:
            if job in self._stores or job in self._loads:
                self._failed.setdefault(job, reason)

    def _submit_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._submit(waiting)

    def _submit(self, orders: Iterable[Order]) -> None:
        for order in orders:
            blocks = Blocks(order.blocks, order.group_sizes, order.first_blocks)
            try:
                self._transfers.start_store(order.job, blocks, order.slots)
                self._stores.add(order.job)
            except KvOffloadError as error:
                self._reports.ends.append((self._rank, order.job, str(error)))

    def _end_load(self, order: Order, reason: str | None) -> None:
        self._reports.ends.append((self._rank, order.job, reason))
        self._done.add(order.request)
        if reason is None:
            return
        self._undone.add(order.request)
        if self._num_groups == 1:
            self._bad_blocks.update(np.frombuffer(order.blocks, dtype=np.int32).tolist())

    def _give_up_late_loads(self) -> None:
        """Cancels loads that are overdue.

        They are reported when nothing of them can write any more: until then their requests wait,
        because their blocks are not safe to use.
        """
        if not self._loads:
            return
        overdue = time.monotonic() - self._deadline
        late = []
        for job, (since, _) in self._loads.items():
            if since > overdue:
                break
            if job not in self._late:
                late.append(job)
        if late:
            self._late.update(late)
            self._fail(late, f"it was not over after {self._deadline} s")
            self._transfers.cancel(late)
            compat.logger.error(
                "kvoffload: rank %d: %d load(s) not over after %s s (first: job %d); giving up",
                self._rank,
                len(late),
                self._deadline,
                late[0],
            )
