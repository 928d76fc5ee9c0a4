"""vLLM's sleep mode: no copy may be under way when the GPU's pages go.

Sleep mode gives the pages behind the KV cache back, and no interface of a spec is told (from 0.33
on, vLLM refuses the mode together with its offloading connector). So the allocator that is about to
do that first waits for the copies of every worker in its process.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol


class Drains(Protocol):
    """What has copies under way."""

    def drain(self) -> None:
        """Waits until they are over, or raises."""


_workers: weakref.WeakSet[Any] = weakref.WeakSet()


def drain_before_sleep(worker: Drains) -> bool:
    """Has sleep mode wait for a worker's copies, for as long as the worker lives.

    Returns:
        Whether this process has an allocator for sleep mode.
    """
    try:
        from vllm.device_allocator.cumem import CuMemAllocator
    except ImportError:
        return False
    allocator = CuMemAllocator.instance
    if allocator is None:
        return False
    _workers.add(worker)
    if not hasattr(allocator.sleep, "drains_kvoffload"):
        allocator.sleep = _after_draining(allocator.sleep)
    return True


def _after_draining(sleep: Any) -> Any:
    @functools.wraps(sleep)
    def drained(*args: Any, **kwargs: Any) -> Any:
        for worker in list(_workers):
            worker.drain()
        return sleep(*args, **kwargs)

    drained.drains_kvoffload = True  # type: ignore[attr-defined]
    return drained
