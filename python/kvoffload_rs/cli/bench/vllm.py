"""The installed vLLM's own copies between GPU and CPU memory, through its own handlers."""

from __future__ import annotations

import functools
import importlib
import os
import traceback
from typing import Any

from kvoffload_rs.cli.bench.cases import LAYERS, Geometry, Ids
from kvoffload_rs.cli.bench.device import Device
from kvoffload_rs.cli.bench.measure import Board, Finished


class VllmUnavailable(Exception):
    """Why vLLM's copies are not measured."""


def reason_of(error: Exception) -> str:
    """An error in one line; for a bare assertion the line of code that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error) or (frames[-1].line if frames else "") or "no reason given"
    return f"{type(error).__name__}: {' '.join(text.split())}"


class VllmCopies:
    """vLLM's classes, and one pinned pool that serves all fragment sizes.

    Raises:
        VllmUnavailable: vLLM is missing, or its API is another one.
    """

    def __init__(self, device: Device, pool: int) -> None:
        # vLLM logs to the standard output, where the rows go.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            self.version = str(importlib.import_module("vllm").__version__)
            worker = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
            base = importlib.import_module("vllm.v1.kv_offload.base")
            common = importlib.import_module("vllm.v1.kv_offload.cpu.common")
            self._handler = worker.SingleDirectionOffloadingHandler
            self._ref = base.CanonicalKVCacheRef
            self._gpu_ids = base.GPULoadStoreSpec
            self._host_ids = common.CPULoadStoreSpec
        except Exception as error:
            # Whatever an installed vLLM does when it is imported, our own figures are still wanted.
            raise VllmUnavailable(reason_of(error)) from error
        self._device = device
        torch = device.torch
        self._pool = torch.zeros(pool, dtype=torch.int8, pin_memory=True)

    def mover(self, board: Board) -> VllmMover:
        """vLLM's handlers over the board's tensors. Raises whatever another vLLM's may raise."""
        gpu = [tensor.view(self._device.torch.int8) for tensor in board.tensors]
        refs = [[self._ref(layer, board.geometry.fragment) for layer in range(LAYERS)]]
        # Lists of their own: a handler empties its lists when it is shut down.
        store, load = (
            self._handler(gpu[:], self._views(board.geometry), 1, refs, gpu_to_cpu)
            for gpu_to_cpu in (True, False)
        )
        return VllmMover(self._device, store, load, self._gpu_ids, self._host_ids)

    def _views(self, geometry: Geometry) -> list[Any]:
        """One tensor a layer, as vLLM lays them out."""
        layer = geometry.num_slots * geometry.fragment
        return [
            self._pool[index * layer : (index + 1) * layer].view(-1, geometry.fragment)
            for index in range(LAYERS)
        ]


class VllmMover:
    """vLLM's two handlers as one mover."""

    name = "vllm"

    def __init__(self, device: Device, store: Any, load: Any, gpu_ids: Any, host_ids: Any) -> None:
        self._torch = device.torch
        self._store, self._load = store, load
        self._make = {"gpu": gpu_ids, "host": host_ids}
        self._specs: dict[tuple[str, int], tuple[Ids[int], Any]] = {}
        # vLLM's stores wait for the current stream, which here has nothing to do.
        self._stream = device.torch.cuda.Stream()

    def used(self, direction: str) -> str | None:
        """What copies in this direction, `kernel` (Triton) or `dma`; for both: the loads."""
        handler = self._store if direction == "d2h" else self._load
        function = getattr(handler, "_swap_blocks_batch", None)
        if function is None:
            return None
        return "kernel" if isinstance(function, functools.partial) else "dma"

    def store(self, job: int, blocks: Ids[int], slots: Ids[int]) -> None:
        with self._torch.cuda.stream(self._stream):
            self._store.transfer_async(job, self._spec("gpu", blocks), self._spec("host", slots))

    def load(self, job: int, slots: Ids[int], blocks: Ids[int]) -> None:
        with self._torch.cuda.stream(self._stream):
            self._load.transfer_async(job, self._spec("host", slots), self._spec("gpu", blocks))

    def take(self) -> list[Finished]:
        results = self._store.get_finished() + self._load.get_finished()
        return [(done.job_id, done.transfer_size, done.transfer_time) for done in results]

    def close(self) -> None:
        self._store.shutdown()
        self._load.shutdown()

    def _spec(self, side: str, ids: Ids[int]) -> Any:
        # The scheduler makes these before the worker sees them, so they are not timed twice. The
        # ids are kept with their spec, because the key is their address.
        key = (side, id(ids))
        if key not in self._specs:
            numbers = list(ids)
            more: tuple[Any, ...] = ([len(numbers)], [0]) if side == "gpu" else ()
            self._specs[key] = (ids, self._make[side](numbers, *more))
        return self._specs[key][1]
