"""The worker's side: copies between GPU blocks and this rank's host region.

`RankTransfers` is the whole of it. vLLM sees it as one worker (from 0.26), or as two handlers, one
per direction (up to 0.24).

vLLM's connector asserts that every transfer succeeds, so this side is fail-stop: a copy that
failed raises, and success is never reported for bytes that did not arrive.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from kvoffload_rs import _core
from kvoffload_rs.config import Capacity, Settings
from kvoffload_rs.errors import CapacityError, ConfigError, KvOffloadError, WorkerExistsError
from kvoffload_rs.vllm import compat, copies, sleep
from kvoffload_rs.vllm.sharing import Offer, Sharing

_GPU_MEDIUM = "GPU"

# One region per engine and rank in a process: two would each hold half of what was stored. Weak,
# so that an engine that was dropped without a shutdown does not block the next one.
_live: weakref.WeakValueDictionary[tuple[str, int], RankTransfers] = weakref.WeakValueDictionary()
_live_lock = threading.Lock()
_process = os.getpid()


@atexit.register
def _shut_down_all() -> None:
    """Ends every worker that is left before the driver and the interpreter go.

    In a forked child their threads do not exist, and nothing there is the child's to end.
    """
    if os.getpid() == _process:
        for transfers in list(_live.values()):
            transfers.shutdown()


class Slots:
    """Host slots as the copies take them."""

    __slots__ = ("block_ids",)

    def __init__(self, slots: bytes) -> None:
        self.block_ids = np.frombuffer(slots, dtype=np.int32)


class RankTransfers:
    """One rank's host region and the transfers to and from it.

    Of ranks that share a region only the first stores: on the others a store is over at once, and
    whoever counts the ranks finds that it is done when the first has reported it.

    Args:
        kv_caches: vLLM's `CanonicalKVCaches`.
        engine_id: id of the engine.
        rank: this worker's rank.
        capacity: of the pool, as the scheduler computes it.
        blocks_per_chunk: GPU blocks of one chunk.
        settings: of the engine.
        sharing: who shares one region; None if each rank has its own.

    Raises:
        ConfigError: the KV cache is on a device or in a layout that is not supported; or the first
            rank's region cannot be shared.
        CapacityError: a chunk of this rank needs more than the slots were planned for.
        WorkerExistsError: the process has a worker for this engine and rank.
    """

    def __init__(
        self,
        kv_caches: Any,
        *,
        engine_id: str,
        rank: int,
        capacity: Capacity,
        blocks_per_chunk: int,
        settings: Settings,
        sharing: Sharing | None = None,
    ) -> None:
        tensors = [canonical.tensor for canonical in kv_caches.tensors]
        for tensor in tensors:
            _check_tensor(tensor)
        groups = [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        slot_bytes = _core.slot_bytes(groups, blocks_per_chunk)
        self.num_slots = capacity.num_slots
        self.slot_bytes = slot_bytes
        self.chunk_bytes = [blocks_per_chunk * sum(size for _, size in refs) for refs in groups]
        self.pages_per_block = [len(refs) for refs in groups]
        self.before_drain: Callable[[], None] | None = None
        if slot_bytes > capacity.slot_bytes:
            raise CapacityError(
                f"a chunk on rank {rank} has {slot_bytes} bytes, but slots were planned with "
                f"{capacity.slot_bytes}",
                field="cpu_bytes_to_use",
                value=slot_bytes,
                hint="The KV cache of this rank is not what the configuration says: report it.",
            )
        self._name = (engine_id, rank)
        self._closed = False
        self._stored: list[Any] = []
        self._loaded: list[Any] = []
        #: Stores that another rank makes, and that are to be reported here.
        self._left_to_others: list[int] = []
        self._reads_only = sharing is not None and sharing.reads_only
        self._offer: Offer | None = None
        shape = f"{capacity.num_slots} slots of {slot_bytes} bytes, {blocks_per_chunk} x {groups}"
        _claim(self._name, self)
        joined = None
        try:
            region: dict[str, Any] = {}
            if sharing is not None and sharing.reads_only:
                region["join_region"] = joined = sharing.join(shape)
            elif sharing is not None:
                region["share_region"] = True
            self._core = copies.choose(tensors)(
                [
                    (
                        canonical.tensor.data_ptr(),
                        canonical.tensor.shape[0],
                        canonical.tensor.stride(0) * canonical.tensor.element_size(),
                        canonical.page_size_bytes,
                    )
                    for canonical in kv_caches.tensors
                ],
                groups,
                tensors,
                settings,
                blocks_per_chunk=blocks_per_chunk,
                num_slots=capacity.num_slots,
                slot_bytes=slot_bytes,
                **region,
            )
        except BaseException:
            _release(self._name, self)
            raise
        finally:
            if joined is not None:
                os.close(joined)
        if sharing is not None and not sharing.reads_only:
            try:
                self._offer = Offer(sharing, self._core.take_region_fd(), shape)
            except BaseException:
                self.shutdown()
                raise
        compat.logger.info("kvoffload: rank %d: %s", rank, self._core.describe())
        sleep.drain_before_sleep(self)
        self._say()

    @property
    def closed(self) -> bool:
        """True after `shutdown`."""
        return self._closed

    def submit_store(self, job_id: int, gpu: Any, host: Any) -> Literal[True]:
        """Starts copying GPU blocks to host slots. Raises if the job is invalid."""
        if self._reads_only:
            self._left_to_others.append(job_id)
            return True
        with _Loud("store", job_id):
            self._core.submit_store(job_id, gpu, host)
        return True

    def submit_load(self, job_id: int, host: Any, gpu: Any) -> Literal[True]:
        """Starts copying host slots to GPU blocks. Raises if the job is invalid."""
        with _Loud("load", job_id):
            self._core.submit_load(job_id, host, gpu)
        return True

    def start_store(self, job_id: int, blocks: Any, slots: bytes) -> None:
        """As `submit_store`, for a caller that deals with errors, with slots as native int32."""
        if self._reads_only:
            self._left_to_others.append(job_id)
            return
        self._core.submit_store(job_id, blocks, Slots(slots))

    def start_load(self, job_id: int, slots: bytes, blocks: Any) -> None:
        """As `submit_load`, for a caller that deals with errors, with slots as native int32."""
        self._core.submit_load(job_id, Slots(slots), blocks)

    def finished(self, *, stores: bool = True, loads: bool = True) -> list[Any]:
        """The transfers that are over, each once. Raises if one failed, and keeps the others.

        Args:
            stores: give the stores.
            loads: give the loads.
        """
        try:
            with _Loud("transfer", None):
                finished = self._core.take_finished()
        finally:
            self._say()
        for job_id, is_store, size, seconds in finished:
            (self._stored if is_store else self._loaded).append(
                _result(job_id, is_store, size, seconds)
            )
        left, self._left_to_others = self._left_to_others, []
        self._stored += [_result(job_id, True, 0, 0.0) for job_id in left]
        done: list[Any] = []
        if stores:
            done, self._stored = self._stored, []
        if loads:
            done, self._loaded = done + self._loaded, []
        return done

    def outcomes(self) -> list[tuple[int, bool, int, float, Exception | None]]:
        """The transfers that are over, oldest first, for a caller that can bear that one fails.

        Job, whether it is a store, bytes, seconds, and the error; None if every byte arrived.
        A transfer is reported here or by `finished`, once.
        """
        try:
            ended = self._core.take_outcomes()
            left, self._left_to_others = self._left_to_others, []
            return [(job, True, 0, 0.0, None) for job in left] + ended
        finally:
            self._say()

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Asks that the jobs be given up; unknown ones are ignored. Never waits.

        Each still ends once: with a `TransferError`, or well if all was copied already.
        """
        self._core.cancel(job_ids)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until the jobs are over; unknown ones are. Raises at the deadline.

        On a GPU they are over for what is put on the current stream afterwards.
        """
        with _Loud("wait", None):
            self.await_ends(job_ids)

    def await_ends(self, job_ids: Iterable[int]) -> None:
        """As `wait`, for a caller that deals with errors."""
        self._core.wait(job_ids)

    def drain(self) -> None:
        """Waits until no copy is under way. Raises at the deadline."""
        if not self._closed:
            if self.before_drain is not None:
                self.before_drain()
            with _Loud("drain", None):
                self._core.drain()

    def shutdown(self) -> None:
        """Lets the running copies end and gives the memory back. May be called again."""
        if self._offer is not None:
            self._offer.close()
        abandoned, stuck_threads = self._core.shutdown()
        if not self._closed and (abandoned or stuck_threads):
            compat.logger.error(
                "kvoffload: shut down with %d transfers given up (first: job %s) and %d threads "
                "that did not end; their memory stays mapped",
                len(abandoned),
                abandoned[0] if abandoned else "none",
                stuck_threads,
            )
        self._closed = True
        _release(self._name, self)

    def stats(self) -> dict[str, int]:
        """Counters of the Rust worker."""
        stats: dict[str, int] = self._core.stats()
        return stats

    def _say(self) -> None:
        for text in self._core.take_notices():
            compat.logger.warning("kvoffload: rank %d: %s", self._name[1], text)


class KvOffloadWorker(compat.WorkerBase):
    """The transfers of one rank as vLLM from 0.26 on wants them."""

    def __init__(self, transfers: RankTransfers) -> None:
        super().__init__()
        self.transfers = transfers

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Starts a copy from the GPU to the host."""
        return self.transfers.submit_store(job_id, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Starts a copy from the host to the GPU.

        `expedited` (0.33) asks not to queue behind other loads. Loads wait for no
        store, and long ones take turns: a new one is next.
        """
        return self.transfers.submit_load(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[Any]:
        """The transfers that are over, each once."""
        return self.transfers.finished()

    def wait(self, job_ids: set[int]) -> None:
        """Waits for jobs, which `get_finished` still reports."""
        self.transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Ends the transfers."""
        self.transfers.shutdown()


class DirectionHandler(compat.HandlerBase):
    """One direction of the transfers of one rank, as vLLM up to 0.24 wants them.

    vLLM sends every wait and every shutdown to both handlers, which is why these may repeat.
    """

    def __init__(self, transfers: RankTransfers, *, store: bool) -> None:
        super().__init__()
        self.transfers = transfers
        self._store = store

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Starts a copy from `spec[0]` to `spec[1]`.

        vLLM's router logs an exception as a warning and then fails an assertion; the error itself
        has been logged by then.
        """
        source, target = spec
        if self._store:
            return self.transfers.submit_store(job_id, source, target)
        return self.transfers.submit_load(job_id, source, target)

    def get_finished(self) -> list[Any]:
        """The transfers of this direction that are over, each once."""
        return self.transfers.finished(stores=self._store, loads=not self._store)

    def wait(self, job_ids: set[int]) -> None:
        """Waits for jobs of either direction."""
        self.transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Ends the transfers of both directions."""
        self.transfers.shutdown()


def _result(job_id: int, is_store: bool, size: int, seconds: float) -> Any:
    if compat.HAS_WORKERS:
        return compat.TransferResult(job_id, True, size, seconds)
    media = (_GPU_MEDIUM, compat.HOST_MEDIUM)
    return compat.TransferResult(job_id, True, size, seconds, media if is_store else media[::-1])


def _check_tensor(tensor: Any) -> None:
    if not tensor[:1].is_contiguous():
        raise ConfigError(
            f"a KV cache tensor has blocks that are not contiguous (shape {tuple(tensor.shape)}, "
            f"strides {tuple(tensor.stride())})",
            field="kv_caches",
            value=tuple(tensor.stride()),
            hint="Use another KV cache layout or attention backend.",
        )


def _claim(name: tuple[str, int], transfers: RankTransfers) -> None:
    with _live_lock:
        if name in _live:
            engine_id, rank = name
            raise WorkerExistsError(
                f"this process has a worker for engine {engine_id!r}, rank {rank}",
                field="rank",
                value=rank,
                hint="Shut that one down first, or give the engines different ids.",
            )
        _live[name] = transfers


def _release(name: tuple[str, int], transfers: RankTransfers) -> None:
    with _live_lock:
        if _live.get(name) is transfers:
            del _live[name]


class _Loud:
    """Logs an error of ours before it leaves: not every caller in vLLM shows it."""

    def __init__(self, action: str, job_id: int | None) -> None:
        self._action = action
        self._job_id = job_id

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KvOffloadError):
            job = error.job if self._job_id is None else self._job_id
            compat.logger.error(
                "kvoffload: %s failed, stopping: %s (%s, job %s)",
                self._action,
                error,
                type(error).__name__,
                job,
            )
