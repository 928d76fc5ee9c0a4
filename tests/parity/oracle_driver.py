"""Drives two offloading managers through the same whole life cycles and compares every answer.

One side is vLLM 0.32.0's own manager (the oracle). The other is ours, or a second vLLM manager, or
a broken one (which is how the driver itself is tested). A `Driver` makes up requests that share
prefixes, moves each of them through lookups, stores, loads and completions in a random order, and
raises `Divergence` at the first answer that differs, with the seed and the last operations.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from oracle_sides import (
    Divergence,
    Job,
    Request,
    Setup,
    Side,
    SlotMap,
    State,
    Tally,
    block_ids,
    events,
    rounded,
    show,
)
from oracle_traffic import Traffic
from vllm.v1.kv_offload.base import LookupResult

HISTORY = 20
STATE_EVERY = 150


class Driver:
    """Runs one random life of two managers. The same setup and seed give the same life."""

    def __init__(self, setup: Setup, seed: int, ours: Side, theirs: Side) -> None:
        self.setup, self.seed = setup, seed
        self.ours_side, self.theirs_side = ours, theirs
        self.ours, self.theirs = ours.manager, theirs.manager
        self.rng = random.Random(f"{setup}/{seed}")
        self.traffic = Traffic(setup, self.rng)
        self.tally = Tally()
        self.history: deque[tuple[object, ...]] = deque(maxlen=HISTORY)
        self.requests: list[Request] = []
        self.ended: deque[Request] = deque(maxlen=4)
        self.stores: list[Job] = []
        self.loads: list[Job] = []
        self.ready: dict[bytes, bool] = {}  # resident keys: True once their bytes are there
        self.our_slots, self.their_slots = SlotMap(), SlotMap()
        self.next_state_check = STATE_EVERY
        self.next_reset = self._some_time_ahead()
        self.hold_stores = self.hold_loads = False
        weighted: dict[Callable[[], None], int] = {
            self._lookup: 16,
            self._prepare_store: 20,
            self._complete_store: 18,
            self._prepare_load: 14,
            self._complete_load: 14,
            self._finish: 6,
            self._touch: 2,
            self._take_reports: 2,
            self._repeat_something_done: 1,
            self._misuse: 1,
            self._change_mood: 1,
        }
        self.actions, self.weights = list(weighted), list(weighted.values())

    # --- the run ---

    def run(self, operations: int) -> Tally:
        """Drive both sides for at least `operations` manager calls, then let all work end."""
        try:
            self._live(operations)
            self._drain()
        except Divergence:
            raise
        except Exception as error:
            self.fail("one side raised", repr(error), "(see the cause)", error)
        return self.tally

    def _live(self, operations: int) -> None:
        while self.tally.operations < operations:
            for action in self.rng.choices(self.actions, self.weights, k=64):
                if len(self.requests) < self.setup.live_requests and self.rng.random() < 0.3:
                    self._new_request()
                elif self.requests:
                    action()
                if self.tally.operations >= self.next_state_check:
                    self.next_state_check = self.tally.operations + STATE_EVERY
                    self.check_state()
            if self.tally.operations >= self.next_reset:
                self._reset()
                self.next_reset = self._some_time_ahead()

    def _some_time_ahead(self) -> int:
        """When to reset next: not before a pool of this size has seen some life."""
        usual = 1_000 + 8 * self.setup.slots
        return self.tally.operations + self.rng.randint(usual // 2, usual + usual // 2)

    def _drain(self) -> None:
        """Let every job and request end; then nothing may be pinned, written or lost."""
        self.hold_stores = self.hold_loads = False
        while self.stores or self.loads:
            self._complete_store()
            self._complete_load()
        while self.requests:
            self._finish()
        self._take_reports()
        state = self.check_state()
        for key, (_, status, pins) in state["keys"].items():
            self._expect(status == "ready" and pins == 0, "after the drain", key, status, pins)

    # --- failing well ---

    def fail(
        self, what: str, ours: object, theirs: object, cause: Exception | None = None
    ) -> NoReturn:
        lines = "\n".join(f"  {show(entry)}" for entry in self.history)
        raise Divergence(
            f"{what}\n  ours:   {show(ours)}\n  theirs: {show(theirs)}\n"
            f"{self.setup!r}, seed {self.seed}, operation {self.tally.operations}; "
            f"the last operations:\n{lines}"
        ) from cause

    def _same(self, what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            self.fail(what, ours, theirs)

    def _expect(self, condition: bool, what: str, *values: object) -> None:
        if not condition:
            self.fail(what, values, "(a rule that holds for any manager)")

    def note(self, *entry: object) -> None:
        self.tally.operations += 1
        self.history.append(entry)

    # --- traffic ---

    def _new_request(self) -> None:
        request = self.traffic.new_request(self.tally.resets)
        self.requests.append(request)
        if self.rng.random() < 0.95:  # the call comes first, but no decision hangs on it
            self.note("on_new_request", request.number)
            request.announced = True
            self._same(
                "on_new_request",
                self.ours.on_new_request(request.ours),
                self.theirs.on_new_request(request.theirs),
            )

    def some_keys(self, request: Request) -> list[bytes]:
        """Part of a request's keys."""
        return self.traffic.some_keys(request)

    def _in_some_collection(self, keys: list[bytes]) -> Collection[bytes]:
        """Completions carry a set in vLLM; the same object goes to both sides."""
        return set(keys) if self.rng.random() < 0.5 else keys

    def _change_mood(self) -> None:
        """Hold completions back for a while, so that pins pile up and calls are refused."""
        self.hold_stores = self.rng.random() < 0.35
        self.hold_loads = self.rng.random() < 0.35

    # --- one operation each ---

    def _lookup(self) -> None:
        request = self.rng.choice(self.requests)
        group = self.rng.choice(request.groups)
        backwards = self.rng.random() < 0.2  # a sliding window is searched from its end
        for key in reversed(group) if backwards else group:
            answer = self._lookup_one(request, key)
            if answer is LookupResult.MISS and self.rng.random() < 0.8:
                break

    def _lookup_one(self, request: Request, key: bytes) -> LookupResult:
        self.note("lookup", request.number, key)
        theirs = self.theirs.lookup(key, request.theirs)
        self._same("lookup", self.ours.lookup(key, request.ours), theirs)
        if theirs is LookupResult.HIT:
            self.tally.hits += 1
            self._same(
                "get_load_source",
                self.ours.get_load_source(key, request.ours),
                self.theirs.get_load_source(key, request.theirs),
            )
        elif theirs is LookupResult.MISS:
            self.tally.misses += 1
        else:
            self.tally.later += 1
        return theirs

    def _prepare_store(self) -> None:
        request = self.rng.choice(self.requests)
        keys = self.some_keys(request)
        if request.refused is not None and self.rng.random() < 0.6:
            keys, request.refused = request.refused, None  # the connector offers them again
        self.note("prepare_store", request.number, keys)
        ours = self.ours.prepare_store(list(keys), request.ours)
        target = getattr(self.theirs._policy, "target_t1_size", None)
        theirs = self.theirs.prepare_store(list(keys), request.theirs)
        self.tally.adaptations += target != getattr(self.theirs._policy, "target_t1_size", None)
        self._same("refusal of prepare_store", ours is None, theirs is None)
        if theirs is None:
            self.tally.refused += 1
            request.refused = keys
            self.check_state()
            return
        self._same("keys_to_store", ours.keys_to_store, theirs.keys_to_store)
        self._same("evicted_keys", ours.evicted_keys, theirs.evicted_keys)
        stored = theirs.keys_to_store
        wanted = set(stored)
        self._same("the caller's order", [key for key in keys if key in wanted], stored)
        for side, output in ((self.our_slots, ours), (self.their_slots, theirs)):
            side.drop(output.evicted_keys)
            self._take_slots(side, stored, block_ids(output.store_spec))
        for key in theirs.evicted_keys:
            del self.ready[key]
        self.ready.update(dict.fromkeys(stored, False))
        self.tally.stored += len(stored)
        self.tally.evicted += len(theirs.evicted_keys)
        if stored:
            self.stores.append(Job(request, stored, True))

    def _take_slots(self, side: SlotMap, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        self._expect(len(slots) == len(keys), "one slot for each key to store", keys, slots)
        for key, slot in zip(keys, slots, strict=True):
            self._expect(0 <= slot < self.setup.slots, "a slot of the pool", key, slot)
            self._expect(slot not in side.used, "a slot that no live key has", key, slot)
            side.used.add(slot)
            side.slot_of[key] = slot

    def _pop_job(self, jobs: list[Job]) -> Job:
        """Any job in flight, or a part of its keys: completions come in any order."""
        index = self.rng.randrange(len(jobs))
        job = jobs[index]
        if len(job.keys) > 1 and self.rng.random() < 0.1:
            cut = self.rng.randrange(1, len(job.keys))
            part = Job(job.request, job.keys[:cut], job.is_store)
            job.keys = job.keys[cut:]
            return part
        jobs[index] = jobs[-1]
        jobs.pop()
        return job

    def _complete_store(self) -> None:
        if not self.stores or (self.hold_stores and self.rng.random() < 0.9):
            return
        job = self._pop_job(self.stores)
        success = self.rng.random() < 0.85
        self.note("complete_store", job.request.number, job.keys, success)
        keys = self._in_some_collection(job.keys)
        if success and self.rng.random() < 0.5:  # the connector leaves the default in place
            self.ours.complete_store(keys, job.request.ours)
            self.theirs.complete_store(keys, job.request.theirs)
        else:
            self.ours.complete_store(keys, job.request.ours, success)
            self.theirs.complete_store(keys, job.request.theirs, success)
        if success:
            self.ready.update(dict.fromkeys(job.keys, True))
        else:
            self.tally.failed_stores += 1
            for key in job.keys:
                del self.ready[key]
            self.our_slots.drop(job.keys)
            self.their_slots.drop(job.keys)

    def _prepare_load(self) -> None:
        request = self.rng.choice(self.requests)
        keys = [key for key in self.some_keys(request) if self.ready.get(key)]
        if keys and self.rng.random() < 0.03:
            keys.append(self.rng.choice(keys))  # the same chunk twice in one job: two pins
        self.note("prepare_load", request.number, keys)
        ours = block_ids(self.ours.prepare_load(keys, request.ours))
        theirs = block_ids(self.theirs.prepare_load(keys, request.theirs))
        self._same("slots to load", ours, [self.our_slots.slot_of[key] for key in keys])
        self._same("slots to load", theirs, [self.their_slots.slot_of[key] for key in keys])
        self.tally.loaded += len(keys)
        if keys:
            self.loads.append(Job(request, keys, False))

    def _complete_load(self) -> None:
        if not self.loads or (self.hold_loads and self.rng.random() < 0.9):
            return
        job = self._pop_job(self.loads)
        self.note("complete_load", job.request.number, job.keys)
        keys: Collection[bytes] = job.keys
        if len(set(job.keys)) == len(job.keys):
            keys = self._in_some_collection(job.keys)
        self.ours.complete_load(keys, job.request.ours)
        self.theirs.complete_load(keys, job.request.theirs)

    def _finish(self) -> None:
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        if self.rng.random() < 0.1:  # positions may be told late
            self.traffic.set_positions(request, lambda order, i: (i + 1) * 16, 1.0)
        self.note("on_request_finished", request.number)
        self.ours.on_request_finished(request.ours)
        self.theirs.on_request_finished(request.theirs)
        self.tally.finished += 1
        request.finished = True
        self.ended.append(request)

    def _touch(self) -> None:
        request = self.rng.choice(self.requests)
        keys = self.some_keys(request)
        self.note("touch", request.number, keys)
        self.ours.touch(keys, request.ours)
        self.theirs.touch(keys, request.theirs)

    def _take_reports(self) -> None:
        self.note("take_events, get_stats")
        self._same("events", events(self.ours), events(self.theirs))
        ours, theirs = self.ours.get_stats(), self.theirs.get_stats()
        self._same("stats", rounded(ours.data), rounded(theirs.data))

    def _repeat_something_done(self) -> None:
        """Calls that come once too often and must do nothing: both sides allow them."""
        if self.ended and self.rng.random() < 0.5:
            request = self.rng.choice(self.ended)
            self.note("on_request_finished again", request.number)
            self.ours.on_request_finished(request.ours)
            self.theirs.on_request_finished(request.theirs)
            self._lookup_one(request, self.rng.choice(request.groups[0]))
            return
        request = self.rng.choice(self.requests)
        keys = [key for key in self.some_keys(request) if self.ready.get(key) is not False]
        success = self.rng.random() < 0.5
        self.note("complete_store of nothing in flight", request.number, keys, success)
        self.ours.complete_store(keys, request.ours, success)
        self.theirs.complete_store(keys, request.theirs, success)

    def _misuse(self) -> None:
        self.ours_side.check_misuse(self)
        self.theirs_side.check_misuse(self)

    def _reset(self) -> None:
        self.note("reset_cache")
        self.tally.resets += 1
        self.ours.reset_cache()
        self.theirs.reset_cache()
        self.ours_side.after_reset(self)
        self.theirs_side.after_reset(self)
        self.stores.clear()
        self.loads.clear()
        self.ready.clear()
        self.our_slots.clear()
        self.their_slots.clear()
        self.check_state()

    # --- whole state ---

    def check_state(self) -> State:
        ours, theirs = self.ours_side.state(), self.theirs_side.state()
        for name in theirs["resident"]:
            self._same(f"order of {name}", ours["resident"][name], theirs["resident"][name])
        for name in theirs["ghosts"]:
            self._same(f"ghosts {name}", ours["ghosts"].get(name, []), theirs["ghosts"][name])
        self._same("ARC's target", ours["target"], theirs["target"])
        for side, state in ((self.our_slots, ours), (self.their_slots, theirs)):
            self._same(
                "slots", {key: entry[0] for key, entry in state["keys"].items()}, side.slot_of
            )
        self._same(
            "states and pins",
            {key: entry[1:] for key, entry in ours["keys"].items()},
            {key: entry[1:] for key, entry in theirs["keys"].items()},
        )
        return ours
