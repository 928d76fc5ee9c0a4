"""The compiled module.

Errors are the classes of `kvoffload_rs.errors`. Keys are bytes of any length. A slot is a number
from 0 to `num_slots - 1`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, final

from typing_extensions import Buffer

__all__ = [
    "CudaWorker",
    "HostWorker",
    "KeyList",
    "Manager",
    "Request",
    "Requests",
    "build_info",
    "cuda_available",
    "cuda_unavailable_reason",
    "machine_memory",
    "slot_bytes",
]

@final
class KeyList(Sequence[bytes]):
    """Keys that become `bytes` when they are looked at. Equal to any sequence of the same keys."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> bytes: ...  # type: ignore[override]
    def __eq__(self, other: object, /) -> bool: ...

@final
class Request:
    """One request's accesses and pins. The caller keeps it for as long as the request lives."""

    @property
    def pins(self) -> int:
        """Loads and stores of keys in progress, which this request must still complete."""

@final
class Manager:
    """Which keys the host pool holds, and which go when room is needed."""

    def __new__(
        cls,
        num_slots: int,
        *,
        policy: str = "lru",
        events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        partial_admission: bool = False,
        write_deadline_s: float = 600.0,
        answers: tuple[object, object, object] | None = None,
    ) -> Self:
        """Makes a manager of an empty pool.

        Args:
            num_slots: slots of the pool, at least 1.
            policy: `lru` or `arc`.
            events: collect what `take_events` gives.
            store_threshold: how often a key is offered before it is stored; 0 and 1 store at once.
            max_tracker_size: how many keys that are not stored are counted.
            partial_admission: store the first keys that fit instead of all or none.
            write_deadline_s: a key whose store is older (to a tenth of a second) and not complete
                counts as absent.
            answers: what `lookup` gives for an absent key, a readable one, and one being written;
                False, True and None if it is not given.

        Raises:
            ConfigError: a value is out of range, or the policy is unknown.
        """

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""

    @property
    def policy(self) -> str:
        """Name of the eviction policy."""

    def new_request(self) -> Request:
        """A handle for a new request."""

    def lookup(self, key: bytes, request: object = None, /) -> object:
        """One of `answers`. The second argument is not looked at; vLLM passes one."""

    def lookup_function(self) -> Callable[..., object]:
        """`lookup` as a function of its own: some 25 ns less per call than the method."""

    def lookup_run(self, keys: Sequence[bytes]) -> tuple[int, bool]:
        """How many of the first keys are readable, and whether the next one is being written."""

    def prepare_store(
        self, keys: Sequence[bytes], request: Request
    ) -> tuple[list[bytes], bytes, KeyList] | None:
        """Takes a slot for every key that is to be stored.

        Returns:
            The keys to store in the order given, their slots as native 32-bit integers, and the
            keys evicted for them. None if there is no room: nothing has changed then.
        """

    def complete_store(self, keys: Iterable[bytes], request: Request, success: bool = True) -> None:
        """Makes keys readable, or gives their slots back. A key that is not pending is ignored."""

    def prepare_load(self, keys: Sequence[bytes], request: Request) -> bytes:
        """Pins keys and gives their slots in the same order, as native 32-bit integers.

        Raises:
            KeyNotReadyError: one of them is absent or being written; nothing is pinned.
        """

    def complete_load(self, keys: Iterable[bytes], request: Request) -> None:
        """Gives the pins of one load back.

        Raises:
            StaleHandleError: a key is not pinned by this request and no reset came between.
        """

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks keys as used, the first one most recently."""

    def finish_request(self, request: Request, positions: dict[bytes, int] | None = None) -> None:
        """Applies the request's accesses to the policy, once.

        Args:
            request: the request.
            positions: the end token of each key, which gives the order of its keys.
        """

    def reset(self) -> None:
        """Forgets every key. Pins and pending stores from before are void."""

    def take_events(self) -> list[tuple[list[bytes], bool]]:
        """What was stored (False) and removed (True) since the last call."""

    def stats(self) -> dict[str, int]:
        """Counts, among them `slots`, `free`, `ready`, `writing`, `pinned` and `evictable`."""

    def take_allocation_sizes(self) -> list[int]:
        """The number of slots asked for by each store since the last call."""

    def take_stores_skipped(self) -> int:
        """How many keys were not stored since the last call because of the threshold."""

    def metadata_bytes(self) -> int:
        """Memory of index, policy and pool."""

    def debug_state(self) -> dict[str, object]:
        """The policy's lists of keys, for tests."""

