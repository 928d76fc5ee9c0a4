"""The Rust worker behind `RankTransfers`: on a GPU, or on vLLM's CPU platform.

Both take the same jobs. On a GPU a job also needs the stream of the compute that it comes after:
PyTorch's current one, asked for at each submit on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvoffload_rs import _core
from kvoffload_rs.config import CUDA_FAULT_KEYS, HOST_FAULT_KEYS, Settings
from kvoffload_rs.errors import ConfigError

Shapes = Sequence[tuple[int, int, int, int]]
Groups = Sequence[Sequence[tuple[int, int]]]


class _Copies:
    """What both have in common: jobs as vLLM's specs describe them.

    Attributes:
        _core: the Rust worker.
    """

    _core: Any

    def _after(self) -> tuple[int, ...]:
        """What a job comes after, for its submit."""
        return ()

    def submit_store(self, job_id: int, gpu: Any, host: Any) -> None:
        """Queues a copy from blocks to slots."""
        self._core.submit_store(
            job_id,
            gpu.block_ids,
            gpu.group_sizes,
            gpu.block_indices,
            host.block_ids,
            *self._after(),
        )

    def submit_load(self, job_id: int, host: Any, gpu: Any) -> None:
        """Queues a copy from slots to blocks."""
        self._core.submit_load(
            job_id,
            host.block_ids,
            gpu.block_ids,
            gpu.group_sizes,
            gpu.block_indices,
            *self._after(),
        )

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Asks that the jobs be given up; never waits. Each still ends once."""
        self._core.cancel(job_ids)

    def take_outcomes(self) -> list[tuple[int, bool, int, float, Exception | None]]:
        """Job, whether it is a store, bytes, seconds and error of what is over, oldest first."""
        outcomes: list[tuple[int, bool, int, float, Exception | None]] = self._core.take_outcomes()
        return outcomes

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until the jobs are over; with a stream, until they are for what follows on it."""
        self._core.wait(job_ids, *self._after())


class HostCopies(_Copies):
    """Copies of KV caches in ordinary memory."""

    def __init__(
        self, shapes: Shapes, groups: Groups, tensors: list[Any], settings: Settings, **pool: Any
    ) -> None:
        self._core = _core.HostWorker(
            shapes,
            groups,
            # The worker's threads read and write through addresses: the tensors must live.
            keep_alive=tensors,
            verify=settings.verify,
            verify_sample=settings.verify_sample,
            wait_timeout_s=settings.wait_timeout_s,
            faults=_faults(settings, HOST_FAULT_KEYS, "a CPU"),
            **pool,
        )
        self.take_finished = self._core.take_finished
        self.take_region_fd = self._core.take_region_fd
        self.drain = self._core.drain
        self.shutdown = self._core.shutdown
        self.stats = self._core.stats

    def take_notices(self) -> list[str]:
        """Nothing: this backend has nothing to say."""
        return []

    def describe(self) -> str:
        """One line about how copies are made."""
        return "copies in ordinary memory"


def _stream_of(device: Any) -> Callable[[], int]:
    """What gives the handle of PyTorch's current stream on a device, once for every job.

    `torch.cuda.current_stream` makes an object each time, which takes 3 us, and 40 us where other
    work has taken its place in the processor's caches. What compiled models call is not public;
    where it is missing, the public function does.
    """
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)
    index = torch.cuda.current_device() if device.index is None else device.index
    return lambda: int(raw(index))


class CudaCopies(_Copies):
    """Copies of KV caches on one CUDA device."""

    def __init__(
        self, shapes: Shapes, groups: Groups, tensors: list[Any], settings: Settings, **pool: Any
    ) -> None:
        import torch

        device = tensors[0].device
        self._path = settings.copy_path
        self._core = _core.CudaWorker(
            shapes,
            groups,
            device=torch.cuda.current_device() if device.index is None else device.index,
            keep_alive=tensors,
            verify=settings.verify,
            verify_sample=settings.verify_sample,
            wait_timeout_s=settings.wait_timeout_s,
            copy_path=settings.copy_path,
            staging_bytes=settings.staging_bytes,
            pinning=settings.pinning,
            faults=_faults(settings, CUDA_FAULT_KEYS, "a GPU"),
            **pool,
        )
        self.take_finished = self._core.take_finished
        self.take_region_fd = self._core.take_region_fd
        self.drain = self._core.drain
        self.shutdown = self._core.shutdown
        self.stats = self._core.stats
        self.take_notices = self._core.take_notices
        self._stream = _stream_of(device)

    def _after(self) -> tuple[int, ...]:
        """What is on the current stream by now."""
        return (self._stream(),)

    def describe(self) -> str:
        """One line about how copies are made, and why so."""
        facts = self._core.calibration()
        text = f"copies on {facts['device']}"
        if not facts["staging"]:
            return f"{text}, direct path only"
        if self._path != "auto":
            return f"{text}, {self._path} path as set"
        if "seconds" not in facts:
            return f"{text}, paths not measured: fragments under 512 KiB are staged"
        parts = []
        for kind in ("store", "load"):
            table = facts[kind]
            rates = zip(
                facts["fragment_bytes"],
                table["path"],
                table["direct"],
                table["staged"],
                strict=True,
            )
            parts.append(
                f"{kind}s: "
                + ", ".join(
                    f"{size >> 10} KiB {path} ({direct / 1e9:.1f}, {staged / 1e9:.1f})"
                    for size, path, direct, staged in rates
                )
            )
        return f"{text}; path by fragment size (GB/s direct, staged): {'; '.join(parts)}"


def choose(tensors: list[Any]) -> type[HostCopies] | type[CudaCopies]:
    """The copies that suit the KV cache.

    Raises:
        ConfigError: it is on a device that is not supported, or on several.
    """
    devices = {str(tensor.device) for tensor in tensors}
    kinds = {tensor.device.type for tensor in tensors}
    if kinds == {"cpu"}:
        return HostCopies
    if kinds == {"cuda"} and len(devices) == 1 and not _is_rocm():
        return CudaCopies
    raise ConfigError(
        f"the KV cache is on {' and '.join(sorted(devices))}",
        field="device",
        value=", ".join(sorted(devices)),
        hint="kvoffload-rs needs it on one NVIDIA GPU per worker, or on vLLM's CPU platform.",
    )


def _is_rocm() -> bool:
    import torch

    return getattr(torch.version, "hip", None) is not None


def _faults(settings: Settings, known: frozenset[str], where: str) -> dict[str, Any] | None:
    faults = dict(settings.fault_injection or {})
    for key in faults:
        if key not in known:
            raise ConfigError(
                f"fault_injection: {key!r} cannot be injected on {where}",
                field="fault_injection",
                value=faults[key],
                hint=f"It may hold {', '.join(sorted(known))} there.",
            )
    return faults or None
