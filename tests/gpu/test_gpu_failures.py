"""Copies that fail: the other path, typed errors, and the end of a lost context."""

from __future__ import annotations

import pytest
from gpu_kit import Rig, run_script
from kvoffload_rs.errors import EngineClosedError, TransferError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("broken", ["direct", "staged"])
@pytest.mark.parametrize("chosen", ["auto", "itself"])
def test_a_path_that_fails_is_replaced_by_the_other(chosen: str, broken: str) -> None:
    path = broken if chosen == "itself" else "auto"
    with Rig([[4096, 100]], path=path, faults={"fail_path": broken}) as rig:
        rig.done(rig.store(range(16), range(16)))
        rig.done(rig.load(range(16), range(20, 36)))
        rig.check()
        if chosen == "itself":
            assert rig.core.stats()["retries"] >= 2


@pytest.mark.parametrize("piece", [1, 3])
def test_a_piece_that_fails_half_way(piece: int) -> None:
    """Other pieces of the job are in the queues by then; all of it is copied again."""
    faults = {"fail_piece": piece}
    with Rig([[4096] * 16], blocks=1024, slots=512, path="staged", faults=faults) as rig:
        rig.done(rig.store(range(512), range(512)))
        rig.done(rig.load(range(512), range(512, 1024)))
        rig.check()
        assert rig.core.stats()["retries"] == 2
        rig.done(rig.store(range(512), range(512)))
        rig.check()
        assert rig.core.stats()["retries"] == 2


@pytest.mark.parametrize("broken", ["direct", "staged"])
def test_a_path_that_keeps_failing_is_left_alone(broken: str) -> None:
    with Rig([[4096]], path=broken, faults={"fail_path": broken}) as rig:
        for _ in range(30):
            rig.done(rig.store(range(8), range(8)))
        rig.check()
        assert rig.core.stats()["retries"] == 8


def test_a_job_that_fails_on_both_paths_is_an_error_that_names_it(path: str) -> None:
    # No model: what a load that failed has left in its blocks is not defined.
    with Rig([[4096, 100]], path=path, model=False, faults={"fail_every_load": 3}) as rig:
        rig.done(rig.store(range(8), range(8)))
        jobs = [rig.load(range(8), range(20 + turn, 28 + turn)) for turn in (0, 8, 16, 24)]
        failures = rig.finish(*jobs)
        assert [error.job for error in failures] == [jobs[2]]
        assert isinstance(failures[0], TransferError) and str(jobs[2]) in str(failures[0])
        for turn in (0, 8, 24):
            assert rig.same(range(8), range(20 + turn, 28 + turn))
        assert rig.core.stats()["load_failures"] == 1
        rig.done(rig.load(range(8), range(36, 44)))


def test_after_shutdown_jobs_are_refused(path: str) -> None:
    rig = Rig([[4096]], path=path)
    rig.done(rig.store([0], [0]))
    assert rig.core.shutdown() == ([], 0)
    with pytest.raises(EngineClosedError):
        rig.load([0], [1])
    rig.core.shutdown()


def test_a_shutdown_in_the_middle_of_jobs(path: str) -> None:
    """What runs may end or be given up; nothing hangs, and no thread is left."""
    rig = Rig([[65536] * 8], blocks=1000, slots=400, path=path, model=False)
    for _ in range(20):
        rig.store(range(400), range(400))
    _, stuck = rig.core.shutdown()
    assert stuck == 0


def test_a_lost_context_is_an_error_and_not_a_hang(path: str) -> None:
    """A device-side assert of the engine's own kernels takes the context with it."""
    answer = run_script(LOST.replace("PATH", repr(path)))
    assert "TransferError" in answer["kinds"] or "EngineClosedError" in answer["kinds"], answer
    assert "CUDA_ERROR_" in answer["said"], answer
    assert answer["later"] in ("EngineClosedError", "TransferError"), answer


LOST = """
import json, time
from gpu_kit import Rig, torch
from kvoffload_rs.errors import KvOffloadError

rig = Rig([[4096, 100]], path=PATH, model=False)
rig.done(rig.store(range(8), range(8)))
index = torch.tensor([5], device="cuda")
values = torch.zeros(1, device="cuda")
try:
    values[index] = 1
    torch.cuda.synchronize()
    raise SystemExit("the assert did not fire")
except RuntimeError:
    pass

errors = []
def attempt(action):
    try:
        action()
    except KvOffloadError as error:
        errors.append(error)

def submit():
    rig.core.submit_load(77, gpu_ids(range(8)), gpu_ids(range(20, 28)), [8], [0], 0)

from gpu_kit import ids as gpu_ids
attempt(submit)
deadline = time.monotonic() + 20
while not errors and time.monotonic() < deadline:
    attempt(rig.core.take_finished)
    time.sleep(0.001)
before = len(errors)
def submit_later():
    rig.core.submit_store(78, gpu_ids(range(8)), [8], [0], gpu_ids(range(8)), 0)
attempt(submit_later)
deadline = time.monotonic() + 20
while len(errors) == before and time.monotonic() < deadline:
    attempt(rig.core.take_finished)
    time.sleep(0.001)
attempt(rig.core.shutdown)
kinds = [type(error).__name__ for error in errors]
print(json.dumps({
    "kinds": kinds,
    "said": " | ".join(map(str, errors)),
    "later": kinds[before] if len(kinds) > before else None,
}), flush=True)
"""