@final
class Requests:
    """What a connector's scheduler side knows of its requests, and decides for them.

    One engine step: `lookup` and `allocated` for requests that wait, `step` for what runs, `report`
    for what the workers did, `finish` for requests that end.
    """

    def __new__(
        cls,
        groups: Sequence[tuple[int, int, str, int, bool]],
        *,
        num_slots: int,
        blocks_per_chunk: int,
        tokens_per_hash: int,
        num_ranks: int = 1,
        one_region: bool = False,
        prompt_only: bool = True,
        share_loads: bool = True,
        defer_deadline_s: float = 2.0,
        max_jobs: int = 4096,
        policy: str = "lru",
        events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
        write_deadline_s: float = 600.0,
    ) -> Self:
        """Makes an empty table over an empty pool.

        Args:
            groups: per KV group (number, tokens per block, span, tokens of the span, draft model).
                The span is `full`, `window`, `local` or `state`.
            num_slots: slots of the pool, at least 1.
            blocks_per_chunk: GPU blocks in a chunk.
            tokens_per_hash: tokens that one block hash covers.
            num_ranks: ranks that report each job.
            one_region: the ranks share one host region, to which one of them stores for all.
            prompt_only: store prompts only.
            share_loads: a request waits while another one loads what it needs.
            defer_deadline_s: the longest that a request is put off.
            max_jobs: no store begins while so many jobs are under way.
            policy: `lru` or `arc`.
            events: collect what `take_events` gives.
            store_threshold: how often a chunk is offered before it is stored.
            max_tracker_size: how many chunks that are not stored are counted.
            write_deadline_s: a chunk whose store is older and not complete counts as absent.

        Raises:
            ConfigError: a value makes no sense.
        """

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, and those that have but whose jobs have not."""

    @property
    def num_jobs(self) -> int:
        """Jobs that some rank has still to report."""

    def add(
        self,
        name: str,
        prompt_tokens: int,
        *,
        max_load_tokens: int | None = None,
        max_store_tokens: int | None = None,
        skip_load: bool = False,
        skip_store: bool = False,
        low_priority: bool = False,
    ) -> None:
        """A request arrives.

        Args:
            name: unique while the request lives.
            prompt_tokens: tokens of its prompt.
            max_load_tokens: the most to load for it.
            max_store_tokens: the most to store of it.
            skip_load: never load.
            skip_store: never store.
            low_priority: its chunks take free slots only.

        Raises:
            RequestError: the name is in use.
        """

    def lookup(
        self, name: str, hashes: list[bytes], computed: int, total: int
    ) -> tuple[int | None, str | None]:
        """How many tokens beyond the computed ones can be loaded.

        The request starts again: its blocks are forgotten.

        Args:
            name: of the request.
            hashes: its block hashes; those known already are not looked at.
            computed: tokens that the GPU has.
            total: tokens of the request.

        Returns:
            (tokens, why not more), or (None, what it waits for): ask again with the next step.

        Raises:
            RequestError: the request is not known, or a hash has another length than before.
        """

    def allocated(self, name: str, groups: Iterable[Iterable[Any]], external: int) -> None:
        """The engine gave blocks to a request; begins the load of so many tokens.

        Args:
            name: of the request.
            groups: per KV group all its blocks: objects with `block_id` and `block_hash`.
            external: tokens to load, 0 for none.

        Raises:
            RequestError: the request is not known, or has another number of groups.
        """

    def step(
        self,
        new: list[tuple[str, tuple[list[int], ...], int]],
        names: list[str],
        added: list[tuple[list[int], ...] | None],
        computed: list[int],
        resumed: set[str] | None,
        preempted: Iterable[str] | None,
        written: list[int],
        moved: list[int],
        scheduled: dict[str, int],
        requests: dict[str, Any],
    ) -> tuple[
        list[tuple[int, str, bytes, list[int], list[int], bytes]],
        list[tuple[int, str, bytes, list[int], list[int], bytes]],
        list[int],
        list[int],
        list[int],
    ]:
        """What runs in a step; begins stores of what it computes. Unknown requests are ignored.

        Args:
            new: (name, block ids per group, computed tokens) of requests with whole tables.
            names: of the others.
            added: their new block ids per group, or None.
            computed: their computed tokens.
            resumed: those among them with whole tables.
            preempted: requests that lost their blocks.
            written: blocks that are cleared, or copied into, before the forward pass.
            moved: blocks that may have been replaced in a request's table.
            scheduled: tokens of each in this step.
            requests: objects with `block_hashes`, by name.

        Returns:
            (loads, stores, jobs that must have read their blocks before this step writes them,
            those of them that must fail all the same, loads that must fail). A job is (number,
            request, blocks as native int32, blocks per group, position of each group's first
            block, slots as native int32); no slots: it must fail.
        """

    def finish(self, name: str, hashes: list[bytes], computed: int) -> None:
        """A request has ended; what is left of its first `computed` tokens is stored.

        Raises:
            RequestError: the request is not known.
        """

    def report(
        self, reports: list[tuple[int, int, str | None]]
    ) -> list[tuple[int, bool, str | None, int, list[tuple[int, str]], bool]]:
        """Takes (rank, job, why it failed or None).

        Reports of jobs that are over, or that the rank has reported, are counted and ignored.

        Returns:
            (job, whether it is a store, its request unless that is over, chunks, (rank, reason) of
            failures, whether a reset had voided it) of each job that all ranks have reported.
        """

    def reset(self, fail_loads: bool) -> int:
        """Empties the pool; nothing from before is stored or found again.

        Args:
            fail_loads: loads under way will fail; otherwise they go on.

        Returns:
            how many loads are under way.
        """

    def has_work(self) -> bool:
        """Whether something is under way that needs the engine to go on stepping."""

    def stats(self) -> dict[str, int]:
        """Counts of lookups, deferrals, reasons and jobs since the start."""

    def metrics(self) -> dict[str, int]:
        """What is published: `stats`, and some of `pool_stats` as `pool_*`."""

    def pool_stats(self) -> dict[str, int]:
        """Sizes and counts of the pool, as `Manager.stats`."""

    def take_allocation_sizes(self) -> list[int]:
        """Chunks asked for by each store since the last call."""

    def take_stores_skipped(self) -> int:
        """Chunks not stored because they were not offered often enough, since the last call."""

    def take_events(self) -> list[tuple[list[bytes], bool]]:
        """(keys, whether they are gone) of everything stored or evicted since the last call."""

    def debug_state(self) -> dict[str, object]:
        """The whole state of the pool, for tests; as `Manager.debug_state`."""

    def validate(self) -> None:
        """Checks what ties requests, jobs, blocks and pool together, for tests.

        Raises:
            KvOffloadError: something does not hold.
        """

@final
class HostWorker:
    """One rank's host region, and the threads that copy to and from it."""

    def __new__(
        cls,
        tensors: Sequence[tuple[int, int, int, int]],
        groups: Sequence[Sequence[tuple[int, int]]],
        *,
        blocks_per_chunk: int,
        num_slots: int,
        slot_bytes: int,
        keep_alive: object = None,
        verify: str = "off",
        verify_sample: int = 16,
        wait_timeout_s: float = 60.0,
        share_region: bool = False,
        join_region: int | None = None,
        faults: dict[str, object] | None = None,
    ) -> Self:
        """Makes the region and starts the threads.

        Args:
            tensors: address, number of blocks, bytes from block to block, and bytes of a page
                (padding included), for each KV cache tensor.
            groups: for each KV group, index of a tensor and bytes to copy (no padding), for each
                layer.
            blocks_per_chunk: GPU blocks of one chunk.
            num_slots: slots of the region.
            slot_bytes: bytes of one slot, at least what `slot_bytes` gives.
            keep_alive: kept until the threads have ended, such as the tensors.
            verify: `off`, `sample` or `all`: which loads are checked against the stored bytes.
            verify_sample: with `sample`, one slot of so many is checked.
            wait_timeout_s: how long `wait` waits.
            share_region: make a region that others can join, with `take_region_fd`.
            join_region: descriptor of such a region, which is then only read: there are no stores,
                and nothing is verified.
            faults: faults to inject, for tests.

        Raises:
            ConfigError: the layout or a value makes no sense.
            CapacityError: there is not enough memory.
        """

    def submit_store(
        self,
        job_id: int,
        block_ids: Buffer,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        slots: Buffer,
    ) -> None:
        """Starts copying blocks to slots.

        Args:
            job_id: a number that no unfinished job has.
            block_ids: GPU blocks, group after group (32 or 64-bit integers).
            group_sizes: blocks of each group.
            block_indices: logical index of the first block of each group in its request.
            slots: one slot for each chunk, group after group (32 or 64-bit integers).

        Raises:
            InvalidJobError: the job does not fit the layout; nothing was submitted.
            EngineClosedError: after `shutdown`.
        """

    def submit_load(
        self,
        job_id: int,
        slots: Buffer,
        block_ids: Buffer,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> None:
        """Starts copying slots to blocks; arguments and errors as for `submit_store`."""

    def take_finished(self) -> list[tuple[int, bool, int, float]]:
        """Job, whether it is a store, bytes and seconds of what is over since the last call.

        Raises:
            TransferError: a job failed. Each failure is raised once; what succeeded comes with the
                next call.
        """

    def take_outcomes(self) -> list[tuple[int, bool, int, float, Exception | None]]:
        """Job, whether it is a store, bytes, seconds and error of what is over since the last call.

        Oldest first. The error is None when every byte arrived; otherwise it is what
        `take_finished` would raise, and what the job was to write must not be used.
        """

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Asks that jobs be given up; unknown ids are ignored. Never waits.

        Each still ends once: with a TransferError, or well if all was copied already. It ends soon,
        whatever it waits for, and no copy of it is begun any more; one that is under way runs to
        its end first. What a cancelled store was to write counts as not stored.
        """

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until jobs are over; unknown ids are ignored. They stay in `take_finished`.

        Raises:
            TransferTimeoutError: they were not over in time.
        """

    def drain(self) -> None:
        """Waits until no job is live of those that are now.

        Raises:
            TransferTimeoutError: some were not over in time.
        """

    def take_region_fd(self) -> int | None:
        """Descriptor with which other workers join a shared region; once. The caller closes it."""

    @property
    def region_address(self) -> int:
        """Address of the region's first byte, for tests and debuggers. Unmapped by `shutdown`."""

    def shutdown(self) -> tuple[list[int], int]:
        """Lets running copies end, ends the threads and gives the memory back.

        Copies that do not end within `wait_timeout_s` (10 seconds at most) are given up.

        Returns:
            The jobs that were given up, and how many threads could not be ended.
        """

    def stats(self) -> dict[str, int]:
        """Counts of jobs, bytes and faults."""

@final
class CudaWorker:
    """One rank's pinned host region, and the threads that copy between it and a GPU."""

    def __new__(
        cls,
        tensors: Sequence[tuple[int, int, int, int]],
        groups: Sequence[Sequence[tuple[int, int]]],
        *,
        device: int,
        blocks_per_chunk: int,
        num_slots: int,
        slot_bytes: int,
        keep_alive: object = None,
        verify: str = "off",
        verify_sample: int = 16,
        wait_timeout_s: float = 60.0,
        copy_path: str = "auto",
        staging_bytes: int = ...,
        pinning: str = "register",
        share_region: bool = False,
        join_region: int | None = None,
        kernel_blocks: int | None = None,
        faults: dict[str, object] | None = None,
    ) -> Self:
        """Makes the region and starts the threads; memory is registered in the background.

        Args:
            tensors: as for `HostWorker`, with addresses in the device's memory.
            groups: as for `HostWorker`.
            device: number of the device, as PyTorch numbers it.
            blocks_per_chunk: GPU blocks of one chunk.
            num_slots: slots of the region.
            slot_bytes: bytes of one slot, at least what `slot_bytes` gives.
            keep_alive: kept until the threads have ended, such as the tensors.
            verify: `off`, `sample` or `all`: which loads are checked against the stored bytes.
            verify_sample: with `sample`, one slot of so many is checked.
            wait_timeout_s: how long `wait` waits.
            copy_path: `direct`, `staged`, or `auto` for the faster one by a measurement at start.
            staging_bytes: device memory of the staged path (64 MiB); 0 for none.
            pinning: `register` the region's pages, have the driver `allocate` them, or `none`.
            share_region: make a region that others can join, with `take_region_fd`.
            join_region: descriptor of such a region, which is then only read: there are no stores,
                and nothing is verified.
            kernel_blocks: the most warps of the staging kernel, for measurements.
            faults: faults to inject, for tests.

        Raises:
            CudaUnavailableError: there is no driver or device, or the driver is too old.
            ConfigError: the layout or a value makes no sense.
            CapacityError: there is not enough memory.
        """

    def submit_store(
        self,
        job_id: int,
        block_ids: Buffer,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        slots: Buffer,
        stream: int,
    ) -> None:
        """Starts copying blocks to slots, after everything that is on the stream by now.

        Args:
            job_id: a number that no unfinished job has.
            block_ids: GPU blocks, group after group (32 or 64-bit integers).
            group_sizes: blocks of each group.
            block_indices: logical index of the first block of each group in its request.
            slots: one slot for each chunk, group after group (32 or 64-bit integers).
            stream: handle of a stream of the device; 0 is the default stream.

        Raises:
            InvalidJobError: the job does not fit the layout; nothing was submitted.
            EngineClosedError: after `shutdown`, or after the CUDA context was lost.
            TransferError: the driver refused to record an event; nothing was submitted.
        """

    def submit_load(
        self,
        job_id: int,
        slots: Buffer,
        block_ids: Buffer,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        stream: int,
    ) -> None:
        """Starts copying slots to blocks; arguments and errors as for `submit_store`."""

    def take_finished(self) -> list[tuple[int, bool, int, float]]:
        """Job, whether it is a store, bytes and seconds of what is over since the last call.

        Raises:
            TransferError: a job failed. Each failure is raised once; what succeeded comes with the
                next call.
        """

    def take_outcomes(self) -> list[tuple[int, bool, int, float, Exception | None]]:
        """Job, whether it is a store, bytes, seconds and error of what is over since the last call.

        Oldest first. The error is None when every byte arrived; otherwise it is what
        `take_finished` would raise, and what the job was to write must not be used.
        """

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Asks that jobs be given up; unknown ids are ignored. Never waits.

        Each still ends once: with a TransferError, or well if all was copied already. It ends soon,
        whatever it waits for, and no copy of it is begun any more; one that is under way runs to
        its end first. What a cancelled store was to write counts as not stored.
        """

    def wait(self, job_ids: Iterable[int], stream: int | None = None) -> None:
        """Waits until jobs are over; unknown ids are ignored. They stay in `take_finished`.

        With a stream it only waits until their copies are in the device's queues, and has the
        stream wait for them: what is put on it afterwards finds them done.

        Raises:
            TransferTimeoutError: they were not over in time.
        """

    def drain(self) -> None:
        """Waits until no job is live of those that are now.

        Raises:
            TransferTimeoutError: some were not over in time.
        """

    def take_region_fd(self) -> int | None:
        """Descriptor with which other workers join a shared region; once. The caller closes it."""

    @property
    def region_address(self) -> int:
        """Address of the region's first byte, for tests and debuggers. Unmapped by `shutdown`."""

    def shutdown(self) -> tuple[list[int], int]:
        """Lets running copies end, ends the threads and gives the memory back.

        Copies that do not end within `wait_timeout_s` (10 seconds at most) are given up.

        Returns:
            The jobs that were given up, and how many threads could not be ended.
        """

    def stats(self) -> dict[str, int]:
        """Counts of jobs, bytes, paths and faults.

        Those of `HostWorker`, and `direct_jobs`, `staged_jobs`, `retries`, `pieces`,
        `switched_pieces`, `row_copies`, `registration_waits`, `registered_bytes`, `region_bytes`,
        `touch_us`, `longest_touch_us`, `register_us`, `longest_register_us` and `device_lost`.
        """

    def take_notices(self) -> list[str]:
        """What an operator should read, each text once."""

    def calibration(self) -> dict[str, Any]:
        """What was measured at the start.

        `device` and `staging`; and unless the path was set: `seconds`, `fragment_bytes`, and for
        `store` and `load` the rates `direct` and `staged` in bytes per second, and the `path` that
        a long job takes, for each fragment size.
        """

def cuda_available() -> bool:
    """Whether a CUDA driver and a device are there. Makes no context."""

def cuda_unavailable_reason() -> str | None:
    """Why CUDA cannot be used here; None where it can."""

def slot_bytes(groups: Sequence[Sequence[tuple[int, int]]], blocks_per_chunk: int) -> int:
    """Bytes of one slot: what the largest group needs for a chunk, in whole units of 64.

    From 256 KiB on, in whole pages of 4096.

    Args:
        groups: as for `HostWorker`.
        blocks_per_chunk: GPU blocks of one chunk.
    """

def machine_memory() -> tuple[int, str]:
    """The machine's memory or the tightest control group's limit, whichever is less.

    Returns:
        The bytes, and the file that says so. It does not depend on what is in use.

    Raises:
        OSError: the machine's memory cannot be read.
    """

def build_info() -> dict[str, str]:
    """How the module was built."""
