"""Our manager behind the driver's `Side`, with the calls that only ours survives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oracle_driver import Driver
    from oracle_sides import Setup, State


class OurSide:
    """`KvOffloadManager`, as vLLM's connector sees it."""

    def __init__(self, setup: Setup) -> None:
        from kvoffload_rs.vllm.manager import KvOffloadManager

        self.manager: Any = KvOffloadManager(
            setup.slots,
            policy=setup.policy,
            events=setup.events,
            store_threshold=setup.store_threshold,
            max_tracker_size=setup.max_tracker_size,
        )

    def state(self) -> State:
        """The state as the core tells it."""
        return self.manager._core.debug_state()

    def check_misuse(self, driver: Driver) -> None:
        """Typed errors and no-ops where vLLM asserts: nothing may change."""
        from kvoffload_rs.errors import KeyNotReadyError, StaleHandleError

        request = driver.rng.choice(driver.requests)
        keys = driver.some_keys(request)
        if any(not driver.ready.get(key) for key in keys):
            driver.note("prepare_load of unreadable keys", request.number, keys)
            must_raise(
                driver, KeyNotReadyError, lambda: self.manager.prepare_load(keys, request.ours)
            )
        pinned = {key for job in driver.loads if job.request is request for key in job.keys}
        if request.resets != driver.tally.resets:
            # It may have held loads before the reset, whose completions are only counted.
            unpinned = [key for key in keys if key not in pinned]
            if request.announced:
                driver.note("complete_load from before a reset", request.number, unpinned)
                self.manager.complete_load(unpinned, request.ours)
        elif any(key not in pinned for key in keys):
            driver.note("complete_load of unpinned keys", request.number, keys)
            must_raise(
                driver, StaleHandleError, lambda: self.manager.complete_load(keys, request.ours)
            )
        owned = {key for job in driver.stores if job.request is request for key in job.keys}
        foreign = [key for key in keys if key not in owned]
        driver.note("complete_store of foreign keys", request.number, foreign)
        self.manager.complete_store(foreign, request.ours, driver.rng.random() < 0.5)
        driver.check_state()

    def after_reset(self, driver: Driver) -> None:
        """Completions of jobs that the reset cut off may still come, and change nothing."""
        for job in driver.stores:
            self.manager.complete_store(job.keys, job.request.ours, driver.rng.random() < 0.5)
        for job in driver.loads:
            self.manager.complete_load(job.keys, job.request.ours)


def must_raise(driver: Driver, error: type[Exception], call: Callable[[], object]) -> None:
    """Let the driver fail, with its history, if the call does not raise this error."""
    try:
        call()
    except error:
        return
    driver.fail("misuse", "no error", error.__name__)
