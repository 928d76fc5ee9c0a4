"""Sleep mode waits for copies before it gives GPU pages back."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvoffload_rs.errors import TransferTimeoutError
from kvoffload_rs.vllm import sleep
from vllm.device_allocator import cumem


class Allocator:
    """Notes what happens."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def sleep(self, offload_tags: str | None = None) -> None:
        """Gives pages back."""
        self.log.append(f"sleep {offload_tags}")


class Worker:
    """Notes that it was drained."""

    def __init__(self, log: list[str], error: Exception | None = None) -> None:
        self.log, self.error = log, error

    def drain(self) -> None:
        """Waits for nothing."""
        self.log.append("drain")
        if self.error:
            raise self.error


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Allocator([])
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", made)
    return made


def test_every_worker_is_drained_first(allocator: Allocator) -> None:
    workers = [Worker(allocator.log), Worker(allocator.log)]
    assert all(sleep.drain_before_sleep(worker) for worker in workers)
    allocator.sleep("weights")
    assert allocator.log == ["drain", "drain", "sleep weights"]
    del workers
    gc.collect()
    allocator.sleep()
    assert allocator.log[3:] == ["sleep None"], "workers that are gone are not asked"


def test_copies_that_do_not_end_keep_the_pages(allocator: Allocator) -> None:
    worker = Worker(allocator.log, TransferTimeoutError("not over"))
    sleep.drain_before_sleep(worker)
    with pytest.raises(TransferTimeoutError):
        allocator.sleep()
    assert allocator.log == ["drain"]


def test_without_sleep_mode_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    assert not sleep.drain_before_sleep(Worker([]))
