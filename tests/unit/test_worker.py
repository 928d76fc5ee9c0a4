"""The worker: bytes there and back, one worker per rank, and failures that are never hidden."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvoffload_rs.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    InvalidJobError,
    TransferError,
    VerifyError,
    WorkerExistsError,
)
from kvoffload_rs.vllm import compat, copies
from kvoffload_rs.vllm.manager import HostSlotsSpec
from kvoffload_rs.vllm.worker import DirectionHandler, KvOffloadWorker, RankTransfers
from shapes import BYTES_PER_BLOCK, MEMORY, PAGE, gpu_blocks, kv_caches, make_spec
from vllm.v1.kv_offload import base


def slots(*numbers: int) -> HostSlotsSpec:
    return HostSlotsSpec(list(numbers))


def finish(side: KvOffloadWorker | DirectionHandler, job_id: int) -> Any:
    """Waits for one job, which must be the only one, and gives its result."""
    side.wait({job_id})
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if done := side.get_finished():
            assert [result.job_id for result in done] == [job_id]
            return done[0]
        time.sleep(0.001)
    raise AssertionError(f"job {job_id} was never reported")


def test_bytes_there_and_back() -> None:
    made, caches = make_spec(), kv_caches()
    side = made.get_worker(caches)
    assert isinstance(side, base.OffloadingWorker)
    before = [canonical.tensor.clone() for canonical in caches.tensors]
    assert side.submit_store(0, gpu_blocks(1, 5), slots(3, 0)) is True
    result = finish(side, 0)
    assert result.success is True
    assert result.transfer_size == 2 * BYTES_PER_BLOCK
    assert 0 <= result.transfer_time < 10
    for canonical in caches.tensors:
        canonical.tensor.zero_()
    assert side.submit_load(1, slots(0, 3), gpu_blocks(2, 7), expedited=True) is True
    assert finish(side, 1).transfer_size == 2 * BYTES_PER_BLOCK
    for canonical, old_bytes in zip(caches.tensors, before, strict=True):
        assert torch.equal(canonical.tensor[2], old_bytes[5])
        assert torch.equal(canonical.tensor[7], old_bytes[1])
        assert not canonical.tensor[[0, 1, 3, 4, 5, 6]].any()
    assert side.get_finished() == []
    side.shutdown()


def test_two_blocks_per_chunk_from_the_middle_of_a_chunk() -> None:
    made, caches = make_spec(blocks_per_chunk=2), kv_caches()
    side = made.get_worker(caches)
    before = [canonical.tensor.clone() for canonical in caches.tensors]
    side.submit_store(0, gpu_blocks(0, 1, 2, 3), slots(4, 2))
    finish(side, 0)
    for canonical in caches.tensors:
        canonical.tensor.zero_()
    side.submit_load(1, slots(4, 2), gpu_blocks(5, 6, 7, first=1))
    assert finish(side, 1).transfer_size == 3 * BYTES_PER_BLOCK
    for canonical, old_bytes in zip(caches.tensors, before, strict=True):
        assert torch.equal(canonical.tensor[5:8], old_bytes[1:4])
        assert not canonical.tensor[:5].any()
    side.shutdown()


def test_both_handlers_of_the_older_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "HAS_WORKERS", False)
    monkeypatch.setattr(
        compat, "TransferResult", lambda *a: SimpleNamespace(
            job_id=a[0], success=a[1], transfer_size=a[2], transfer_time=a[3], transfer_type=a[4]
        )
    )  # fmt: skip
    made, caches = make_spec(), kv_caches()
    (gpu, host, stores), (host2, gpu2, loads) = made.get_handlers(caches)
    assert (gpu, host) == (gpu2, host2) == (base.GPULoadStoreSpec, HostSlotsSpec)
    before = [canonical.tensor.clone() for canonical in caches.tensors]
    assert stores.transfer_async(0, (gpu_blocks(1), slots(3))) is True
    loads.wait({0})
    assert loads.get_finished() == []  # the other direction's result is not taken away
    result = finish(stores, 0)
    assert result.transfer_type == ("GPU", "CPU")
    for canonical in caches.tensors:
        canonical.tensor.zero_()
    assert loads.transfer_async(1, (slots(3), gpu_blocks(2))) is True
    assert finish(loads, 1).transfer_type == ("CPU", "GPU")
    assert all(
        torch.equal(canonical.tensor[2], old_bytes[1])
        for canonical, old_bytes in zip(caches.tensors, before, strict=True)
    )
    for handler in (stores, loads):
        handler.shutdown()


def test_waiting_for_unknown_jobs() -> None:
    side = make_spec().get_worker(kv_caches())
    side.wait({17, 18})
    side.wait(set())
    side.shutdown()


def test_one_worker_per_engine_and_rank() -> None:
    first = make_spec(engine_id="e")
    side = first.get_worker(kv_caches())
    assert first.get_worker(kv_caches()) is side
    with pytest.raises(WorkerExistsError) as caught:
        make_spec(engine_id="e").get_worker(kv_caches())
    assert caught.value.field == "rank"
    assert "'e'" in str(caught.value)
    others = [make_spec(engine_id="e", rank=1, world_size=2), make_spec(engine_id="f")]
    sides = [other.get_worker(kv_caches()) for other in others]
    side.shutdown()
    second = make_spec(engine_id="e")
    replacement = second.get_worker(kv_caches())
    for each in (replacement, *sides):
        each.shutdown()


def test_a_worker_that_was_dropped_does_not_block_the_next() -> None:
    made = make_spec(engine_id="dropped")
    made.get_worker(kv_caches())
    del made
    make_spec(engine_id="dropped").get_worker(kv_caches()).shutdown()


def test_shutdown_of_an_old_worker_leaves_the_new_one_alone() -> None:
    made = make_spec(engine_id="again")
    first = made.get_worker(kv_caches())
    first.shutdown()
    second = made.get_worker(kv_caches())
    assert second is not first
    first.shutdown()
    with pytest.raises(WorkerExistsError):
        make_spec(engine_id="again").get_worker(kv_caches())
    second.shutdown()


def test_after_shutdown() -> None:
    side = make_spec().get_worker(kv_caches())
    side.shutdown()
    side.shutdown()
    with pytest.raises(EngineClosedError):
        side.submit_store(0, gpu_blocks(1), slots(0))


def test_nothing_half_made_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_spec(engine_id="half")

    def fail(*_: object, **__: object) -> None:
        raise CapacityError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(copies, "_core", SimpleNamespace(HostWorker=fail))
        for _ in range(2):
            with pytest.raises(CapacityError, match="no memory left"):
                made.get_worker(kv_caches())
    made.get_worker(kv_caches()).shutdown()


def test_an_unknown_device_is_refused_with_a_reason() -> None:
    caches = kv_caches()
    for canonical in caches.tensors:
        canonical.tensor = torch.empty((8, PAGE), dtype=torch.int8, device="meta")
    with pytest.raises(ConfigError) as caught:
        make_spec().get_worker(caches)
    assert caught.value.field == "device"
    assert caught.value.value == "meta"


def test_faults_of_the_other_backend_are_refused() -> None:
    made = make_spec({"cpu_bytes_to_use": MEMORY, "fault_injection": {"fail_path": "staged"}})
    with pytest.raises(ConfigError, match="fail_path"):
        made.get_worker(kv_caches())


def test_blocks_that_are_not_contiguous_are_refused() -> None:
    caches = kv_caches()
    caches.tensors[0].tensor = torch.zeros((8, PAGE * 2), dtype=torch.int8)[:, ::2]
    with pytest.raises(ConfigError) as caught:
        make_spec().get_worker(caches)
    assert caught.value.field == "kv_caches"


def test_a_rank_with_more_bytes_than_planned_is_refused() -> None:
    with pytest.raises(CapacityError, match="planned"):
        make_spec().get_worker(kv_caches(layers=4))


def test_padded_and_strided_blocks() -> None:
    """All layers in one tensor, as a packed layout has it: the stride is more than the page."""
    caches = kv_caches()
    packed = torch.randint(1, 127, (8, 4 * PAGE), dtype=torch.int8)
    for i, canonical in enumerate(caches.tensors):
        canonical.tensor = packed[:, i * PAGE : (i + 1) * PAGE]
    before = packed.clone()
    side = make_spec().get_worker(caches)
    side.submit_store(0, gpu_blocks(4), slots(1))
    finish(side, 0)
    packed.zero_()
    side.submit_load(1, slots(1), gpu_blocks(0))
    finish(side, 1)
    assert torch.equal(packed[0, : 3 * PAGE], before[4, : 3 * PAGE])
    assert not packed[0, 3 * PAGE :].any()
    assert not packed[1:].any()
    side.shutdown()


@pytest.mark.parametrize("wrong", ["slot", "block", "too few slots", "id in use"])
def test_a_bad_job_is_refused_and_named(wrong: str, logged: Any) -> None:
    extra = {"fault_injection": {"stall_job": 6}, "wait_timeout_s": 0.2}
    made = make_spec(extra if wrong == "id in use" else None)
    side = made.get_worker(kv_caches())
    if wrong == "id in use":
        side.submit_store(6, gpu_blocks(1), slots(0))
        arguments: tuple[Any, Any] = (gpu_blocks(2), slots(1))
    else:
        arguments = {
            "slot": (gpu_blocks(1), slots(made.num_slots)),
            "block": (gpu_blocks(8), slots(0)),
            "too few slots": (gpu_blocks(1, 2), slots(0)),
        }[wrong]
    with pytest.raises(InvalidJobError) as caught:
        side.submit_store(6, *arguments)
    assert caught.value.job == 6
    assert any("job 6" in r.getMessage() for r in logged.records if r.levelno == logging.ERROR)
    assert side.get_finished() == []
    side.shutdown()


def test_a_failed_copy_is_never_reported_as_done(logged: Any) -> None:
    side = make_spec({"fault_injection": {"fail_every_store": 1}}).get_worker(kv_caches())
    side.submit_store(5, gpu_blocks(1), slots(0))
    with pytest.raises(TransferError) as caught:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            assert side.get_finished() == []
    assert caught.value.job == 5
    assert any("job 5" in r.getMessage() for r in logged.records if r.levelno == logging.ERROR)
    side.shutdown()


def test_a_failure_does_not_take_other_results_with_it() -> None:
    side = make_spec({"fault_injection": {"fail_every_store": 2}}).get_worker(kv_caches())
    for job_id in range(4):
        side.submit_store(job_id, gpu_blocks(job_id), slots(job_id))
    failed, done = set(), set()
    deadline = time.monotonic() + 10
    while len(failed) + len(done) < 4 and time.monotonic() < deadline:
        try:
            done |= {result.job_id for result in side.get_finished()}
        except TransferError as error:
            failed.add(error.job)
    assert len(failed) == len(done) == 2
    assert failed | done == {0, 1, 2, 3}
    side.shutdown()


def take_outcomes(transfers: RankTransfers, count: int) -> list[Any]:
    """The ends of so many jobs, in the order in which they came."""
    outcomes: list[Any] = []
    deadline = time.monotonic() + 10
    while len(outcomes) < count and time.monotonic() < deadline:
        outcomes += transfers.outcomes()
        time.sleep(0.001)
    assert len(outcomes) == count
    return outcomes


def test_a_stalled_transfer_can_be_cancelled() -> None:
    made, caches = make_spec({"fault_injection": {"stall_job": 2}}), kv_caches()
    transfers = made.get_worker(caches).transfers
    transfers.submit_store(1, gpu_blocks(1), slots(0))
    assert [outcome[0] for outcome in take_outcomes(transfers, 1)] == [1]
    before = [canonical.tensor.clone() for canonical in caches.tensors]
    transfers.submit_load(2, slots(0), gpu_blocks(2))
    transfers.submit_store(3, gpu_blocks(2), slots(4))  # reads what job 2 writes
    time.sleep(0.05)
    assert transfers.outcomes() == []
    transfers.cancel({3, 17})
    (blocked,) = take_outcomes(transfers, 1)
    transfers.cancel([2])
    (stalled,) = take_outcomes(transfers, 1)
    for outcome, job_id, is_store in ((blocked, 3, True), (stalled, 2, False)):
        *facts, _seconds, error = outcome
        assert facts == [job_id, is_store, 0]
        assert type(error) is TransferError
        assert error.job == job_id
        assert "cancelled" in str(error)
    for canonical, old_bytes in zip(caches.tensors, before, strict=True):
        assert torch.equal(canonical.tensor, old_bytes)
    stats = transfers.stats()
    assert (stats["stores_cancelled"], stats["loads_cancelled"]) == (1, 1)
    assert (stats["store_failures"], stats["load_failures"]) == (0, 0)
    transfers.submit_load(4, slots(0), gpu_blocks(2))
    assert take_outcomes(transfers, 1)[0][4] is None
    for canonical, old_bytes in zip(caches.tensors, before, strict=True):
        assert torch.equal(canonical.tensor[2], old_bytes[1])
    transfers.cancel([4])
    transfers.shutdown()


def test_outcomes_name_failures_among_the_others_in_order() -> None:
    extra = {"fault_injection": {"fail_every_store": 3}, "verify": "all"}
    transfers = make_spec(extra).get_worker(kv_caches()).transfers
    for job_id in range(5):
        transfers.submit_store(job_id, gpu_blocks(job_id), slots(job_id))
    outcomes = take_outcomes(transfers, 5)
    transfers.submit_load(5, slots(2), gpu_blocks(7))
    outcomes += take_outcomes(transfers, 1)
    assert [(job_id, is_store, size) for job_id, is_store, size, *_ in outcomes] == [
        *((job_id, True, 0 if job_id == 2 else BYTES_PER_BLOCK) for job_id in range(5)),
        (5, False, 0),
    ]
    errors = [error for *_, error in outcomes]
    assert [type(error) for error in errors if error] == [TransferError, VerifyError]
    assert [(error.job, error.slot) for error in errors if error] == [(2, 2), (5, 2)]
    assert transfers.outcomes() == []
    assert transfers.finished() == []
    transfers.shutdown()


def test_what_is_left_is_ended_at_exit() -> None:
    """A process that forgets the shutdown ends, and its forked child leaves the parent's worker."""
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
from shapes import kv_caches, make_spec
from kvoffload_rs.vllm import worker
made = make_spec(engine_id="left").get_worker(kv_caches())
child = os.fork()
if child == 0:
    worker._shut_down_all()
    os._exit(int(made.transfers.closed))
_, status = os.waitpid(child, 0)
assert status == 0, "the child has ended the parent's worker"
assert not made.transfers.closed
worker._shut_down_all()
assert made.transfers.closed
print("ended")
"""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("ended")
